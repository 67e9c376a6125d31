"""Forks: requests that go on from the same tokens hold the same pages, until one of them writes into one.

Full blocks are never written again. Only the block that a request's next token falls into can be shared and not full:
whoever is the first to write into it writes into a copy, and the last one that shares it has it for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.cache.block_pool import BlockPool
from kvframe.cache.block_table import BlockTables
from kvframe.cache.free_list import BlockIds
from kvframe.plan import PlannedGroup

PageCopier = Callable[[int, Sequence[int], Sequence[int]], None]
"""Copies pages within the pool, byte by byte: of a group, from some block ids to as many others. It may raise."""


@attrs.frozen
class SharedBlock:
    """A block that a row is about to write, in a page that others hold too."""

    row: int
    group: int
    block: int
    page: int


class ForkedRows:
    """The rows that may share a page which is not full.

    Invariant: a page that is not full has several holders only if all of their rows, but for one perhaps, are here.
    """

    def __init__(
        self,
        groups: Sequence[PlannedGroup],
        pool: BlockPool,
        tables: BlockTables,
        num_computed: npt.NDArray[np.int64],
        copier: PageCopier,
    ) -> None:
        """Start with none.

        Args:
            groups: The groups of requests' own tokens.
            pool: The pages.
            tables: One block table per group.
            num_computed: ``[max_num_seqs], int64, host``: the computed tokens of each row, as they are at any time.
            copier: Copies pages.
        """
        self._groups = tuple(groups)
        self._pool = pool
        self._tables = tables
        self._num_computed = num_computed
        self._copier = copier
        self.rows: set[int] = set()

    def blocks_to_copy(self, rows: Sequence[int], wanted: Sequence[list[Sequence[int]]]) -> list[SharedBlock]:
        """Return the shared blocks that rows are about to write, each but the last holder's of a page.

        Args:
            rows: The rows.
            wanted: For each, per group, the indices of the blocks that it lacks a page for; these are added, in front.
        """
        leaving: Counter[int] = Counter()
        found = []
        for row, places in zip(rows, wanted, strict=True):
            for group in self._groups if row in self.rows else ():
                block, num_written = divmod(int(self._num_computed[row]), group.block_size)
                if not num_written:
                    continue
                ids = self._tables[group.index].ids[row, block : block + 1]
                page = int(ids[0])
                if page and self._pool.reference_counts(ids)[0] - leaving[page] > 1:
                    leaving[page] += 1
                    places[group.index] = [block, *places[group.index]]
                    found.append(SharedBlock(row, group.index, block, page))
        return found

    def copy(
        self,
        blocks: Sequence[SharedBlock],
        rows: Sequence[int],
        wanted: Sequence[Sequence[Sequence[int]]],
        taken: BlockIds,
    ) -> None:
        """Copy shared pages into those that are to take their places; if a copy fails, give back all that were taken.

        Args:
            blocks: What ``blocks_to_copy`` returned.
            rows: The rows.
            wanted: For each, per group, the blocks that get a page.
            taken: Their pages, of one group after the other, and within a group of one row after the other.
        """
        counts = [sum(map(len, places)) for places in zip(*wanted, strict=True)]
        place = [0, *accumulate(counts)]
        first: dict[tuple[int, int], int] = {}
        for row, places in zip(rows, wanted, strict=True):
            for group, where in enumerate(places):
                first[row, group] = place[group]
                place[group] += len(where)
        pages = taken[[first[each.row, each.group] for each in blocks]].tolist()
        try:
            for group in dict.fromkeys(each.group for each in blocks):
                pairs = [(each.page, page) for each, page in zip(blocks, pages, strict=True) if each.group == group]
                self._copier(group, [source for source, _ in pairs], [target for _, target in pairs])
        except BaseException:
            self._pool.release_blocks(taken, np.repeat(np.arange(len(counts)), counts))
            raise

    def leave(self, blocks: Sequence[SharedBlock]) -> None:
        """Let go of the pages that were copied."""
        for each in blocks:
            self._pool.release_blocks(np.array([each.page], dtype=np.int32), each.group)
