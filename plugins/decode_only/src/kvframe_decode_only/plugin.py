"""The manifest: what this distribution adds to kvframe, by import string."""

from __future__ import annotations

from kvframe.contract import Register, hookimpl


@hookimpl
def kvframe_register_wrappers(register: Register) -> None:
    """Register the wrapper that keeps generating tokens."""
    register("decode_only", "kvframe_decode_only.wrapper:DecodeOnly", needs="torch")
