"""Delays Ctrl-C while a verb changes the engine's state, so that no request is left half changed."""

from __future__ import annotations

import signal
from importlib import import_module
from importlib.util import find_spec
from types import FrameType, TracebackType
from typing import Any, Self

# What `signal` wraps: an engine does this in every step, and there it makes enums of handlers, which takes 70 us.
_signal: Any = import_module("_signal" if find_spec("_signal") else "signal")

_SIGINT = int(signal.SIGINT)


class HeldInterrupts:
    """While it is entered, Ctrl-C waits; its handler is called at the end.

    Only the main thread handles signals. In another thread, or if no Python handler is set, nothing is done.
    """

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._handler: Any = None
        self._pending: tuple[int, FrameType | None] | None = None

    def hold(self) -> None:
        """Hold interrupts back; nothing if they are held already."""
        handler = _signal.getsignal(_SIGINT)
        if self._handler is None and callable(handler):
            try:
                _signal.signal(_SIGINT, self._note)
            except ValueError:  # not the main thread
                return
            self._handler = handler

    def let_go(self) -> None:
        """Stop delaying interrupts, and deliver those that came."""
        handler, self._handler = self._handler, None
        if handler is not None:
            _signal.signal(_SIGINT, handler)
            pending, self._pending = self._pending, None
            if pending is not None:
                handler(*pending)

    def let_through(self) -> _LetThrough:
        """Return what lets interrupts through while it is entered, first of all one that came before."""
        return _LetThrough(self)

    def __enter__(self) -> Self:
        """Hold interrupts back."""
        self.hold()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop delaying interrupts, and deliver those that came."""
        self.let_go()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pending = number, frame


class _LetThrough:
    def __init__(self, held: HeldInterrupts) -> None:
        self._held = held

    def __enter__(self) -> None:
        self._held.let_go()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.hold()
