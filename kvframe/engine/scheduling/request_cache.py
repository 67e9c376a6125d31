"""The interface of the cache that the scheduler uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvframe.cache.input_index import InputSequence
from kvframe.engine.requests.progress import NO_SEQUENCES
from kvframe.engine.scheduling.running_requests import IntArray


class RequestCache(Protocol):
    """The verbs of ``KVCacheManager`` that scheduling needs."""

    def start(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        salt: str = "",
        use_prefix: bool = True,
        inputs: Mapping[str, InputSequence] = NO_SEQUENCES,
    ) -> int:
        """Take a request in; returns the tokens that a cached prefix covers, fewer than there are."""

    def fork(self, request_id: str, new_id: str, token_ids: Sequence[int]) -> None:
        """Take a request in that goes on from another one's computed tokens."""

    def missing_inputs(self, request_id: str) -> frozenset[str]:
        """Return the inputs whose state the next step has to compute."""

    def has_room(self, request_id: str, num_tokens: int) -> bool:
        """Return whether there is room for all that a request takes up to so many tokens; nothing is changed."""

    def extend(self, request_id: str, num_tokens: int) -> bool:
        """Make room for tokens ``[0, num_tokens)``; False, and nothing changed, if there is none.

        Raises:
            RuntimeError: A page that others hold too could not be copied for it; nothing changed.
        """

    def extend_rows(self, rows: IntArray, num_tokens: IntArray) -> bool:
        """Make room for the first tokens of several requests, given their rows; False, and nothing changed, if none."""

    def commit_rows(self, rows: IntArray, num_computed: IntArray) -> None:
        """Take note of how many tokens are computed of several requests, given their rows."""

    def swap_out(self, request_id: str) -> bool:
        """Move what a request holds to host memory; False, and nothing changed, if that has no room; may raise."""

    def swap_in(self, request_id: str, num_tokens: int, *, use_prefix: bool = True) -> bool:
        """Take it back, with room for tokens ``[0, num_tokens)``; False, and nothing changed, if there is none.

        Raises:
            RuntimeError: It cannot be copied; it is still in host memory.
        """

    def free(self, request_id: str) -> None:
        """Give back everything that a request holds, in host memory too."""

    def row(self, request_id: str) -> int:
        """Return a started request's row."""
