"""The manifest: what this distribution adds to kvframe, by import string."""

from __future__ import annotations

from kvframe.contract import Register, hookimpl


@hookimpl
def kvframe_register_backends(register: Register) -> None:
    """Register the backends of keys and values, and of latents."""
    for name, target in (("triton", "backend:TritonBackend"), ("triton_mla", "latents:TritonMLABackend")):
        register(
            name,
            f"kvframe_triton.{target}",
            needs=("torch", "triton", "kvframe_kernels"),
            install="pip install 'kvframe-triton[triton]'",
            needs_versions="triton>=3.6",
        )
