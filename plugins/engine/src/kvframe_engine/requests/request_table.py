"""The requests of an engine by id, and which of them have output that their owners have not seen."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

from kvframe_engine.requests.progress import RequestT


class RequestTable(Mapping[str, RequestT]):
    """An engine's requests by id.

    Invariant: a request stays in the table until its end is reported or it is removed. The table has all unreported
    requests.

    Attributes:
        unreported: The requests with something to report, by id. The one that has had it for longest is the first.
    """

    def __init__(self) -> None:
        """Start without requests."""
        self.unreported: dict[str, RequestT] = {}
        self._requests: dict[str, RequestT] = {}
        self._samples: dict[str, dict[str, None]] = {}
        self._next_number = itertools.count()

    def fresh_id(self) -> str:
        """Return an id that no request in the table has."""
        return next(name for name in map("req-{}".format, self._next_number) if not self.samples_of(name))

    def samples_of(self, request_id: str) -> list[str]:
        """Return the ids of all samples in the table that belong to one request of the owner."""
        first = [request_id] if request_id in self._requests else []
        return [*first, *self._samples.get(request_id, ())]

    def holds(self, request: RequestT) -> bool:
        """Return whether this request object is in the table, and not another request with the same id."""
        return self._requests.get(request.request_id) is request

    def first_unreported(self, requests: Iterable[RequestT]) -> RequestT | None:
        """Return the first of ``requests`` that has something to report; None if none has."""
        return next((each for each in requests if self.unreported.get(each.request_id) is each), None)

    def add(self, request: RequestT) -> None:
        """Add a request whose id is not in the table."""
        self._requests[request.request_id] = request
        if request.sample:
            self._samples.setdefault(request.asked_id, {})[request.request_id] = None

    def note(self, requests: Iterable[RequestT]) -> None:
        """Record that requests of the table have something to report."""
        self.unreported.update((request.request_id, request) for request in requests)

    def mark_reported(self, request: RequestT) -> None:
        """Record that a request's output goes to its owner; if the request has ended, remove it from the table."""
        self.unreported.pop(request.request_id, None)
        if request.finish_reason is not None:
            self.remove(request.request_id)

    def mark_unreported(self, request: RequestT) -> None:
        """Put a request back whose report did not reach its owner, so that it is reported again."""
        if request.request_id not in self._requests:
            self.add(request)
        if self.holds(request):
            self.note([request])

    def remove(self, request_id: str) -> RequestT | None:
        """Remove a request without a report; return None if it is not in the table."""
        self.unreported.pop(request_id, None)
        request = self._requests.pop(request_id, None)
        if request is not None and request.sample:
            others = self._samples[request.asked_id]
            del others[request_id]
            if not others:
                del self._samples[request.asked_id]
        return request

    def __getitem__(self, request_id: str) -> RequestT:
        return self._requests[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)
