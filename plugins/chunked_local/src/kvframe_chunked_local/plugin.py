"""The manifest: what this distribution adds to kvframe, by import string."""

from __future__ import annotations

from kvframe.contract import Register, hookimpl


@hookimpl
def kvframe_register_specs(register: Register) -> None:
    """Register the chunked-local spec."""
    register("chunked_local", "kvframe_chunked_local.spec:ChunkedLocalSpec")


@hookimpl
def kvframe_register_wrappers(register: Register) -> None:
    """Register the wrapper that turns chunks into virtual requests."""
    register("chunked_local", "kvframe_chunked_local.wrapper:ChunkedLocal", needs="torch")
