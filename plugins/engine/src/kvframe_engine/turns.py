"""Runs one verb of an engine at a time, refuses verbs after ``close``, and delays Ctrl-C until a verb is done."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from types import FrameType, TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

from kvframe_engine.contract.errors import EngineError

# `signal` converts handlers to enums, which takes 70 us, and an engine calls this in every step; `_signal` does not.
_signal: Any = import_module("_signal" if find_spec("_signal") else "signal")

_SIGINT = int(signal.SIGINT)


class HeldInterrupts:
    """A context manager during which Ctrl-C waits; its handler is called at the end.

    Only the main thread handles signals. In another thread, or if no Python handler is set, nothing is done.
    """

    _handler: Any = None
    _pending: tuple[int, FrameType | None] | None = None

    def hold(self) -> None:
        """Delay interrupts, unless they are delayed already."""
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
    """A context manager that lets interrupts through, first of all one that is waiting."""

    def __init__(self, held: HeldInterrupts) -> None:
        self._held = held

    def __enter__(self) -> None:
        self._held.release()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.hold()


class Turns:
    """Lets an engine's verbs run one at a time.

    Invariant: at most one turn runs at a time, in all threads, and interrupts are delayed while it runs, except inside
    ``let_through``.

    Attributes:
        is_closed: Whether the engine is closed.
        why_closed: Why, in words; empty if it is open, or if its user closed it.
    """

    def __init__(self) -> None:
        """Start open, with no turn running."""
        self.is_closed, self.why_closed = False, ""
        self._lock = threading.Lock()
        self._turn: Turn | None = None
        self._deferred: deque[Callable[[], None]] = deque()

    def close(self, why: str = "") -> None:
        """Refuse all later verbs but those that a closed engine accepts.

        Args:
            why: Why the engine is closed, if it was not its user who closed it. The first reason stays.
        """
        if not self.is_closed:
            self.is_closed, self.why_closed = True, why

    def begin(self, turn: Turn) -> None:
        """Start a turn.

        Raises:
            EngineError: The engine is closed (``closed``), or another turn runs (``busy``).
        """
        if not self._lock.acquire(blocking=False):
            raise EngineError(
                f"the engine is busy, so {turn.verb!r} cannot be called: it serves one call at a time; call it from "
                "one thread, and not from a callback that it calls",
                code="busy",
            )
        if self.is_closed and not turn.runs_when_closed:
            self._lock.release()
            why = f": {self.why_closed}" if self.why_closed else "; make another engine for the model"
            raise EngineError(f"the engine is closed, so {turn.verb!r} cannot be called{why}", code="closed")
        self._turn = turn

    def end(self) -> None:
        """End the running turn."""
        try:
            self._run_deferred()
        finally:
            self._turn = None
            self._lock.release()

    def when_free(self, action: Callable[[], None]) -> None:
        """Run an action on the engine now if no verb runs, or otherwise when the running verb ends.

        It is for finalizers, which Python may call in the middle of a verb. Ctrl-C waits until the action has run.
        """
        self._deferred.append(action)
        with HeldInterrupts():
            if self._lock.acquire(blocking=False):
                try:
                    self._run_deferred()
                finally:
                    self._lock.release()

    def let_through(self) -> AbstractContextManager[None]:
        """Return a context manager that lets interrupts through, for calls that may take long and change no state."""
        assert self._turn is not None
        return _LetThrough(self._turn)

    def hold(self) -> None:
        """Delay interrupts again, if one came while ``let_through`` was left."""
        assert self._turn is not None
        self._turn.hold()

    def if_lost(self, undo: Callable[[], None]) -> None:
        """Register what to undo if an exception keeps the running verb's result from its caller."""
        assert self._turn is not None
        self._turn.undo = undo

    def _run_deferred(self) -> None:
        while self._deferred:
            self._deferred.popleft()()


class Turn(HeldInterrupts):
    """One call of a verb, during which interrupts are delayed.

    Attributes:
        verb: The verb's name.
        runs_when_closed: Whether a closed engine accepts it.
        undo: What to undo if the result does not reach the caller; None for nothing.
    """

    undo: Callable[[], None] | None = None

    def __init__(self, turns: Turns, verb: str, *, runs_when_closed: bool = False) -> None:
        """Prepare a call; ``__enter__`` starts it."""
        self._turns, self.verb, self.runs_when_closed = turns, verb, runs_when_closed

    def __enter__(self) -> Self:
        """Delay interrupts, and start the turn."""
        self.hold()
        try:
            self._turns.begin(self)
        except BaseException:
            self.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the turn, and deliver an interrupt that came meanwhile."""
        self._turns.end()
        self.release()

    def take_back(self) -> None:
        """Undo a result that the caller did not get."""
        undo, self.undo = self.undo, None
        if undo is not None:
            self._turns.when_free(undo)


class HasTurns(Protocol):
    """An engine, or a part of one whose methods are verbs of the engine."""

    _turns: Turns


EngineT = TypeVar("EngineT", bound=HasTurns)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def verb(
    method: Callable[Concatenate[EngineT, Parameters], Result],
) -> Callable[Concatenate[EngineT, Parameters], Result]:
    """Make a method of an engine a verb, which runs in a turn of its own."""
    return _in_turn(method, runs_when_closed=False)


def verb_when_closed(
    method: Callable[Concatenate[EngineT, Parameters], Result],
) -> Callable[Concatenate[EngineT, Parameters], Result]:
    """Make a method of an engine a verb that a closed engine accepts too."""
    return _in_turn(method, runs_when_closed=True)


def _in_turn(
    method: Callable[Concatenate[EngineT, Parameters], Result], *, runs_when_closed: bool
) -> Callable[Concatenate[EngineT, Parameters], Result]:
    @wraps(method)
    def in_turn(self: EngineT, /, *arguments: Parameters.args, **named: Parameters.kwargs) -> Result:
        turn = Turn(self._turns, method.__name__.strip("_"), runs_when_closed=runs_when_closed)
        # A delayed interrupt is raised when the turn ends. The result then exists, but does not reach the caller.
        try:
            with turn:
                return method(self, *arguments, **named)
        except BaseException:
            turn.take_back()
            raise

    return in_turn
