"""The interface of the cache that the scheduler uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvframe import FoundPrefix, InputSequence
from kvframe.contract.order import IntArray
from kvframe.contract.specs import TokenRange
from kvframe_engine.requests.progress import NO_SEQUENCES


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
        ranges: Sequence[TokenRange] = (),
        num_prompt_tokens: int | None = None,
    ) -> int:
        """Add a request; return the number of tokens that a cached prefix covers, fewer than ``token_ids``."""

    def found_prefix(self, request_id: str) -> FoundPrefix:
        """Return what a started request's lookup found, and why it was not more."""

    def fork(self, request_id: str, new_id: str, token_ids: Sequence[int]) -> None:
        """Add a request that continues from another request's computed tokens."""

    def missing_inputs(self, request_id: str) -> frozenset[str]:
        """Return the inputs whose state the next step has to compute."""

    def has_capacity(self, request_id: str, num_tokens: int) -> bool:
        """Return whether there are enough free blocks for a request's first ``num_tokens`` tokens; change nothing."""

    def extend(self, request_id: str, num_tokens: int) -> bool:
        """Allocate blocks for tokens ``[0, num_tokens)``; return False, and change nothing, if there are too few.

        Raises:
            RuntimeError: A shared page could not be copied for the request; nothing changed.
        """

    def extend_rows(self, rows: IntArray, num_tokens: IntArray) -> bool:
        """Allocate blocks for the first tokens of several requests, by row; return False, unchanged, if too few."""

    def commit_rows(self, rows: IntArray, num_computed: IntArray) -> None:
        """Record the numbers of computed tokens of several requests, by row."""

    def shrink(self, request_id: str) -> bool:
        """Let the layers choose what they keep of a computed prompt; return False, unchanged, if blocks are too few."""

    def swap_out(self, request_id: str) -> bool:
        """Move a request's state to host memory; False, and no change, if it does not fit there; may raise."""

    def swap_in(self, request_id: str, num_tokens: int, *, use_prefix: bool = True) -> bool:
        """Move it back, with blocks for tokens ``[0, num_tokens)``; return False, and change nothing, if too few.

        Raises:
            RuntimeError: It cannot be copied; it is still in host memory.
        """

    def free(self, request_id: str) -> None:
        """Free all blocks of a request, and its state in host memory."""

    def row(self, request_id: str) -> int:
        """Return a started request's row."""
