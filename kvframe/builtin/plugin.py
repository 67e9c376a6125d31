"""The built-in plugin: full attention and the reference backend, registered by the same hooks as any other."""

from __future__ import annotations

from kvframe.contract.hookspecs import Register, hookimpl


@hookimpl
def kvframe_register_specs(register: Register) -> None:
    """Register the full-attention spec."""
    register("full_attention", "kvframe.builtin.full_attention:FullAttentionSpec")


@hookimpl
def kvframe_register_backends(register: Register) -> None:
    """Register the reference of all backends."""
    register("torch_reference", "kvframe.builtin.torch_reference:TorchReferenceBackend", needs="torch")
