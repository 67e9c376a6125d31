"""The policy: a request of priority ``p`` waits as if it had come ``p`` times some seconds later."""

from __future__ import annotations

import math
from typing import ClassVar

import attrs
from kvframe_engine.contract import QueuedRequest, SchedulingPolicy

MOST_LEVELS = 1000


def _is_time(policy: object, attribute: attrs.Attribute[float], value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    least = 0 if attribute.name == "owner_seconds" else 0.001
    if not is_number or not least <= value <= 3600:  # type: ignore[operator]
        raise ValueError(f"{attribute.name} must be a number of seconds from {least} to 3600, not {value!r}")


def _is_count(policy: object, attribute: attrs.Attribute[int], value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_LEVELS:
        raise ValueError(f"{attribute.name} must be a whole number from 1 to {MOST_LEVELS}, not {value!r}")


@attrs.frozen(kw_only=True)
class Priority(SchedulingPolicy):
    """Serves requests with a smaller priority first, except those that have waited for long.

    A request's order is its time of arrival, plus ``seconds`` for each level of its priority, plus ``owner_seconds``
    for each other unfinished request of its owner and priority. So a request never waits for one that came later by
    more than ``seconds`` times the difference of their levels, and their owners' part. A waiting request may preempt a
    running one whose order is larger by half a level.

    Attributes:
        seconds: How much later than a request of the next smaller priority a request seems to have come.
        levels: Priorities count from ``-levels`` to ``levels``.
        owner_seconds: How much later a request seems to have come for each other unfinished one of its owner and
            priority, so that an owner of many requests delays others little.
    """

    name: ClassVar[str] = "priority"

    seconds: float = attrs.field(default=60.0, validator=_is_time)
    levels: int = attrs.field(default=10, validator=_is_count)
    owner_seconds: float = attrs.field(default=0.1, validator=_is_time)

    def order(self, request: QueuedRequest) -> float:
        """Return the time at which the request seems to have come."""
        level = min(max(request.priority, -self.levels), self.levels)
        return request.arrival + self.seconds * level + self.owner_seconds * request.num_others

    def preemption_gap(self) -> float:
        """Return the seconds of half a level."""
        return self.seconds / 2
