"""The manifest: what this distribution adds to kvframe, by import string."""

from __future__ import annotations

from kvframe.contract import Register, hookimpl


@hookimpl
def kvframe_register_scheduling_policies(register: Register) -> None:
    """Register the policy."""
    register("priority", "kvframe_priority.policy:Priority")
