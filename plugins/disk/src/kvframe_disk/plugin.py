"""The manifest: what this distribution adds to kvframe, by import string."""

from __future__ import annotations

from kvframe.contract import Register, hookimpl


@hookimpl
def kvframe_register_page_stores(register: Register) -> None:
    """Register the store."""
    register("disk", "kvframe_disk.store:DiskStore")
