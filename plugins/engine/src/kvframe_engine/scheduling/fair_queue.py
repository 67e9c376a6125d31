"""The waiting requests in the order of their admission: the owner with the fewest running requests is the next."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic

from kvframe_engine.requests.progress import RequestT


class FairQueue(Generic[RequestT]):
    """Orders the waiting requests, and counts the running requests of each owner.

    The next request belongs to the owner with the fewest running requests. Owners with equally many take turns. The
    requests of one owner come in the order in which they were added. With one owner, this is first come, first served.

    Every method but ``first_of``, ``len`` and the iterator takes the same time for any number of owners and of waiting
    requests.
    A queue of another order is a class with the same methods.

    Attributes:
        queues: The waiting requests of each owner that has some, by request id; only the queue changes them.

    Invariant: an owner is in a ring if one of its requests waits, and that is the ring of its number of running
    requests.
    """

    def __init__(self) -> None:
        """Start without requests."""
        self.queues: dict[str, OrderedDict[str, RequestT]] = {}
        self._num_running: dict[str, int] = {}
        # There are at most as many rings as the most running requests of an owner, and one more. Some are empty.
        self._rings: defaultdict[int, OrderedDict[str, None]] = defaultdict(OrderedDict)

    @property
    def first(self) -> RequestT:
        """The request to admit next. The queue must not be empty."""
        return next(iter(self))

    def first_of(self, is_ready: Callable[[RequestT], bool]) -> RequestT | None:
        """Return the request to admit next among those that ``is_ready`` accepts; None if it accepts none."""
        return next(filter(is_ready, self), None)

    @property
    def has_several_owners(self) -> bool:
        """Whether the waiting and the running requests belong to several owners."""
        waiting, running = self.queues, self._num_running
        if len(waiting) > 1 or len(running) > 1:
            return True
        return bool(waiting and running) and next(iter(waiting)) not in running

    @property
    def ranks_running(self) -> bool:
        """Whether running requests have another order than that of their admission."""
        return self.has_several_owners

    def ranks(self, requests: Sequence[RequestT]) -> Sequence[Any]:
        """Return the rank of each running request: how many requests of its owner are before it.

        Ordered by rank, the last request is the last one of the owner with the most. With one owner, nothing changes.
        """
        counts: dict[str, int] = {}
        ranks = []
        for request in requests:
            ranks.append(counts.get(request.owner, 0))
            counts[request.owner] = ranks[-1] + 1
        return ranks

    def may_preempt(self, request: RequestT, victim: RequestT) -> bool:
        """Return whether a waiting request may preempt a running one: its owner has at least two fewer."""
        return self.num_running(victim.owner) >= self.num_running(request.owner) + 2

    def num_running(self, owner: str) -> int:
        """Return the number of running requests of an owner."""
        return self._num_running.get(owner, 0)

    def append(self, request: RequestT) -> None:
        """Add a request after the others of its owner."""
        if request.owner not in self.queues:
            self.queues[request.owner] = OrderedDict()
            self._rings[self.num_running(request.owner)][request.owner] = None
        self.queues[request.owner][request.request_id] = request

    def appendleft(self, request: RequestT) -> None:
        """Add a request before the others of its owner, and its owner before those with as many running requests."""
        self.append(request)
        self.queues[request.owner].move_to_end(request.request_id, last=False)
        self._rings[self.num_running(request.owner)].move_to_end(request.owner, last=False)

    def take(self, request: RequestT) -> None:
        """Remove a waiting request, and count it as running."""
        self.remove(request)
        self._count(request.owner, 1)

    def note_stop(self, request: RequestT) -> None:
        """Record that a request no longer runs."""
        self._count(request.owner, -1)

    def remove(self, request: RequestT) -> None:
        """Remove a waiting request."""
        queue = self.queues[request.owner]
        del queue[request.request_id]
        if not queue:
            del self.queues[request.owner], self._rings[self.num_running(request.owner)][request.owner]

    def _count(self, owner: str, change: int) -> None:
        """Change the number of running requests of an owner."""
        before, count = self.num_running(owner), self.num_running(owner) + change
        if owner in self.queues:
            del self._rings[before][owner]
            self._rings[count][owner] = None
        self._num_running[owner] = count
        if not count:
            del self._num_running[owner]

    def __len__(self) -> int:
        return sum(map(len, self.queues.values()))

    def __iter__(self) -> Iterator[RequestT]:
        for count in sorted(self._rings):
            for owner in self._rings[count]:
                yield from self.queues[owner].values()
