"""The running requests in the order of their admission, with what a step needs of each as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from kvframe.engine.requests.progress import RequestT

IntArray = npt.NDArray[np.int64]


class RunningRequests(Sequence[RequestT]):
    """The running requests, each with a column of numbers, so that a step can read whole arrays.

    Invariant: a request's column holds the request's row, computed tokens and known tokens.
    """

    def __init__(self, max_num_seqs: int) -> None:
        """Start with none.

        Args:
            max_num_seqs: The most requests at a time.
        """
        self._requests: list[RequestT] = []
        self._columns: IntArray = np.zeros((3, max_num_seqs), dtype=np.int64)

    def columns(self, count: int) -> tuple[IntArray, IntArray, IntArray]:
        """Return the rows, the computed tokens and the known tokens of the first ``count`` requests, as copies."""
        rows, num_computed, num_known = self._columns[:, :count].copy()
        return rows, num_computed, num_known

    def append(self, request: RequestT) -> None:
        """Add a request that has a row."""
        self._columns[:, len(self._requests)] = request.row, request.num_computed, len(request.token_ids)
        self._requests.append(request)

    def remove(self, request: RequestT) -> None:
        """Remove a request."""
        index = self._requests.index(request)
        del self._requests[index]
        self._columns[:, index : len(self._requests)] = self._columns[:, index + 1 : len(self._requests) + 1]

    def advance(self, num_computed: IntArray, num_known: IntArray) -> None:
        """Set the computed and the known tokens of the first ``n`` requests.

        Args:
            num_computed: ``[n]``: their computed tokens.
            num_known: ``[n]``: their known tokens.
        """
        self._columns[1, : len(num_computed)] = num_computed
        self._columns[2, : len(num_known)] = num_known

    def drop_ended(self) -> None:
        """Remove the requests that have ended."""
        going_on = [index for index, request in enumerate(self._requests) if request.finish_reason is None]
        self._requests = [self._requests[index] for index in going_on]
        self._columns[:, : len(going_on)] = self._columns[:, going_on]

    @overload
    def __getitem__(self, index: int) -> RequestT: ...

    @overload
    def __getitem__(self, index: slice) -> list[RequestT]: ...

    def __getitem__(self, index: int | slice) -> RequestT | list[RequestT]:
        return self._requests[index]

    def __iter__(self) -> Iterator[RequestT]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)
