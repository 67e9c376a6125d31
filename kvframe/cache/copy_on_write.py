"""Copy on write: forks share pages, and a request that is about to write into a shared page gets a copy of it.

Full blocks are never written again. Only the block of a request's next token can be shared and not full. The first
request that writes into such a block writes into a copy; the last one that shares the block keeps the page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from kvframe.cache.block_pool import BlockPool
from kvframe.cache.block_table import GroupKinds, RowNumbers, Rows
from kvframe.cache.free_list import BlockIds

PageCopier = Callable[[int, Sequence[int], Sequence[int]], None]
"""Copies pages within the pool, byte by byte: of a group, from some block ids to as many others. It may raise."""


WrittenBlocks = dict[int, list[tuple[int, int, int]]]
"""Per group, blocks that rows are about to write and other rows reference too: of each its row, index and page."""


class SharedBlocks:
    """The rows that may share a page which is not full.

    Invariant: if a page is not full and several rows reference it, all of these rows, or all but one, are in ``rows``.
    """

    def __init__(self, kinds: GroupKinds, numbers: RowNumbers, pool: BlockPool, copier: PageCopier) -> None:
        self._kinds, self._numbers, self._pool, self._copier = kinds, numbers, pool, copier
        self.rows: set[int] = set()

    def blocks_to_copy(self, rows: Rows) -> WrittenBlocks:
        """Return the shared blocks that rows are about to write; the last row that references a page needs no copy."""
        num_leaving: Counter[int] = Counter()
        found: WrittenBlocks = {}
        for row in rows.tolist():
            for group in self._kinds.of_tokens if row in self.rows else ():
                block, num_written = divmod(self._numbers.computed_of[row], group.block_size)
                if not num_written:
                    continue
                ids = self._kinds.tables[group.index].ids[row, block : block + 1]
                page = int(ids[0])
                if page and self._pool.reference_counts(ids)[0] - num_leaving[page] > 1:
                    num_leaving[page] += 1
                    found.setdefault(group.index, []).append((row, block, page))
        return found

    def copy(self, shared: WrittenBlocks, copies: Sequence[BlockIds], taken: BlockIds, counts: Sequence[int]) -> None:
        """Copy shared pages to each group's ``copies``; if that fails, release ``taken``, all new pages by group."""
        try:
            for (group, blocks), of_group in zip(shared.items(), copies, strict=True):
                self._copier(group, [page for _, _, page in blocks], of_group[0].tolist())
        except BaseException:
            self._pool.release_blocks(taken, np.repeat(np.arange(len(counts)), counts))
            raise

    def release_copied(self, shared: WrittenBlocks, rows: Rows) -> None:
        """Release the pages that were copied: these rows no longer share a block."""
        for group, blocks in shared.items():
            self._pool.release_blocks(np.array([page for _, _, page in blocks], dtype=np.int32), group)
        self.rows.difference_update(rows.tolist())
