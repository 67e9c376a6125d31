"""The manifest: what this distribution adds to kvframe, by import string."""

from __future__ import annotations

from kvframe.contract import Register, hookimpl


@hookimpl
def kvframe_register_specs(register: Register) -> None:
    """Register the specs of entries."""
    register("token_entries", "kvframe_entries.spec:TokenEntriesSpec")
    register("unfinished_group", "kvframe_entries.spec:UnfinishedGroupSpec")
