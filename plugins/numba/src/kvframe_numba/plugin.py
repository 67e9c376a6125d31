"""The manifest: what this distribution adds to kvframe, by import string."""

from __future__ import annotations

from kvframe.contract import Register, hookimpl


@hookimpl
def kvframe_register_backends(register: Register) -> None:
    """Register the backend of keys and values."""
    register(
        "numba",
        "kvframe_numba.backend:NumbaBackend",
        needs=("torch", "numba", "kvframe_kernels"),
        install="pip install 'kvframe-numba[numba]'",
        needs_versions="numba>=0.61",
    )
