"""The manifest: what this distribution adds to kvframe, by import string."""

from __future__ import annotations

from kvframe.contract import Register, hookimpl


@hookimpl
def kvframe_register_specs(register: Register) -> None:
    """Register the spec of latents."""
    register("mla", "kvframe_mla.spec:MLASpec")


@hookimpl
def kvframe_register_backends(register: Register) -> None:
    """Register the backend that attends to them."""
    register("mla", "kvframe_mla.backend:MLABackend", needs="torch")
