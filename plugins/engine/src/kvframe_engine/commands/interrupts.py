"""What Ctrl-C does while a command computes. Only the main thread gets signals; elsewhere nothing changes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def ctrl_c_raises() -> Iterator[None]:
    """Let Ctrl-C raise ``KeyboardInterrupt`` in the body, without ending the command."""
    with _handling(signal.default_int_handler):
        yield


@contextmanager
def ctrl_c_is_noted() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C in the body sets; the second one does what Ctrl-C does outside."""
    came = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        came.set()
        signal.signal(signal.SIGINT, before)

    with _handling(note) as before:
        yield came


@contextmanager
def _handling(handler: Any) -> Iterator[Any]:
    """Handle Ctrl-C by ``handler`` in the body; yield the handler before."""
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield before
    finally:
        signal.signal(signal.SIGINT, before)
