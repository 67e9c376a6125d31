"""Swapping: rows whose pages are copied to host memory and back, and prefixes whose pages are restored from a file.

A row that comes back holds the cached pages that have the same content as its copies. Only the others are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.cache.arguments import check_copies, too_many_tokens
from kvframe.cache.audit import audit_pool
from kvframe.cache.block_pool import BlockPool
from kvframe.cache.block_table import GroupKinds, RowNumbers, RowState
from kvframe.cache.coordinator import KVCacheCoordinator
from kvframe.cache.free_list import BlockIds
from kvframe.cache.input_index import InputBlocks, InputSequence, input_blocks, inputs_root
from kvframe.cache.prefix_lookup import PrefixCache
from kvframe.cache.radix_tree import NO_MATCH, Namespace, as_bytes

FetchPages = Callable[[int, Sequence[int], Sequence[int]], None]
"""Copies pages of a group to the pool: from some places outside of it to as many block ids. It may raise."""


class HostPages(Protocol):
    """The host memory of swapped requests, cut into slabs and pages as the pool is (``attention.storage``)."""

    num_slabs: int
    """Slabs of the plan's size that fit into the memory."""

    def copy_out(self, group: int, block_ids: Sequence[int], host_ids: Sequence[int]) -> None:
        """Copy a group's pages from the pool to host memory, byte by byte; it may raise."""

    def copy_in(self, group: int, host_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy a group's pages from host memory to the pool, byte by byte; it may raise."""


@attrs.frozen
class StoredRow:
    """The data that a row needs to be restored while its pages are outside of the pool.

    Attributes:
        copies: Per group ``[num_blocks], int64, host``: the place of each block's copy; 0 for a block without a copy.
        num_computed: Its computed tokens.
        state: Its inputs, and which of them are computed.
    """

    copies: list[npt.NDArray[np.int64]]
    num_computed: int
    state: RowState


class Swapper:
    """Copies rows to host memory and back, and restores saved prefixes.

    A method that returns False, returns None or raises has changed nothing.

    Attributes:
        host_pool: The pages of the host memory; None if there is no host memory.
    """

    def __init__(
        self,
        kinds: GroupKinds,
        numbers: RowNumbers,
        coordinator: KVCacheCoordinator,
        cache: PrefixCache,
        host_pages: HostPages | None,
    ) -> None:
        plan = self._plan = kinds.plan
        self._tables, self._numbers = kinds.tables, numbers
        self._coordinator, self._cache, self._host_pages = coordinator, cache, host_pages
        self._input_groups = kinds.of_inputs
        self.host_pool: BlockPool | None = None
        if host_pages is not None:
            self.host_pool = BlockPool(attrs.evolve(plan, num_slabs=host_pages.num_slabs, num_rest_pages=0))

    def swap_out_row(self, row: int) -> StoredRow | None:
        """Copy a row's resident pages to host memory, where too few may be free (None); the row keeps its pages."""
        if self._host_pages is None or self.host_pool is None:
            return None
        blocks = [np.array(ids, dtype=np.int64) for ids in self._coordinator.blocks(row)]
        counts = [int(np.count_nonzero(ids)) for ids in blocks]
        host_ids = self.host_pool.allocate_blocks(counts)
        if host_ids is None:
            return None
        copies, num_used = [np.zeros_like(ids) for ids in blocks], 0
        for ids, of_group, count in zip(blocks, copies, counts, strict=True):
            of_group[ids != 0] = host_ids[num_used : num_used + count]
            num_used += count
        stored = StoredRow(copies, self._numbers.computed_of[row], self._numbers.states[row])
        try:
            for group, (ids, of_group) in enumerate(zip(blocks, copies, strict=True)):
                self._host_pages.copy_out(group, ids[ids != 0].tolist(), of_group[ids != 0].tolist())
        except BaseException:
            self.release_copies(stored)
            raise
        return stored

    def swap_in_row(
        self, row: int, stored: StoredRow, num_tokens: int, prefix: tuple[Namespace, Sequence[int]] | None
    ) -> bool:
        """Fill a free row from host memory, allocate blocks for its tokens ``[0, num_tokens)``, and release the copies.

        If ``prefix``, the request's namespace and tokens, is given, cached pages are shared and not copied.
        """
        assert self._host_pages is not None
        if not self._fill_row(row, stored, num_tokens, prefix, self._host_pages.copy_in):
            return False
        self.release_copies(stored)
        return True

    def release_copies(self, stored: StoredRow) -> None:
        """Release the pages of a row in host memory."""
        assert self.host_pool is not None
        for group, copies in enumerate(stored.copies):
            self.host_pool.release_blocks(copies[copies != 0].astype(np.int32), group)

    def audit_copies(self, swapped: Iterable[StoredRow]) -> None:
        """Check that the copies of these rows, and no others, are the held pages of the host memory."""
        if self.host_pool is not None:
            copies = [of_group[of_group != 0] for stored in swapped for of_group in stored.copies]
            held = np.concatenate([np.zeros(0, dtype=np.int64), *copies])
            audit_pool(self.host_pool, self._plan, held.astype(np.int32))

    def restore_prefix(
        self,
        row: int,
        token_ids: Sequence[int],
        copies: list[list[int]],
        fetch: FetchPages,
        *,
        salt: str,
        inputs: Mapping[str, InputSequence],
    ) -> bool:
        """Publish a prefix as ``KVCacheManager.restore`` says, through a free row; return False if pages are short."""
        as_bytes(token_ids, 0, len(token_ids))
        namespace = (salt, inputs_root(inputs))
        state = RowState(input_blocks(self._input_groups, inputs, salt))
        places = check_copies(copies, self._needed_blocks(len(token_ids), state.inputs))
        stored = StoredRow(places, len(token_ids), state)
        if not self._fill_row(row, stored, len(token_ids), (namespace, token_ids), fetch):
            return False
        try:
            self._cache.publisher.follow(row, namespace, token_ids, 0, NO_MATCH)
            for each in state.inputs:
                self._cache.inputs.publish_input(each, self._tables[each.group].ids[row, : each.num_blocks])
            self._coordinator.commit_row(row, len(token_ids))
        finally:
            self._coordinator.free_row(row)
        return True

    def _needed_blocks(self, num_tokens: int, inputs: Iterable[InputBlocks]) -> list[npt.NDArray[np.bool_]]:
        """Return per group ``[num_blocks], bool``: the blocks that a request needs to continue after a prefix."""
        needed = []
        for group in self._plan.groups:
            is_needed = np.zeros(0 if group.is_of_input else num_tokens // group.block_size, dtype=np.bool_)
            for start, stop in group.answers.live_blocks(num_tokens) if len(is_needed) else ():
                is_needed[start:stop] = True
            needed.append(is_needed)
        for each in inputs:
            needed[each.group] = np.ones(each.num_blocks, dtype=np.bool_)
        return needed

    def _fill_row(
        self,
        row: int,
        stored: StoredRow,
        num_tokens: int,
        prefix: tuple[Namespace, Sequence[int]] | None,
        fetch: FetchPages,
    ) -> bool:
        """Begin a free row as it was stored, from cached pages and copies; leave it free if that is not possible."""
        if num_tokens > self._plan.max_model_len:
            raise too_many_tokens(num_tokens, self._plan.max_model_len)
        cached = self._cached_pages(stored, prefix)
        to_fetch = [
            np.flatnonzero((copies != 0) & (pages == 0)) for copies, pages in zip(stored.copies, cached, strict=True)
        ]
        self._coordinator.begin_row(row, stored.num_computed, stored.state.copy())
        try:
            # These pages are held first, so that the allocation evicts none of them.
            for group, pages in enumerate(cached):
                self._coordinator.reference_blocks(row, group, pages)
            gaps = [blocks.tolist() for blocks in to_fetch]
            given = self._coordinator.allocator.allocate_for_rows(np.array([row]), np.array([num_tokens]), gaps)
            if given is not None:
                for group, (blocks, pages) in enumerate(zip(to_fetch, given, strict=True)):
                    fetch(group, stored.copies[group][blocks].tolist(), pages.tolist())
                return True
        except BaseException:
            self._coordinator.release_row(row)
            raise
        self._coordinator.release_row(row)
        return False

    def _cached_pages(self, stored: StoredRow, prefix: tuple[Namespace, Sequence[int]] | None) -> list[BlockIds]:
        """Return per group, by block, the cached page with the content of a row's copy; 0 if there is none."""
        found = [np.zeros(len(copies), dtype=np.int32) for copies in stored.copies]
        if prefix is None:
            return found
        tree = self._cache.tree
        most, own_start = stored.num_computed, stored.state.num_prompt_tokens
        match = tree.match_prefix(*prefix, most if own_start is None else min(most, own_start))
        of_stacks = tree.pages_of(match, match.length)
        for group, (s, g) in tree.place.items():
            pages = of_stacks[s][g][: len(found[group])]
            found[group][: len(pages)] = pages
        for each in stored.state.inputs:
            known = self._cache.inputs.find_input(each)
            if known is not None and each.sequence not in stored.state.missing:
                pages = known[: len(found[each.group])]
                found[each.group][: len(pages)] = pages
        for pages, copies in zip(found, stored.copies, strict=True):
            pages[copies == 0] = 0
        return found
