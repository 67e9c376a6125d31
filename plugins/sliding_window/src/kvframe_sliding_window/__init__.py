"""Sliding-window attention for kvframe, with and without sink tokens."""

from kvframe_sliding_window.spec import SlidingWindowSpec

__all__ = ["SlidingWindowSpec"]
