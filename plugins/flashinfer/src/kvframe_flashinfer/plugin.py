"""The manifest: what this distribution adds to kvframe, by import string."""

from __future__ import annotations

from kvframe.contract import Register, hookimpl


@hookimpl
def kvframe_register_backends(register: Register) -> None:
    """Register the backends of keys and values, and of latents."""
    for name, target in (
        ("flashinfer", "backend:FlashInferBackend"),
        ("flashinfer_mla", "latents:FlashInferMLABackend"),
    ):
        register(
            name,
            f"kvframe_flashinfer.{target}",
            needs=("torch", "flashinfer"),
            install="pip install 'flashinfer-python>=0.6.9'",
            needs_versions="flashinfer-python>=0.6.9",
        )
