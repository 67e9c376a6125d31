"""The table of requests, and which of them have output that their owners have not seen."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

from kvframe.engine.requests.progress import RequestT


class RequestTable(Mapping[str, RequestT]):
    """An engine's requests by id.

    Invariant: a request stays in the table until its end is reported or it is removed. All requests with news are in
        it.
    """

    def __init__(self) -> None:
        """Start without requests."""
        self._requests: dict[str, RequestT] = {}
        # A dict keeps the order: the request that has had news for longest is reported first.
        self._with_news: dict[str, None] = {}
        self._others: dict[str, dict[str, None]] = {}
        self._next_number = itertools.count()

    @property
    def with_news(self) -> list[str]:
        """The requests with something to report, those that have had it for longest first."""
        return list(self._with_news)

    def fresh_id(self) -> str:
        """Return an id that no request in the table has."""
        return next(name for name in map("req-{}".format, self._next_number) if not self.samples_of(name))

    def samples_of(self, request_id: str) -> list[str]:
        """Return the ids of all samples in the table that belong to one request of the owner."""
        first = [request_id] if request_id in self._requests else []
        return [*first, *self._others.get(request_id, ())]

    def holds(self, request: RequestT) -> bool:
        """Return whether this request object is in the table, and not another request with the same id."""
        return self._requests.get(request.request_id) is request

    def first_with_news(self, requests: Iterable[RequestT]) -> RequestT | None:
        """Return the first of ``requests`` that is in the table and has something to report; None if none has."""
        return next((each for each in requests if each.request_id in self._with_news and self.holds(each)), None)

    def add(self, request: RequestT) -> None:
        """Add a request whose id is not in the table."""
        self._requests[request.request_id] = request
        if request.sample:
            self._others.setdefault(request.asked_id, {})[request.request_id] = None

    def note(self, requests: Iterable[RequestT]) -> None:
        """Record that requests of the table have something to report."""
        self._with_news.update((request.request_id, None) for request in requests)

    def take(self, request_id: str) -> RequestT:
        """Return a request whose news are about to be reported; if it has ended, remove it from the table."""
        self._with_news.pop(request_id, None)
        request = self._requests[request_id]
        if request.finish_reason is not None:
            self.remove(request_id)
        return request

    def mark_unreported(self, request: RequestT) -> None:
        """Put a request back whose report did not reach its owner, so that its news are reported again."""
        if request.request_id not in self._requests:
            self.add(request)
        if self.holds(request):
            self.note([request])

    def remove(self, request_id: str) -> RequestT | None:
        """Remove a request without a report; return None if it is not in the table."""
        self._with_news.pop(request_id, None)
        request = self._requests.pop(request_id, None)
        if request is not None and request.sample:
            others = self._others[request.asked_id]
            del others[request_id]
            if not others:
                del self._others[request.asked_id]
        return request

    def __getitem__(self, request_id: str) -> RequestT:
        return self._requests[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)
