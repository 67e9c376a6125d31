"""Stored prefixes: the keys of a request's blocks, and the longest prefix whose needed blocks are all somewhere.

Blocks that are not in the pool may be in host memory, on disk or on another machine. A request can continue after ``n``
tokens if the blocks that are live at ``n`` are in any of these places, in every group.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.cache.block_table import GroupKinds
from kvframe.cache.input_index import InputBlocks
from kvframe.cache.live_range import longest_common_prefix

Present = npt.NDArray[np.bool_]
"""For each block, whether it is somewhere: ``[num_blocks], bool, host``."""


@attrs.frozen(eq=False, kw_only=True)
class PrefixBlocks:
    """The blocks of a request that a later request could continue from, and which of them are in the pool.

    Attributes:
        keys: Per group, the key of each whole block of tokens, or of each block of the request's input.
        cached: Per group, which of these blocks are in the pool.
        num_cached: The tokens of the longest prefix that is in the pool.
        lacks_inputs: Whether the pool lacks an input of the request.
        most: The most tokens of a prefix.
        inputs: The blocks of the request's inputs.
        kinds: The groups.
    """

    keys: Sequence[Sequence[bytes]]
    cached: Sequence[Present]
    num_cached: int
    lacks_inputs: bool
    most: int
    inputs: Sequence[InputBlocks]
    kinds: GroupKinds

    def is_whole(self, num_tokens: int) -> bool:
        """Return whether no longer prefix than so many tokens can be continued from."""
        return num_tokens + self.kinds.plan.alignment > self.most

    def longest(self, present: Sequence[Present]) -> int | None:
        """Return the tokens of the longest prefix whose needed blocks are present, in every group.

        Args:
            present: Per group, the blocks that are in the pool or elsewhere.

        Returns:
            The number of tokens; None if a block of an input is missing, without which nothing is continued.
        """
        if not all(present[blocks.group].all() for blocks in self.inputs):
            return None
        group_pages = [(live, present[group].astype(np.int32)) for group, live in self.kinds.live.items()]
        return longest_common_prefix(group_pages, self.kinds.plan.alignment, self.most) if group_pages else 0

    def needed(self, num_tokens: int) -> list[Present]:
        """Return per group, which blocks a request needs to continue after its first ``num_tokens`` tokens."""
        return self.kinds.needed_blocks(num_tokens, self.inputs)
