"""The prefix cache: the block pool and the indexes that find published pages in it, as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvframe.cache.audit import audit_pool, audit_tree
from kvframe.cache.block_pool import NO_OWNER, BlockPool, Indices
from kvframe.cache.events import EventLog
from kvframe.cache.free_list import BlockIds, Groups
from kvframe.cache.input_index import InputIndex, InputSequence, input_blocks, inputs_root
from kvframe.cache.prefix_lookup import NO_HIT, PrefixHit, PrefixLookup
from kvframe.cache.publisher import Publisher
from kvframe.cache.radix_tree import RadixTree
from kvframe.cache.rows import GroupKinds
from kvframe.contract.eviction import EvictionPolicy
from kvframe.planning.plan import KVCachePlan


class PrefixCache:
    """The block pool, the radix tree and the index of inputs, which need each other.

    Invariant: a page is found only through its owner in the pool.

    Attributes:
        pool: The pages.
        tree: Finds published blocks of tokens.
        publisher: Publishes blocks of tokens as requests compute them.
        inputs: Finds published blocks of inputs.
        lookup: Finds the longest prefix that all groups have.
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

        Raises:
            PluginError: The eviction policy gives a wrong answer.
        """
        self.tree = RadixTree(kinds.live, kinds.stacks, plan.max_model_len)
        self.publisher = Publisher(self.tree, num_computed, next_publication)
        self.inputs = InputIndex(plan.groups)
        on_evicted = self.tree.remove_evicted
        if any(group.is_of_input for group in plan.groups):
            on_evicted = self._remove_evicted
        self.pool = BlockPool(
            plan, reserve_slabs=_reserve(plan), on_evicted=on_evicted if is_caching else None, eviction=eviction
        )
        self.tree.pool = self.inputs.pool = self.pool
        self.lookup = PrefixLookup(plan, kinds, self.tree, self.inputs)
        self._input_groups = tuple(group for group in plan.groups if group.is_of_input)
        self._is_caching = is_caching

    def _remove_evicted(self, owner: int, groups: int | Groups, indices: Indices) -> None:
        """Remove evicted pages from the index that knows their owner: inputs have negative numbers."""
        index = self.inputs if owner < NO_OWNER else self.tree
        index.remove_evicted(owner, groups, indices)

    def find_whole_prefix(self, token_ids: Sequence[int], salt: str, inputs: Mapping[str, InputSequence]) -> PrefixHit:
        """Return what is cached of tokens, the last one included, and of inputs."""
        if not self._is_caching:
            return NO_HIT
        of_inputs = input_blocks(self._input_groups, inputs, salt)
        # A lookup leaves out a request's last token: here that is one more.
        return self.lookup.find_prefix((salt, inputs_root(inputs)), token_ids, len(token_ids) + 1, of_inputs)

    def clear(self) -> None:
        """Evict every cached page, and make held ones unfindable."""
        self.pool.unpublish_all()
        self.publisher.unfollow_all()
        self.inputs.forget_inputs()

    def resize(self, plan: KVCachePlan) -> bool:
        """Have the slabs of another plan, which differs in their number only; evict cached pages of removed slabs.

        Returns:
            False, and nothing changed, if a page of a slab to be removed is held.
        """
        return not plan.groups or self.pool.resize(plan, _reserve(plan))

    def log_events_to(self, log: EventLog | None) -> None:
        """Log what is findable now, and from now on what becomes findable and what is removed; None stops it."""
        if log is None:
            self.tree.on_stored = self.inputs.on_stored = self.pool.on_removed = None
            return
        for node in self.tree.walk():
            log.record_stored(node, node.start, node.stop)
        for blocks, pages in self.inputs.cached_inputs():
            log.record_stored_input(blocks, np.flatnonzero(pages), pages)
        self.tree.on_stored, self.inputs.on_stored = log.record_stored, log.record_stored_input
        self.pool.on_removed = log.record_removed

    def published(self) -> Iterator[tuple[int, int]]:
        """Go through the findable pages: the group and block id of each."""
        for node in self.tree.walk():
            for pages, groups in zip(node.pages, self.tree.groups, strict=True):
                for group, row in zip(groups, pages, strict=True):
                    yield from ((group, page) for page in row[row != 0].tolist())
        yield from self.inputs.published_inputs()

    def audit(self, plan: KVCachePlan, held: BlockIds) -> None:
        """Check that every page is free, held or cached, and counted right; it takes long.

        Args:
            plan: The plan.
            held: ``[n], int32, host``: the pages that are held, each as often as it is referenced.

        Raises:
            AssertionError: It is not so; the text says what is wrong.
        """
        audit_pool(self.pool, plan, held)
        if self._is_caching:
            audit_tree(self.tree)


def _reserve(plan: KVCachePlan) -> int:
    """Return the idle slabs that the plan promises to a lone request of the greatest length."""
    return min(plan.num_slabs_for(group.peak_blocks for group in plan.groups), plan.num_slabs)
