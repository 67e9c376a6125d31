"""The prefix cache: the pool of pages and what finds published pages in it, made to fit each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.cache.audit import audit_pool, audit_tree
from kvframe.cache.block_pool import BlockPool, Indices, Keeper
from kvframe.cache.events import EventLog
from kvframe.cache.free_list import BlockIds
from kvframe.cache.group_kinds import GroupKinds
from kvframe.cache.input_index import InputIndex, InputSequence, input_blocks, inputs_root
from kvframe.cache.prefix_lookup import NO_HIT, PrefixHit, PrefixLookup
from kvframe.cache.publisher import Publisher
from kvframe.cache.radix_tree import RadixTree
from kvframe.eviction import EvictionPolicy
from kvframe.plan import KVCachePlan


@attrs.frozen
class _Keepers:
    """Tells the publisher of a page, the tree or the index of inputs, that it was evicted."""

    of_group: tuple[Keeper, ...]

    def lost_all(self, owner: int, group: int, num_pages: int) -> bool:
        return self.of_group[group].lost_all(owner, group, num_pages)

    def lost(self, owner: int, group: int, indices: Indices) -> None:
        self.of_group[group].lost(owner, group, indices)


class PrefixCache:
    """Makes the pool, the tree of prefixes and the index of inputs, which need each other, and acts on them as one.

    Invariant: a page can be found through its owner in the pool and nobody else.

    Attributes:
        pool: The pages.
        tree: Where published blocks of tokens are found.
        publisher: Who puts blocks of tokens there as requests compute them.
        inputs: Where those of inputs are.
        lookup: Finds what all groups have.
    """

    def __init__(
        self,
        plan: KVCachePlan,
        kinds: GroupKinds,
        num_computed: npt.NDArray[np.int64],
        next_publication: npt.NDArray[np.int64],
        *,
        is_caching: bool,
        eviction: EvictionPolicy | None,
    ) -> None:
        """Start with an empty pool.

        Args:
            plan: What was allocated.
            kinds: Its groups.
            num_computed: ``[max_num_seqs], int64, host``: the computed tokens of each row, as they are at any time.
            next_publication: Likewise, the computed tokens from which on the publisher has to be called; it sets them.
            is_caching: Whether anybody publishes pages.
            eviction: Who says which cached pages are given up first; the longest unused unless given.

        Raises:
            PluginError: The eviction policy does not answer as it has to.
        """
        self.tree = RadixTree(kinds.live, kinds.stacks, plan.max_model_len)
        self.publisher = Publisher(self.tree, num_computed, next_publication)
        self.inputs = InputIndex(plan.groups)
        keeper: Keeper = self.tree
        if any(group.is_of_input for group in plan.groups):
            keeper = _Keepers(tuple(self.inputs if group.is_of_input else self.tree for group in plan.groups))
        self.pool = BlockPool(
            plan, reserve_slabs=_reserve(plan), keeper=keeper if is_caching else None, eviction=eviction
        )
        self.tree.pool = self.inputs.pool = self.pool
        self.lookup = PrefixLookup(plan, kinds, self.tree, self.inputs)
        self._input_groups = tuple(group for group in plan.groups if group.is_of_input)
        self._is_caching = is_caching

    def find_all(self, token_ids: Sequence[int], salt: str, inputs: Mapping[str, InputSequence]) -> PrefixHit:
        """Return what is cached of tokens, up to all of them, and of inputs.

        Args:
            token_ids: The tokens.
            salt: Whom they are shared with.
            inputs: Likewise, by what is brought beside them.
        """
        if not self._is_caching:
            return NO_HIT
        of_inputs = input_blocks(self._input_groups, inputs, salt)
        # As of a request with a token more: the last one is always left out.
        return self.lookup.find((salt, inputs_root(inputs)), token_ids, len(token_ids) + 1, of_inputs)

    def forget(self) -> None:
        """Give up every cached page, and make held ones unfindable."""
        self.pool.unpublish_all()
        self.publisher.unfollow_all()
        self.inputs.forget()

    def resize(self, plan: KVCachePlan) -> bool:
        """Have more or fewer slabs; cached pages of those that go are given up.

        Args:
            plan: The plan, the same but for the number of slabs.

        Returns:
            False, and nothing changed, if somebody holds a page of a slab that would go.
        """
        return not plan.groups or self.pool.resize(plan, _reserve(plan))

    def tell(self, log: EventLog | None) -> None:
        """Tell a log what can be found now, and from now on what becomes findable and what is no more.

        Args:
            log: The only one that is told; None for nobody.
        """
        if log is None:
            self.tree.on_stored = self.inputs.on_stored = self.pool.on_removed = None
            return
        for node in self.tree.walk():
            log.stored(node, node.start, node.stop)
        for blocks, pages in self.inputs.entries():
            log.stored_input(blocks, np.flatnonzero(pages), pages)
        self.tree.on_stored, self.inputs.on_stored, self.pool.on_removed = log.stored, log.stored_input, log.removed

    def published(self) -> Iterator[tuple[int, int]]:
        """Go through the pages that can be found: the group and block id of each."""
        for node in self.tree.walk():
            for pages, groups in zip(node.pages, self.tree.groups, strict=True):
                for group, row in zip(groups, pages, strict=True):
                    yield from ((group, page) for page in row[row != 0].tolist())
        yield from self.inputs.published()

    def audit(self, plan: KVCachePlan, held: BlockIds) -> None:
        """Check that every page is free, held or cached, and counted right; it takes long.

        Args:
            plan: The plan.
            held: ``[n], int32, host``: the pages that somebody holds, each as often as it has holders.

        Raises:
            AssertionError: It is not so; the text says what.
        """
        audit_pool(self.pool, plan, held)
        if self._is_caching:
            audit_tree(self.tree)


def _reserve(plan: KVCachePlan) -> int:
    """Return the idle slabs that a lone request of the greatest length is promised."""
    return min(plan.num_slabs_for(group.peak_blocks for group in plan.groups), plan.num_slabs)
