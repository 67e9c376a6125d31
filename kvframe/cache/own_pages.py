"""The pages that running requests took for themselves, of which full ones become findable."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvframe.cache.block_table import TableStack
from kvframe.cache.forgetting import never_dies
from kvframe.cache.owners import NOBODY
from kvframe.cache.pool import BlockPool
from kvframe.plan import PlannedGroup

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

    def __init__(self, groups: Sequence[PlannedGroup], stacks: Sequence[TableStack]) -> None:
        """Start with none.

        Args:
            groups: All groups of the plan.
            stacks: The block tables of those of requests' tokens.
        """
        self.is_table = tuple(all(never_dies(groups[group].spec) for group in stack.groups) for stack in stacks)
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

    def keep_published(self, row: int, group: int, start: int, pages: Pages, pool: BlockPool) -> npt.NDArray[np.bool_]:
        """Take note that a row lets go of blocks: those that nobody can find are not its own any more.

        Args:
            row: The row.
            group: The group.
            start: The first block.
            pages: Their pages, 0 for none.
            pool: Who knows which can be found.

        Returns:
            Which can be found.
        """
        s, g = self._place[group]
        is_kept: npt.NDArray[np.bool_] = pool.owners(pages) != NOBODY
        self.pages[s][g, row, start : start + len(pages)] *= is_kept
        return is_kept

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
