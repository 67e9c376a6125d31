"""Rollback states: the states before a running request's last one, kept so that draft tokens can be rejected.

A state type with ``num_rollback_states`` has two groups. Its own group has pages of one state each, which prefix hits
need. The group of this module's type holds the other states of a block that is not full. Its pages are released at the
block's end, and no later request needs them, so only running requests pay for drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import attrs

from kvframe.contract.fields import positive_int
from kvframe.contract.specs import KVCacheSpec, StateTensor, TokenRange


@attrs.frozen(kw_only=True)
class RollbackSpec(KVCacheSpec):
    """The states before a running request's last one: pages of ``num_states`` times the layers' state.

    The states of a block are counted back from its last token. The state after that token is in a page of the layers'
    own group. The states after the ``num_states`` tokens before it are in a page of this group, each in its own part.
    So the states of any ``1 + num_states`` consecutive tokens of a block have different places.

    Attributes:
        num_states: States of a page.
    """

    kind: ClassVar[str] = "rollback"

    num_states: int = positive_int

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        """Return the last token, unless its block is full."""
        return ((n - 1, n),) if n % self.block_size else ()

    def state_tensors(self) -> Mapping[str, StateTensor]:
        """Return no tensors: a page holds ``num_states`` times the layers' state (``KVCacheGroup``)."""
        return {}

    def stored_blocks(self, n: int, num_new_tokens: int, branch: int = 0) -> tuple[tuple[int, int], ...]:
        """Return the blocks in which the step has tokens other than the block's last; after a long step, only the last.

        After a step of more than ``1 + num_states`` tokens, only the states at its end and at the ends of full blocks
        are kept.
        """
        size, end = self.block_size, n + num_new_tokens
        first = n if num_new_tokens <= 1 + self.num_states else end - 1
        # If the first of these tokens is the last of its block, that block does not count.
        start, stop = (first + 1) // size, (end - 1) // size + 1
        return ((start, stop),) if start < stop and size > 1 else ()

    def peak_blocks(self, num_tokens: int, max_new_tokens: int) -> int:
        """Return the most blocks that a short step and the token before it touch, each block's last token left out."""
        if self.block_size == 1:
            return 0
        size, num_step_tokens = self.block_size, min(max_new_tokens, 1 + self.num_states)
        return min(-(-num_tokens // size), 1 - (1 - num_step_tokens) // size)
