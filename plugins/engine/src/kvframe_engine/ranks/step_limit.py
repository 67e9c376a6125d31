"""The time limit of a step over several ranks: finds the rank that answers, and never ends its share of a step."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from kvframe.contract.errors import shown


class StepLimit:
    """Measures each step of one rank; used as a context around the step.

    If one rank hangs, the others wait for it in a collective operation. Only the rank that hangs runs other code, so
    each rank can tell whether it is that one.

    Invariant: ``_number`` is odd while a step runs, and never has a value twice.
    """

    def __init__(self, max_seconds: float, on_late: Callable[[str | None], None]) -> None:
        """Start the thread that measures.

        Args:
            max_seconds: How long a step may take.
            on_late: Called once by that thread if a step takes longer: with the line that runs, or with None if this
                rank waits for another one.
        """
        self._max_seconds, self._on_late = max_seconds, on_late
        self._number, self._thread = 0, 0
        self._is_over = threading.Event()
        threading.Thread(target=self._measure, name="kvframe-step-limit", daemon=True).start()

    def __enter__(self) -> None:
        """Begin a step of this thread."""
        self._thread = threading.get_ident()
        self._number += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the step."""
        self._number += 1

    def close(self) -> None:
        """Stop measuring. Safe to call twice."""
        self._is_over.set()

    def _measure(self) -> None:
        # Intervals are counted: by a clock, a process that was stopped and continues would be late at once.
        interval = min(1.0, self._max_seconds / 4)
        last_number, num_intervals = 0, 0
        while not self._is_over.wait(interval):
            num_intervals = num_intervals + 1 if self._number % 2 and self._number == last_number else 0
            last_number = self._number
            if num_intervals * interval >= self._max_seconds:
                self._on_late(_line_of(sys._current_frames().get(self._thread)))
                return


def late(max_seconds: float, line: str | None) -> str:
    """Return the error for a step that does not end, on the rank that runs the line, or on all ranks.

    Args:
        max_seconds: How long a step may take.
        line: The line that runs; None if each rank waits for another one.
    """
    where = "each rank waits for another one" if line is None else f"it is in {line}"
    return (
        f"a step has not ended within {max_seconds:g} seconds: {where}; if steps may take as long as that, raise "
        "engine.max_step_seconds in the stack"
    )


def _line_of(frame: FrameType | None) -> str | None:
    """Return the line that a thread runs, outside of torch; None if it waits for another rank or for its device."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith(("torch.distributed", "torch.cuda.streams")):
            return None
        if not f"{module}.".startswith("torch."):
            return f"line {frame.f_lineno} of {shown(module)}"
        frame = frame.f_back
    return None
