"""How long a tier takes to read a byte, learnt from its reads."""

from __future__ import annotations

import attrs

_NEW = 0.2
"""The weight of a slower measurement. A faster one counts at once: the others were delayed by something else."""

_FORGOTTEN = 0.9
"""A rate is multiplied by it whenever a read is skipped because of it, so that the tier is tried again some time."""


@attrs.define
class ReadRate:
    """Estimates the seconds of reads.

    Attributes:
        seconds_per_byte: The estimate; None before the first read.
    """

    seconds_per_byte: float | None = None

    def note(self, seconds: float, num_bytes: int) -> None:
        """Learn from a read; nothing if no byte was read."""
        if not num_bytes:
            return
        measured, known = seconds / num_bytes, self.seconds_per_byte
        is_faster = known is None or measured < known
        self.seconds_per_byte = measured if known is None or is_faster else (1 - _NEW) * known + _NEW * measured

    def note_skip(self) -> None:
        """Record that a read was skipped because it would take too long."""
        if self.seconds_per_byte is not None:
            self.seconds_per_byte *= _FORGOTTEN

    def seconds(self, num_bytes: int) -> float:
        """Return how long a read takes; 0 if that is not known."""
        return num_bytes * (self.seconds_per_byte or 0.0)
