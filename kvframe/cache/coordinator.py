"""The coordinator: one request's blocks over any number of groups, derived from live ranges alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from kvframe.cache.block_table import BlockTable
from kvframe.cache.inputs import InputBlocks
from kvframe.cache.lookup import PrefixHit
from kvframe.cache.pool import BlockPool, PrefixKey
from kvframe.plan import KVCachePlan, PlannedGroup
from kvframe.specs import KVCacheSpec


@attrs.define
class RequestBlocks:
    """The blocks of one request.

    Invariant: ``block_ids[g][i]`` is a page that this request references, or 0; each row of a block table equals it.

    Attributes:
        row: Its row in every block table.
        block_ids: Per group, block ids by block index.
        live: Per group of the request's tokens, the block index ranges that may hold pages.
        num_published: Per group, the blocks whose keys were offered to the prefix index.
        num_computed: Its tokens whose state is computed.
        branch: Where its tokens part from those of an earlier request; 0 if nothing is known.
        inputs: Its blocks in the groups of inputs.
        missing: The inputs whose state is not computed.
    """

    row: int
    block_ids: list[list[int]]
    live: list[tuple[tuple[int, int], ...]]
    num_published: list[int]
    num_computed: int
    branch: int = 0
    inputs: tuple[InputBlocks, ...] = ()
    missing: frozenset[str] = frozenset()


class KVCacheCoordinator:
    """Derives allocation and release from each group's live ranges. It asks no spec for its type."""

    def __init__(self, plan: KVCachePlan, pool: BlockPool, tables: Sequence[BlockTable]) -> None:
        """Work on a pool and mirror every change into the block tables.

        Args:
            plan: The groups.
            pool: The pages.
            tables: One block table per group.
        """
        self._groups: tuple[PlannedGroup, ...] = plan.groups
        self._pool = pool
        self._alignment = plan.alignment
        self._tables = tuple(tables)
        self._of_tokens = tuple(group for group in plan.groups if not group.is_of_input)
        # Types that store every block of a step need not be asked in each.
        self._is_sparse = [
            not group.is_of_input and type(group.spec).stored_blocks is not KVCacheSpec.stored_blocks
            for group in plan.groups
        ]
        sizes = [(group.index, group.block_size) for group in self._of_tokens]
        self._dense = tuple((index, size) for index, size in sizes if not self._is_sparse[index])
        self._sparse = tuple((index, size) for index, size in sizes if self._is_sparse[index])

    def start(self, row: int, hit: PrefixHit, inputs: tuple[InputBlocks, ...] = ()) -> RequestBlocks:
        """Begin a request from what a lookup found, referencing its blocks."""
        blocks = RequestBlocks(
            row=row,
            block_ids=[list(ids) for ids in hit.block_ids],
            live=[((0, len(ids)),) for ids in hit.block_ids],
            num_published=[len(ids) for ids in hit.block_ids],
            num_computed=hit.num_tokens,
            branch=hit.branch,
            inputs=inputs,
            missing=frozenset(each.sequence for each in inputs if not hit.block_ids[each.group]),
        )
        for group, (table, ids) in enumerate(zip(self._tables, blocks.block_ids, strict=True)):
            for block_id in ids:
                if block_id:
                    self._pool.reference(group, block_id)
            table.write(row, 0, ids)
        return blocks

    def resume(
        self, row: int, swapped: RequestBlocks, num_tokens: int, keys: Mapping[int, Sequence[PrefixKey]] | None
    ) -> tuple[RequestBlocks, list[list[int]]] | None:
        """Begin a request again where it was swapped out, with room for its tokens ``[0, num_tokens)``.

        A block that was published and can still be found is referenced, so that what requests share stays shared; every
        other one that was resident gets a page to be filled.

        Args:
            row: Its row.
            swapped: Its blocks as they were; each id is that of a copy, 0 where nothing was resident.
            num_tokens: The tokens to make room for.
            keys: The prefix keys of its full blocks, by block size; None to take every page anew.

        Returns:
            Its blocks and, per group, the ids of those to be filled, 0 elsewhere; None, and nothing changed, if there
            are not enough pages.
        """
        found = self._find_again(swapped, keys)
        places = self._places(swapped, num_tokens)
        wanted = [
            len(new) + sum(1 for copy, block_id in zip(copies, ids, strict=True) if copy and not block_id)
            for copies, ids, new in zip(swapped.block_ids, found, places, strict=True)
        ]
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
        for group, copies, ids, pages in zip(self._groups, swapped.block_ids, found, taken, strict=True):
            page = iter(pages)
            fill = [next(page) if copy and not block_id else 0 for copy, block_id in zip(copies, ids, strict=True)]
            to_fill.append(fill)
            blocks.block_ids.append([*map(max, ids, fill)])
            self._tables[group.index].write(row, 0, blocks.block_ids[-1])
            self._fill(blocks, group, places[group.index], list(page), num_tokens)
        return blocks, to_fill

    def _find_again(self, swapped: RequestBlocks, keys: Mapping[int, Sequence[PrefixKey]] | None) -> list[list[int]]:
        """Return per group the pages in which a swapped request's published blocks are found, 0 elsewhere."""
        of_inputs = {each.group: each.keys for each in swapped.inputs}
        found = []
        for group, copies in zip(self._groups, swapped.block_ids, strict=True):
            known: Sequence[PrefixKey] = ()
            if keys is not None:
                known = of_inputs.get(group.index, ()) if group.is_of_input else keys.get(group.block_size, ())
            known = known[: swapped.num_published[group.index]]
            ids = [self._pool.find(group.index, key) if copy else 0 for copy, key in zip(copies, known, strict=False)]
            found.append([*ids, *[0] * (len(copies) - len(ids))])
        return found

    def extend(self, blocks: RequestBlocks, num_tokens: int) -> bool:
        """Give a request room for its tokens ``[0, num_tokens)`` and, the first time, for its inputs.

        Returns:
            False, and nothing changed, if there is none.
        """
        if self._has_room(blocks, num_tokens):
            return True
        places = self._places(blocks, num_tokens)
        taken = self._pool.allocate([len(new) for new in places])
        if taken is None:
            return False
        for group, where, block_ids in zip(self._groups, places, taken, strict=True):
            self._fill(blocks, group, where, block_ids, num_tokens)
        return True

    def _has_room(self, blocks: RequestBlocks, num_tokens: int) -> bool:
        """Return whether every block up to ``num_tokens`` has its page: so it is in most steps of one token."""
        for index, size in self._dense:
            if len(blocks.block_ids[index]) * size < num_tokens:
                return False
        for index, size in self._sparse:
            ids, current = blocks.block_ids[index], blocks.num_computed // size
            if (current + 1) * size < num_tokens or current >= len(ids) or not ids[current]:
                return False
        return not blocks.missing

    def _places(self, blocks: RequestBlocks, num_tokens: int) -> list[Sequence[int]]:
        """Return per group the indices of the blocks that lack a page to compute tokens up to ``num_tokens``."""
        places: list[Sequence[int]] = [()] * len(self._groups)
        num_computed = blocks.num_computed
        for group in self._of_tokens:
            ids, size = blocks.block_ids[group.index], group.block_size
            if not self._is_sparse[group.index]:
                places[group.index] = range(len(ids), -(-num_tokens // size))
            elif num_computed < num_tokens:
                resume = self._where_others_continue(blocks, num_tokens)
                stored = group.spec.stored_blocks(num_computed, num_tokens - num_computed, resume)
                places[group.index] = [
                    index
                    for start, stop in stored
                    for index in range(max(start, num_computed // size), stop)
                    if index >= len(ids) or not ids[index]
                ]
        if blocks.missing:
            for each in blocks.inputs:
                if each.sequence in blocks.missing:
                    places[each.group] = range(len(blocks.block_ids[each.group]), each.num_blocks)
        return places

    def _where_others_continue(self, blocks: RequestBlocks, num_tokens: int) -> int:
        """Return from where in the tokens up to ``num_tokens`` a later request may want to continue.

        Where they part from an earlier request's, or else at the last boundary that all groups have before the last
        token: that one is computed again if the request comes again.
        """
        if blocks.num_computed < blocks.branch <= num_tokens:
            return blocks.branch
        return (num_tokens - 1) // self._alignment * self._alignment

    def _fill(
        self, blocks: RequestBlocks, group: PlannedGroup, places: Sequence[int], new: Sequence[int], num_tokens: int
    ) -> None:
        """Put a group's new block ids in their places."""
        ids, table = blocks.block_ids[group.index], self._tables[group.index]
        if self._is_sparse[group.index]:
            ids.extend([0] * (-(-num_tokens // group.block_size) - len(ids)))
            for index, block_id in zip(places, new, strict=True):
                ids[index] = block_id
                table.write(blocks.row, index, (block_id,))
        elif new:
            table.write(blocks.row, len(ids), new)
            ids.extend(new)

    def publish(self, blocks: RequestBlocks, keys: Mapping[int, Sequence[PrefixKey]], num_computed: int) -> None:
        """Make the blocks that ``num_computed`` tokens fill, and those of inputs, findable.

        Each holds what its key stands for: a step writes every page in the range of its tokens.
        """
        for group in self._of_tokens:
            ids = blocks.block_ids[group.index]
            num_full = num_computed // group.block_size
            for index in range(blocks.num_published[group.index], num_full):
                if ids[index]:
                    self._pool.publish(group.index, ids[index], keys[group.block_size][index])
            blocks.num_published[group.index] = max(num_full, blocks.num_published[group.index])
        for each in blocks.inputs:
            if not blocks.num_published[each.group]:
                blocks.num_published[each.group] = each.num_blocks
                for block_id, key in zip(blocks.block_ids[each.group], each.keys, strict=True):
                    self._pool.publish(each.group, block_id, key)

    def commit(self, blocks: RequestBlocks, num_computed: int) -> None:
        """Take note that tokens ``[0, num_computed)`` are computed; release the blocks that no token after them needs.

        Inputs are computed with the first of them, and stay.
        """
        blocks.num_computed = num_computed
        if blocks.missing:
            blocks.missing = frozenset()
        for group in self._of_tokens:
            index = group.index
            ids = blocks.block_ids[index]
            live = group.spec.live_blocks(num_computed)
            # The block that the next token is written into stays, live or not.
            current = num_computed // group.block_size
            if live and live[-1][1] >= current:
                kept = (*live[:-1], (live[-1][0], len(ids)))
            else:
                kept = (*live, (current, len(ids)))
            before = blocks.live[index]
            if before and before[-1][1] < len(ids):
                before = (*before[:-1], (before[-1][0], len(ids)))
            # Where few blocks are stored, each step says which: those beyond its end are of tokens that were refused.
            for start, stop in _difference(before, live if self._is_sparse[index] else kept):
                self._pool.release(index, [block_id for block_id in ids[start:stop] if block_id])
                ids[start:stop] = [0] * (stop - start)
                self._tables[index].clear(blocks.row, start, stop)
            blocks.live[index] = kept

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
