"""The manifest: what this distribution adds to kvframe, by import string."""

from __future__ import annotations

from kvframe.contract import Register, hookimpl


@hookimpl
def kvframe_register_backends(register: Register) -> None:
    """Register the backend."""
    register("flex", "kvframe_flex.backend:FlexBackend", needs="torch")
