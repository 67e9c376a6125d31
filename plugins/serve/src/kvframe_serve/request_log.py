"""The log of requests: one line each, with an id; a flood of lines is cut, and said to be cut."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

LOG = logging.getLogger("kvframe.serve")

_MOST_LINES = 100
"""Lines of one kind that are written in one second."""

_MOST_CHARS = 120


def log_request(fields: Mapping[str, Any]) -> None:
    """Write the line of an answered request: its fields as ``name=value``, values without spaces."""
    LOG.info("request %s", " ".join(f"{name}={_word(value)}" for name, value in fields.items()))


def _word(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)[:_MOST_CHARS]
    return "".join(char if char.isprintable() and not char.isspace() else "_" for char in text) or "-"


class FloodFilter(logging.Filter):
    """Lets at most so many lines with one format through in a second; the first line after them counts the others."""

    def __init__(self, most_lines: int = _MOST_LINES, clock: Callable[[], float] = time.monotonic) -> None:
        """Take the most lines of a second."""
        super().__init__()
        self._most_lines = most_lines
        self._clock = clock
        self._second = -1
        self._counts: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a line is written."""
        second = int(self._clock())
        if second != self._second:
            num_cut_lines = sum(max(0, count - self._most_lines) for count in self._counts.values())
            self._second, self._counts = second, {}
            if num_cut_lines:
                record.msg = f"({num_cut_lines} lines like others were left out) {record.msg}"
        key = str(record.msg)
        self._counts[key] = self._counts.get(key, 0) + 1
        return self._counts[key] <= self._most_lines
