"""The pages that running requests took for themselves, of which full ones become findable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvframe.cache.block_pool import NO_OWNER, BlockPool
from kvframe.cache.block_table import TableStack
from kvframe.cache.live_range import LiveRange

Pages = npt.NDArray[np.int32]


class OwnPages:
    """Per table stack and row, the pages that the row was given, by block index; 0 for those that it found.

    Unlike in the block table, dead ones stay until they are given up. Where no block dies before its request ends, it
    is the block table: there, those that it found are told apart by their owners.

    Attributes:
        pages: Per stack ``[num_groups, max_num_seqs, max_blocks], int32``.
        flat: Per stack ``[num_groups * max_num_seqs * max_blocks], int32``: the same, indexed as the stack's.
        is_table: Per stack, whether it is the block table.
    """

    def __init__(self, live: Mapping[int, LiveRange], stacks: Sequence[TableStack]) -> None:
        """Start with none.

        Args:
            live: When the blocks of each group of tokens die.
            stacks: The block tables of those of requests' tokens.
        """
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

    def take(self, row: int, group: int, blocks: slice | Sequence[int], pages: Pages) -> None:
        """Take note of pages that a row was given."""
        s, g = self._place[group]
        self.pages[s][g, row, blocks] = pages

    def take_all(self, s: int, row: int, start: int, stop: int, pages: Pages) -> None:
        """Take note that a row was given pages for its blocks ``[start, stop)`` in all groups of a stack."""
        if not self.is_table[s]:
            self.pages[s][:, row, start:stop] = pages

    def take_each(self, s: int, rows: npt.NDArray[np.int64], blocks: npt.NDArray[np.int64], pages: Pages) -> None:
        """Take note that rows were each given a page for a block in all groups of a stack."""
        if not self.is_table[s]:
            self.pages[s][:, rows, blocks] = pages

    def keep_published(self, row: int, group: int, start: int, pages: Pages, pool: BlockPool) -> None:
        """Record that a row releases blocks: those that were not published are no longer its own.

        Args:
            row: The row.
            group: The group.
            start: The first block.
            pages: Their pages, 0 for none.
            pool: Knows which pages are published.
        """
        s, g = self._place[group]
        self.pages[s][g, row, start : start + len(pages)] *= pool.owners_of(pages) != NO_OWNER

    def give_up(self, row: int, start: int, stop: int) -> None:
        """Forget a row's pages of the blocks that lie in tokens ``[start, stop)``."""
        for pages, size in self._apart:
            pages[:, row, start // size : stop // size] = 0

    def clear(self, row: int, num_blocks: int) -> None:
        """Forget which pages a row took, ``num_blocks`` at the most."""
        for pages, _ in self._apart:
            pages[:, row, :num_blocks].fill(0)

    def forget(self) -> None:
        """Forget which pages all rows took."""
        for pages, _ in self._apart:
            pages.fill(0)
