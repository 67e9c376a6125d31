"""The waiting requests in the order that a scheduling policy gives them."""

from __future__ import annotations

import itertools
import logging
import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, Generic

from kvframe.contract.errors import PluginError
from kvframe.contract.foreign import call
from kvframe_engine.contract.scheduling import FCFS, QueuedRequest, SchedulingPolicy
from kvframe_engine.requests.progress import RequestT

_log = logging.getLogger("kvframe")
_ORDER = attrgetter("order")


class OrderedQueue(Generic[RequestT]):
    """Orders the waiting requests by a policy's numbers; it has the methods of ``FairQueue``.

    The policy is asked once for each request. If it fails, it is set aside, and later requests come in their order of
    arrival.

    Attributes:
        queues: The waiting requests, in order; only the queue changes them.
    """

    has_several_owners = False
    """A policy does not divide a step's tokens among owners."""

    def __init__(self, policy: SchedulingPolicy, now: Callable[[], float]) -> None:
        """Start without requests.

        Args:
            policy: Gives requests their numbers.
            now: Returns the seconds of a clock that never goes back.

        Raises:
            PluginError: The policy fails, or gives a wrong answer.
        """
        self.queues: list[RequestT] = []
        self._policy, self._now = policy, now
        self._numbers = itertools.count()
        self._num_unfinished: Counter[tuple[str, int]] = Counter()
        self._gap = _asked(policy, "preemption_gap()", policy.preemption_gap)
        if not self._gap > 0:
            raise PluginError(f"scheduling policy {policy.name!r}: preemption_gap() has to be positive")
        self._ask(QueuedRequest(arrival=now()))

    @property
    def ranks_running(self) -> bool:
        """Whether running requests have another order than that of their admission."""
        return True

    @property
    def first(self) -> RequestT:
        """The request to admit next. The queue must not be empty."""
        return self.queues[0]

    def first_of(self, is_ready: Callable[[RequestT], bool]) -> RequestT | None:
        """Return the request to admit next among those that ``is_ready`` accepts; None if it accepts none."""
        return next(filter(is_ready, self.queues), None)

    def ranks(self, requests: Sequence[RequestT]) -> Sequence[Any]:
        """Return the orders of running requests."""
        return [request.order for request in requests]

    def may_preempt(self, request: RequestT, victim: RequestT) -> bool:
        """Return whether a waiting request may preempt a running one."""
        return victim.order[0] > request.order[0] + self._gap

    def append(self, request: RequestT) -> None:
        """Add a request, and give it its order."""
        queued = QueuedRequest(
            arrival=self._now(),
            priority=request.hints.priority,
            owner=request.owner,
            num_others=self._num_unfinished[request.owner, request.hints.priority],
            num_prompt_tokens=request.num_prompt_tokens,
        )
        try:
            order = self._ask(queued)
        except PluginError as error:
            _log.error("%s; it is set aside, and requests are served in the order in which they come", error)
            self._policy, self._gap = FCFS, math.inf
            order = queued.arrival
        request.order = order, next(self._numbers)
        self.appendleft(request)

    def _ask(self, queued: QueuedRequest) -> float:
        order = _asked(self._policy, "order()", lambda: self._policy.order(queued))
        if not math.isfinite(order):
            raise PluginError(f"scheduling policy {self._policy.name!r}: order() has to be finite, not {order!r}")
        return order

    def appendleft(self, request: RequestT) -> None:
        """Add a request that has an order, at its place."""
        insort(self.queues, request, key=_ORDER)
        self._num_unfinished[request.owner, request.hints.priority] += 1

    def take(self, request: RequestT) -> None:
        """Remove a waiting request that runs from now on."""
        del self.queues[bisect_left(self.queues, request.order, key=_ORDER)]

    def note_stop(self, request: RequestT) -> None:
        """Record that a request no longer runs."""
        key = request.owner, request.hints.priority
        self._num_unfinished[key] -= 1
        if not self._num_unfinished[key]:
            del self._num_unfinished[key]

    def remove(self, request: RequestT) -> None:
        """Remove a waiting request."""
        self.take(request)
        self.note_stop(request)

    def __len__(self) -> int:
        return len(self.queues)

    def __iter__(self) -> Iterator[RequestT]:
        return iter(self.queues)


def _asked(policy: SchedulingPolicy, method: str, ask: Callable[[], Any]) -> float:
    """Return a policy's answer; a ``PluginError`` if it raises, or if that is no number."""
    label = f"scheduling policy {policy.name!r}: {method}"
    try:
        answer = call(label, ask)
    except KeyboardInterrupt:  # Ctrl-C waits here, so the policy raised it
        raise PluginError(f"{label} failed: KeyboardInterrupt") from None
    if isinstance(answer, bool) or not isinstance(answer, int | float):
        raise PluginError(f"{label} has to return a number, not {type(answer).__name__}")
    return float(answer)
