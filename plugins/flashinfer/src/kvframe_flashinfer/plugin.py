"""The manifest: what this distribution adds to kvframe, by import string."""

from __future__ import annotations

from kvframe.hookspecs import Register, hookimpl


@hookimpl
def kvframe_register_backends(register: Register) -> None:
    """Register the backend."""
    register(
        "flashinfer",
        "kvframe_flashinfer.backend:FlashInferBackend",
        needs=("torch", "flashinfer"),
        install="pip install flashinfer-python",
    )
