"""The coordinator: one request's blocks over any number of groups, derived from live ranges alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import attrs

from kvframe.cache.block_table import BlockTable
from kvframe.cache.pool import BlockPool, PrefixKey
from kvframe.plan import KVCachePlan, PlannedGroup


@attrs.frozen
class PrefixHit:
    """The longest prefix that every group can continue from.

    Attributes:
        num_tokens: Tokens that need not be computed.
        block_ids: Per group, the block ids of these tokens' blocks; 0 where a block is not live any more.
    """

    num_tokens: int
    block_ids: tuple[list[int], ...]


@attrs.define
class RequestBlocks:
    """The blocks of one request.

    Invariant: ``block_ids[g][i]`` is a page that this request references, or 0; each row of a block table equals it.

    Attributes:
        row: Its row in every block table.
        block_ids: Per group, block ids by block index.
        live: Per group, the block index ranges that may hold pages.
        num_published: Per group, the blocks whose keys were offered to the prefix index.
    """

    row: int
    block_ids: list[list[int]]
    live: list[tuple[tuple[int, int], ...]]
    num_published: list[int]


class KVCacheCoordinator:
    """Derives allocation, release and prefix hits from each group's live ranges. It asks no spec for its type."""

    def __init__(self, plan: KVCachePlan, pool: BlockPool, tables: Sequence[BlockTable]) -> None:
        """Work on a pool and mirror every change into the block tables.

        Args:
            plan: The groups.
            pool: The pages.
            tables: One block table per group.
        """
        self._groups: tuple[PlannedGroup, ...] = plan.groups
        self._pool = pool
        self._tables = tuple(tables)
        self._alignment = math.lcm(*(group.block_size for group in plan.groups))

    def find_prefix(self, keys: Mapping[int, Sequence[PrefixKey]], max_tokens: int) -> PrefixHit:
        """Return the longest prefix of at most ``max_tokens`` tokens that every group can continue from.

        A hit at ``n`` needs exactly the live range at ``n``, in every group. Nothing is changed.

        Args:
            keys: The prefix keys of the request's full blocks, by block size.
            max_tokens: The longest hit that is of use.
        """
        found: list[list[int]] = []
        missing_before: list[list[int]] = []
        for group in self._groups:
            wanted = keys[group.block_size][: max_tokens // group.block_size]
            blocks = [self._pool.find(group.index, key) for key in wanted]
            found.append(blocks)
            missing_before.append([0, *accumulate(not block for block in blocks)])
        num_tokens = max_tokens - max_tokens % self._alignment if self._groups else 0
        while num_tokens and not self._all_live_found(missing_before, num_tokens):
            num_tokens -= self._alignment
        hit_blocks = []
        for group, blocks in zip(self._groups, found, strict=True):
            held = [0] * (num_tokens // group.block_size)
            for start, stop in group.spec.live_blocks(num_tokens):
                held[start:stop] = blocks[start:stop]
            hit_blocks.append(held)
        return PrefixHit(num_tokens, tuple(hit_blocks))

    def _all_live_found(self, missing_before: Sequence[Sequence[int]], num_tokens: int) -> bool:
        return all(
            missing[start] == missing[stop]
            for group, missing in zip(self._groups, missing_before, strict=True)
            for start, stop in group.spec.live_blocks(num_tokens)
        )

    def start(self, row: int, hit: PrefixHit) -> RequestBlocks:
        """Begin a request from a prefix hit, referencing its blocks."""
        blocks = RequestBlocks(
            row=row,
            block_ids=[list(ids) for ids in hit.block_ids],
            live=[((0, len(ids)),) for ids in hit.block_ids],
            num_published=[len(ids) for ids in hit.block_ids],
        )
        for group, (table, ids) in enumerate(zip(self._tables, blocks.block_ids, strict=True)):
            for block_id in ids:
                if block_id:
                    self._pool.reference(group, block_id)
            table.write(row, 0, ids)
        return blocks

    def resume(
        self, row: int, swapped: RequestBlocks, num_tokens: int, keys: Mapping[int, Sequence[PrefixKey]]
    ) -> tuple[RequestBlocks, list[list[int]]] | None:
        """Begin a request again where it was swapped out, with room for its tokens ``[0, num_tokens)``.

        A block that was published and can still be found is referenced, so that what requests share stays shared; every
        other one that was resident gets a page to be filled.

        Args:
            row: Its row.
            swapped: Its blocks as they were; each id is that of a copy, 0 where nothing was resident.
            num_tokens: The tokens to make room for.
            keys: The prefix keys of its full blocks, by block size; empty to take every page anew.

        Returns:
            Its blocks and, per group, the ids of those to be filled, 0 elsewhere; None, and nothing changed, if there
            are not enough pages.
        """
        found: list[list[int]] = []
        wanted: list[int] = []
        for group, copies in zip(self._groups, swapped.block_ids, strict=True):
            known = keys.get(group.block_size, ())[: swapped.num_published[group.index]]
            ids = [self._pool.find(group.index, key) if copy else 0 for copy, key in zip(copies, known, strict=False)]
            ids.extend([0] * (len(copies) - len(ids)))
            found.append(ids)
            missing = sum(1 for copy, block_id in zip(copies, ids, strict=True) if copy and not block_id)
            wanted.append(missing + max(0, -(-num_tokens // group.block_size) - len(copies)))
        # First of all, so that nothing of it is evicted to make room.
        for index, ids in enumerate(found):
            for block_id in filter(None, ids):
                self._pool.reference(index, block_id)
        taken = self._pool.allocate(wanted)
        if taken is None:
            for index, ids in enumerate(found):
                self._pool.release(index, [block_id for block_id in reversed(ids) if block_id])
            return None
        blocks = attrs.evolve(swapped, row=row, block_ids=[])
        to_fill: list[list[int]] = []
        for table, copies, ids, pages in zip(self._tables, swapped.block_ids, found, taken, strict=True):
            page = iter(pages)
            fill = [next(page) if copy and not block_id else 0 for copy, block_id in zip(copies, ids, strict=True)]
            to_fill.append(fill)
            blocks.block_ids.append([*map(max, ids, fill), *page])
            table.write(row, 0, blocks.block_ids[-1])
        return blocks, to_fill

    def extend(self, blocks: RequestBlocks, num_tokens: int) -> bool:
        """Give a request room for its tokens ``[0, num_tokens)``; False, and nothing changed, if there is none."""
        wanted = [
            max(0, -(-num_tokens // group.block_size) - len(ids))
            for group, ids in zip(self._groups, blocks.block_ids, strict=True)
        ]
        if not any(wanted):
            return True
        taken = self._pool.allocate(wanted)
        if taken is None:
            return False
        for table, ids, new in zip(self._tables, blocks.block_ids, taken, strict=True):
            if new:
                table.write(blocks.row, len(ids), new)
                ids.extend(new)
        return True

    def publish(self, blocks: RequestBlocks, keys: Mapping[int, Sequence[PrefixKey]], num_computed: int) -> None:
        """Make the blocks that ``num_computed`` tokens fill findable."""
        for group, ids in zip(self._groups, blocks.block_ids, strict=True):
            num_full = num_computed // group.block_size
            for index in range(blocks.num_published[group.index], num_full):
                if ids[index]:
                    self._pool.publish(group.index, ids[index], keys[group.block_size][index])
            blocks.num_published[group.index] = max(num_full, blocks.num_published[group.index])

    def release_dead(self, blocks: RequestBlocks, num_computed: int) -> None:
        """Release the blocks that no token from ``num_computed`` on needs."""
        for group, table, ids in zip(self._groups, self._tables, blocks.block_ids, strict=True):
            # The block that the next token is written into stays, live or not.
            current = num_computed // group.block_size
            live = group.spec.live_blocks(num_computed)
            if live and live[-1][1] >= current:
                live = (*live[:-1], (live[-1][0], len(ids)))
            else:
                live = (*live, (current, len(ids)))
            before = blocks.live[group.index]
            if before and before[-1][1] < len(ids):
                before = (*before[:-1], (before[-1][0], len(ids)))
            for start, stop in _difference(before, live):
                dead = [block_id for block_id in ids[start:stop] if block_id]
                self._pool.release(group.index, dead)
                ids[start:stop] = [0] * (stop - start)
                table.clear(blocks.row, start, stop)
            blocks.live[group.index] = live

    def free(self, blocks: RequestBlocks) -> None:
        """Release every block of a request, its tail first: a prefix outlives what hangs on it."""
        for group, (table, ids) in enumerate(zip(self._tables, blocks.block_ids, strict=True)):
            self._pool.release(group, [block_id for block_id in reversed(ids) if block_id])
            table.clear(blocks.row, 0, len(ids))
            ids.clear()


def _difference(whole: Sequence[tuple[int, int]], kept: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the parts of ``whole`` outside ``kept``; both are sorted and disjoint."""
    if whole and kept and whole[0] == kept[0] and len(whole) == len(kept) == 1:
        return []
    left = []
    for start, stop in whole:
        for keep_start, keep_stop in kept:
            if keep_stop <= start or stop <= keep_start:
                continue
            if start < keep_start:
                left.append((start, keep_start))
            start = max(start, keep_stop)
        if start < stop:
            left.append((start, stop))
    return left
