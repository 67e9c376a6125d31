"""The manifest: what this distribution adds to kvframe, by import string."""

from __future__ import annotations

from kvframe.contract import Register, hookimpl


@hookimpl
def kvframe_register_backends(register: Register) -> None:
    """Register the backend."""
    register("cpu", "kvframe_cpu.backend:CpuBackend", needs=("torch", "kvframe_kernels"))
