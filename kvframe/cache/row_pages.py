"""The pages that running requests were given, dead blocks included: full blocks become findable from here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvframe.cache.block_pool import NO_OWNER, BlockPool
from kvframe.cache.block_table import TableStack
from kvframe.cache.live_range import LiveRange

Pages = npt.NDArray[np.int32]
Indices = npt.NDArray[np.int64]


class RowPages:
    """Per table stack and row, the pages that the row was given, by block index; 0 for those that it found.

    Unlike a block table, it keeps the page of a dead block until the page is evicted or belongs to a node. If no block
    of a stack dies before its request ends, it is the block table itself: there, owners tell found pages apart.

    Attributes:
        pages: Per stack ``[num_groups, max_num_seqs, max_blocks], int32``.
        flat: Per stack ``[num_groups * max_num_seqs * max_blocks], int32``: the same, indexed as the stack's.
        is_table: Per stack, whether it is the block table.
    """

    def __init__(self, live: Mapping[int, LiveRange], stacks: Sequence[TableStack]) -> None:
        """Start with none."""
        self.is_table = tuple(all(live[group].never_dies for group in stack.groups) for stack in stacks)
        self.pages = tuple(
            stack.ids if is_table else np.zeros_like(stack.ids)
            for stack, is_table in zip(stacks, self.is_table, strict=True)
        )
        self.flat = tuple(pages.reshape(-1) for pages in self.pages)
        self._apart = [
            (pages, stack.block_size)
            for stack, pages, is_table in zip(stacks, self.pages, self.is_table, strict=True)
            if not is_table
        ]
        self._place = {group: (s, g) for s, stack in enumerate(stacks) for g, group in enumerate(stack.groups)}

    def apart(self, s: int) -> Pages | None:
        """Return a stack's pages if they are not the block table."""
        return None if self.is_table[s] else self.pages[s]

    def record_page(self, group: int, row: int, block: int, page: int) -> None:
        """Record the page of one block."""
        s, g = self._place[group]
        self.pages[s][g, row, block] = page

    def keep_published(self, row: int, group: int, start: int, pages: Pages, pool: BlockPool) -> None:
        """Record that a row releases blocks from ``start`` on: only published pages stay the row's."""
        s, g = self._place[group]
        self.pages[s][g, row, start : start + len(pages)] *= pool.owners_of(pages) != NO_OWNER

    def remove_run(self, row: int, start: int, stop: int) -> None:
        """Forget a row's pages of the blocks in tokens ``[start, stop)``: they belong to a node."""
        for pages, size in self._apart:
            pages[:, row, start // size : stop // size] = 0

    def clear_row(self, row: int, num_blocks: int) -> None:
        """Forget a row's pages, ``num_blocks`` in each group at most."""
        for pages, _ in self._apart:
            pages[:, row, :num_blocks].fill(0)

    def clear_all(self) -> None:
        """Forget the pages of all rows."""
        for pages, _ in self._apart:
            pages.fill(0)
