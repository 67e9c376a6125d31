"""The manifest: what this distribution adds to kvframe, by import string."""

from __future__ import annotations

from kvframe.contract import Register, hookimpl


@hookimpl
def kvframe_register_page_stores(register: Register) -> None:
    """Register the store."""
    register("valkey", "kvframe_valkey.store:ValkeyStore", needs="valkey", install="pip install 'valkey>=6.1,<7'")
