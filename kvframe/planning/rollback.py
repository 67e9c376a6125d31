"""Rollback states: what a running request keeps beside its last state, so that draft tokens can be rejected.

A state type with ``num_rollback_states`` has pages of one state, which are what a prefix hit needs, and beside them a
group of this module's type. Its pages hold the other states of a block that is not full. They are released at the
block's end, and no later request needs one: only what runs pays for drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import attrs

from kvframe.contract.specs import KVCacheSpec, StateTensor, TokenRange, positive_int


@attrs.frozen(kw_only=True)
class RollbackSpec(KVCacheSpec):
    """The states before a running request's last one: pages of ``num_states`` of what its layers store.

    A block's states take turns, counted back from its last token: the state after that one lies in the page of the
    layers' own group, and the states after the ``num_states`` tokens before it lie here. So any ``1 + num_states``
    tokens that follow each other in a block have a place each.

    Attributes:
        num_states: States of a page.
    """

    kind: ClassVar[str] = "rollback"

    num_states: int = positive_int

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        """Return the last token, unless its block is full."""
        return ((n - 1, n),) if n % self.block_size else ()

    def state_tensors(self) -> Mapping[str, StateTensor]:
        """Return none of its own: a page holds ``num_states`` times what the layers store (``KVCacheGroup``)."""
        return {}

    def stored_blocks(self, n: int, num_new_tokens: int, branch: int = 0) -> tuple[tuple[int, int], ...]:
        """Return the blocks of the step's tokens that are no block's last one; after a longer step, of its last token.

        A step of more than ``1 + num_states`` tokens keeps the states at its end and at full blocks' ends.
        """
        size, end = self.block_size, n + num_new_tokens
        first = n if num_new_tokens <= 1 + self.num_states else end - 1
        # If the first of these tokens is a block's last one, the next block is the first that counts.
        start, stop = (first + 1) // size, (end - 1) // size + 1
        return ((start, stop),) if start < stop and size > 1 else ()

    def peak_blocks(self, num_tokens: int, max_new_tokens: int) -> int:
        """Return the blocks that a short step and the token before it touch at most, block's last tokens left out."""
        if self.block_size == 1:
            return 0
        size, most = self.block_size, min(max_new_tokens, 1 + self.num_states)
        return min(-(-num_tokens // size), 1 - (1 - most) // size)
