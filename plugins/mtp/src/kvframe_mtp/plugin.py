"""The manifest: what this distribution adds to kvframe, by import string."""

from __future__ import annotations

from kvframe.contract import Register, hookimpl


@hookimpl
def kvframe_register_proposers(register: Register) -> None:
    """Register the proposer."""
    register("mtp", "kvframe_mtp.proposer:MTPProposer")
