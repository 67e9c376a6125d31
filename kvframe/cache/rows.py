"""The rows of running requests: the numbers that a step compares for all of them at once, and their other state."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.cache.input_index import InputBlocks
from kvframe.cache.live_range import NEVER

Rows = npt.NDArray[np.int64]


@attrs.define
class RowState:
    """What a row has beside its numbers.

    Attributes:
        inputs: Its blocks in the groups of inputs.
        missing: The inputs whose state is not computed.
        branch: Where its tokens part from those of an earlier request; 0 if nothing is known.
    """

    inputs: tuple[InputBlocks, ...] = ()
    missing: frozenset[str] = frozenset()
    branch: int = 0

    def copy(self) -> RowState:
        """Return the same for another row."""
        return self if self is PLAIN else attrs.evolve(self)


PLAIN = RowState()
"""The state of a row that has nothing beside its numbers."""


class RowNumbers:
    """What is counted of each row.

    Invariant: a row needs work only when its computed tokens reach one of these numbers. It lacks no page for its
    tokens ``[0, capacity)``; below ``next_death`` computed tokens none of its blocks dies, and below
    ``next_publication`` none of its blocks becomes findable.

    Attributes:
        num_computed: ``[max_num_seqs], int64, host``: computed tokens.
        num_blocks: ``[num_groups, max_num_seqs], int64, host``: blocks, dead ones included: the columns of the block
            tables that are in use.
        capacity: ``[max_num_seqs], int64, host``.
        next_death: Likewise; it may be too early, never too late.
        next_publication: Likewise; the publisher sets it.
        computed_of: ``num_computed`` as a view in which single numbers are read and written several times as fast.
        blocks_of: Likewise ``num_blocks``.
        capacity_of: Likewise ``capacity``.
        death_of: Likewise ``next_death``.
        publication_of: Likewise ``next_publication``.
        states: What each row has beside.
    """

    def __init__(
        self, num_groups: int, num_computed: npt.NDArray[np.int64], next_publication: npt.NDArray[np.int64]
    ) -> None:
        """Let every row be one without a token.

        Args:
            num_groups: Groups of the plan.
            num_computed: ``[max_num_seqs], int64, host``, zeroed; the publisher reads it too.
            next_publication: Likewise, which the publisher sets.
        """
        max_num_seqs = len(num_computed)
        self.num_computed = num_computed
        self.num_blocks = np.zeros((num_groups, max_num_seqs), dtype=np.int64)
        self.capacity = np.zeros(max_num_seqs, dtype=np.int64)
        self.next_death = np.full(max_num_seqs, NEVER, dtype=np.int64)
        self.next_publication = next_publication
        self.computed_of, self.blocks_of = self.num_computed.data, self.num_blocks.data
        self.capacity_of = self.capacity.data
        self.death_of, self.publication_of = self.next_death.data, self.next_publication.data
        self.states: list[RowState] = [PLAIN] * max_num_seqs
