"""The built-in plugin: full attention and the plain-torch backends, registered by the same hooks as any other."""

from __future__ import annotations

from kvframe.contract.hookspecs import Register, hookimpl


@hookimpl
def kvframe_register_specs(register: Register) -> None:
    """Register the full-attention spec."""
    register("full_attention", "kvframe.builtin.full_attention:FullAttentionSpec")


@hookimpl
def kvframe_register_backends(register: Register) -> None:
    """Register the practical torch backend, the reference of all backends, and the one on torch's paged attention."""
    register("torch", "kvframe.builtin.torch_backend:TorchBackend", needs="torch")
    register("torch_reference", "kvframe.builtin.torch_reference:TorchReferenceBackend", needs="torch")
    register("torch_varlen", "kvframe.builtin.torch_varlen:TorchVarlenBackend", needs="torch")
