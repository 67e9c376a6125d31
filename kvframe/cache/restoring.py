"""Prefixes whose pages come from elsewhere: put into the cache as if they had been computed here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvframe.cache.block_table import BlockTables
from kvframe.cache.coordinator import KVCacheCoordinator
from kvframe.cache.inputs import InputIndex, InputSequence, input_blocks, inputs_root
from kvframe.cache.prefix import NO_MATCH, as_bytes
from kvframe.cache.publishing import Publisher
from kvframe.cache.refusals import check_input_lens
from kvframe.cache.resuming import Resumer, SwappedBlocks
from kvframe.cache.rows import RowState
from kvframe.plan import KVCachePlan


class Fetch(Protocol):
    """Copies pages from where they lie to the pool."""

    def __call__(self, group: int, copies: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy a group's pages.

        Args:
            group: The group.
            copies: Where they lie, as whoever restores them numbers that, from 1 on.
            block_ids: As many pages of the pool.
        """


class Restorer:
    """Takes in prefixes whose pages lie elsewhere. It keeps nothing: what it took in is the cache's."""

    def __init__(
        self,
        plan: KVCachePlan,
        tables: BlockTables,
        publisher: Publisher,
        inputs: InputIndex,
        coordinator: KVCacheCoordinator,
        resumer: Resumer,
    ) -> None:
        """Take prefixes into a cache.

        Args:
            plan: What it is for.
            tables: The block tables.
            publisher: Where blocks of tokens are published.
            inputs: Where those of inputs are.
            coordinator: Whose rows are used for it.
            resumer: Who gives a row its pages.
        """
        self._max_input_lens = plan.max_input_lens
        self._input_groups = tuple(group for group in plan.groups if group.is_of_input)
        self._tables = tables
        self._publisher = publisher
        self._inputs = inputs
        self._coordinator = coordinator
        self._resumer = resumer

    def restore(
        self,
        row: int,
        token_ids: Sequence[int],
        copies: list[list[int]],
        fetch: Fetch,
        *,
        salt: str,
        inputs: Mapping[str, InputSequence],
    ) -> bool:
        """Let a row be resumed as if it had been swapped out, publish all that it has, and be free again.

        Args:
            row: A free row.
            token_ids: The prefix's tokens, whole blocks in every group.
            copies: Per group, by block index, where its pages lie, numbered from 1 on; 0 for none. What can be found in
                the cache is not copied.
            fetch: Copies pages.
            salt: Whom the prefix is shared with.
            inputs: Likewise, by what it brings.

        Returns:
            False, and nothing changed, if the pool cannot give the pages now.

        Raises:
            RequestError: The plan is for fewer tokens (``too_long``) or shorter inputs (``input_too_long``), or a token
                is none (``bad_token``); nothing changed.
            Exception: What ``fetch`` raises; nothing is published.
        """
        check_input_lens(inputs, self._max_input_lens)
        as_bytes(token_ids)
        namespace = (salt, inputs_root(inputs))
        state = RowState(input_blocks(self._input_groups, inputs, salt))
        saved = SwappedBlocks(copies, len(token_ids), state)
        found = self._resumer.find(namespace, token_ids, saved)
        to_fill = self._resumer.resume(row, saved, len(token_ids), found)
        if to_fill is None:
            return False
        try:
            for group, (places, ids) in enumerate(zip(copies, to_fill, strict=True)):
                wanted = [(copy, page) for copy, page in zip(places, ids, strict=True) if page]
                fetch(group, [copy for copy, _ in wanted], [page for _, page in wanted])
            self._publisher.follow(row, namespace, token_ids, 0, NO_MATCH)
            for each in state.inputs:
                self._inputs.publish(each, self._tables[each.group].ids[row, : each.num_blocks])
            self._coordinator.commit_row(row, len(token_ids))
        finally:
            self._coordinator.free_row(row)
        return True
