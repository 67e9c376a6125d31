"""The manifest: what this distribution adds to kvframe, by import string."""

from __future__ import annotations

from kvframe.contract import Register, hookimpl


@hookimpl
def kvframe_register_backends(register: Register) -> None:
    """Register a backend for each of the two libraries."""
    register(
        "flash_attn",
        "kvframe_flash_attn.backend:FlashAttnBackend",
        needs=("torch", "flash_attn"),
        install="pip install flash-attn --no-build-isolation",
        needs_versions="flash-attn>=2.8",
    )
    register(
        "flash_attn_3",
        "kvframe_flash_attn.backend_3:FlashAttn3Backend",
        needs=("torch", "flash_attn_interface"),
        install="the folder hopper of https://github.com/Dao-AILab/flash-attention",
    )
