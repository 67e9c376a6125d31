"""Waits for what other threads and processes do."""

from __future__ import annotations

import threading
from collections.abc import Callable


def waited_for(is_so: Callable[[], bool], seconds: float = 10.0, pause: float = 0.005) -> bool:
    """Return whether something is so, at the latest after some seconds; ask after each pause."""
    for _ in range(round(seconds / pause)):
        if is_so():
            return True
        threading.Event().wait(pause)
    return is_so()


def eventually(is_so: Callable[[], bool], seconds: float = 30.0, pause: float = 0.01) -> None:
    """Wait until something is so; fail if it is not after some seconds."""
    assert waited_for(is_so, seconds, pause), f"it was not so within {seconds:g} s"
