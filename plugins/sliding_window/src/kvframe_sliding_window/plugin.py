"""The manifest: what this distribution adds to kvframe, by import string."""

from __future__ import annotations

from collections.abc import Callable

from kvframe.hookspecs import hookimpl


@hookimpl
def kvframe_register_specs(register: Callable[..., None]) -> None:
    """Register the sliding-window spec."""
    register("sliding_window", "kvframe_sliding_window.spec:SlidingWindowSpec")
