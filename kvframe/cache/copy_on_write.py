"""Copy on write: forks share pages, and a request that is about to write into a shared page gets a copy of it.

Full blocks are never written again. Only the block of a request's next token can be shared and not full. The first
request that writes into such a block writes into a copy; the last one that shares the block keeps the page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import attrs
import numpy as np

from kvframe.cache.block_pool import BlockPool
from kvframe.cache.block_table import GroupKinds, RowNumbers, Rows
from kvframe.cache.free_list import BlockIds

PageCopier = Callable[[int, Sequence[int], Sequence[int]], None]
"""Copies pages within the pool, byte by byte: of a group, from some block ids to as many others. It may raise."""


@attrs.frozen
class SharedBlock:
    """A block that a row is about to write, in a page that other rows reference too."""

    row: int
    group: int
    block: int
    page: int


class SharedBlocks:
    """The rows that may share a page which is not full.

    Invariant: if a page is not full and several rows reference it, all of these rows, or all but one, are here.

    Attributes:
        rows: These rows.
    """

    def __init__(self, kinds: GroupKinds, numbers: RowNumbers, pool: BlockPool, copier: PageCopier) -> None:
        self._kinds, self._numbers, self._pool, self._copier = kinds, numbers, pool, copier
        self.rows: set[int] = set()

    def blocks_to_copy(self, rows: Rows) -> list[SharedBlock]:
        """Return the shared blocks that rows are about to write; the last row that references a page needs no copy."""
        num_leaving: Counter[int] = Counter()
        found = []
        for row in rows.tolist():
            for group in self._kinds.of_tokens if row in self.rows else ():
                block, num_written = divmod(self._numbers.computed_of[row], group.block_size)
                if not num_written:
                    continue
                ids = self._kinds.tables[group.index].ids[row, block : block + 1]
                page = int(ids[0])
                if page and self._pool.reference_counts(ids)[0] - num_leaving[page] > 1:
                    num_leaving[page] += 1
                    found.append(SharedBlock(row, group.index, block, page))
        return found

    def copy(
        self, blocks: Sequence[SharedBlock], copies: Sequence[BlockIds], taken: BlockIds, counts: Sequence[int]
    ) -> None:
        """Copy shared pages to ``copies``; if that fails, release all pages of the allocation, ``taken``, by group."""
        try:
            for group in dict.fromkeys(each.group for each in blocks):
                pairs = [
                    (each.page, copy.item()) for each, copy in zip(blocks, copies, strict=True) if each.group == group
                ]
                self._copier(group, [source for source, _ in pairs], [target for _, target in pairs])
        except BaseException:
            self._pool.release_blocks(taken, np.repeat(np.arange(len(counts)), counts))
            raise

    def release_copied(self, blocks: Sequence[SharedBlock], rows: Rows) -> None:
        """Release the pages that were copied: these rows no longer share a block."""
        for each in blocks:
            self._pool.release_blocks(np.array([each.page], dtype=np.int32), each.group)
        self.rows.difference_update(rows.tolist())
