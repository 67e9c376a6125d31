"""The manifest: what this distribution adds to kvframe, by import string."""

from __future__ import annotations

from kvframe.contract import Register, hookimpl


@hookimpl
def kvframe_register_eviction_policies(register: Register) -> None:
    """Register the policy."""
    register("scan_resistant", "kvframe_scan_resistant.policy:ScanResistant", needs="numpy")
