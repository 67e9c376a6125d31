"""Delays Ctrl-C while a verb changes the engine's state, so that no request is left half changed."""

from __future__ import annotations

import signal
from importlib import import_module
from importlib.util import find_spec
from types import FrameType, TracebackType
from typing import Any, Self

# `signal` converts handlers to enums, which takes 70 us, and an engine calls this in every step; `_signal` does not.
_signal: Any = import_module("_signal" if find_spec("_signal") else "signal")

_SIGINT = int(signal.SIGINT)


class HeldInterrupts:
    """A context manager during which Ctrl-C waits; its handler is called at the end.

    Only the main thread handles signals. In another thread, or if no Python handler is set, nothing is done.
    """

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._handler: Any = None
        self._pending: tuple[int, FrameType | None] | None = None

    def hold(self) -> None:
        """Delay interrupts; nothing if they are delayed already."""
        handler = _signal.getsignal(_SIGINT)
        if self._handler is None and callable(handler):
            try:
                _signal.signal(_SIGINT, self._note)
            except ValueError:  # not the main thread
                return
            self._handler = handler

    def release(self) -> None:
        """Stop delaying interrupts, and deliver those that came."""
        handler, self._handler = self._handler, None
        if handler is not None:
            _signal.signal(_SIGINT, handler)
            pending, self._pending = self._pending, None
            if pending is not None:
                handler(*pending)

    def let_through(self) -> _LetThrough:
        """Return a context manager that lets interrupts through, first of all one that is waiting."""
        return _LetThrough(self)

    def __enter__(self) -> Self:
        """Delay interrupts."""
        self.hold()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop delaying interrupts, and deliver those that came."""
        self.release()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pending = number, frame


class _LetThrough:
    def __init__(self, held: HeldInterrupts) -> None:
        self._held = held

    def __enter__(self) -> None:
        self._held.release()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.hold()
