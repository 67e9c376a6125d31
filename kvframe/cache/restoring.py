"""Prefixes whose pages come from elsewhere: put into the cache as if they had been computed here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvframe.cache.block_table import BlockTables
from kvframe.cache.coordinator import KVCacheCoordinator
from kvframe.cache.inputs import InputIndex
from kvframe.cache.prefix import NO_MATCH, Namespace
from kvframe.cache.resuming import Resumer, SwappedBlocks
from kvframe.cache.tree import PrefixTree


class Fetch(Protocol):
    """Copies pages from where they lie to the pool."""

    def __call__(self, group: int, copies: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy a group's pages.

        Args:
            group: The group.
            copies: Where they lie, as whoever restores them numbers that, from 1 on.
            block_ids: As many pages of the pool.
        """


def restore(
    row: int,
    saved: SwappedBlocks,
    fetch: Fetch,
    *,
    namespace: Namespace,
    token_ids: Sequence[int],
    resumer: Resumer,
    coordinator: KVCacheCoordinator,
    tables: BlockTables,
    tree: PrefixTree,
    inputs: InputIndex,
) -> bool:
    """Let a row be resumed as if it had been swapped out, publish all that it has, and be free again.

    Args:
        row: A free row.
        saved: Where the pages lie.
        fetch: Copies those that are not in the cache.
        namespace: Whom the prefix is shared with.
        token_ids: Its tokens.
        resumer: Who gives the row its pages.
        coordinator: Whose row it is.
        tables: The block tables.
        tree: Where blocks of tokens are published.
        inputs: Where inputs are.

    Returns:
        False, and nothing changed, if the pool cannot give the pages now.

    Raises:
        Exception: What ``fetch`` raises; nothing is published.
    """
    to_fill = resumer.resume(row, saved, saved.num_computed, resumer.find(namespace, token_ids, saved))
    if to_fill is None:
        return False
    try:
        for group, (copies, ids) in enumerate(zip(saved.copies, to_fill, strict=True)):
            wanted = [(copy, page) for copy, page in zip(copies, ids, strict=True) if page]
            fetch(group, [copy for copy, _ in wanted], [page for _, page in wanted])
        tree.follow(row, namespace, token_ids, 0, NO_MATCH)
        for each in saved.state.inputs:
            inputs.publish(each, tables[each.group].ids[row, : each.num_blocks])
        coordinator.commit(row, saved.num_computed)
    finally:
        coordinator.free(row)
    return True
