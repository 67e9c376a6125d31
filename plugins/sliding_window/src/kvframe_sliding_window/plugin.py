"""The manifest: what this distribution adds to kvframe, by import string."""

from __future__ import annotations

from kvframe.contract import Register, hookimpl


@hookimpl
def kvframe_register_specs(register: Register) -> None:
    """Register the sliding-window spec."""
    register("sliding_window", "kvframe_sliding_window.spec:SlidingWindowSpec")
