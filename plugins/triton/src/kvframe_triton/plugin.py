"""The manifest: what this distribution adds to kvframe, by import string."""

from __future__ import annotations

from kvframe.hookspecs import Register, hookimpl


@hookimpl
def kvframe_register_backends(register: Register) -> None:
    """Register the backend of keys and values."""
    register(
        "triton",
        "kvframe_triton.backend:TritonBackend",
        needs=("torch", "triton", "kvframe_kernels"),
        install="pip install 'kvframe-triton[triton]'",
    )
