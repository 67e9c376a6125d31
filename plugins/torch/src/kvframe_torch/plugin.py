"""The manifest: it registers the backends of this distribution by import string."""

from __future__ import annotations

from kvframe.contract import Register, hookimpl


@hookimpl
def kvframe_register_backends(register: Register) -> None:
    """Register the backend in plain torch, and the backend on torch's own paged attention."""
    register("torch", "kvframe_torch.backend:TorchBackend", needs="torch")
    register("torch_varlen", "kvframe_torch.varlen:TorchVarlenBackend", needs="torch")
