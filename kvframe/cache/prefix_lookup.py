"""Prefix lookup: finds a request's longest cached prefix over all groups, why it is not longer, and pins prefixes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np

from kvframe.cache.block_order import BlockIds, Groups
from kvframe.cache.block_pool import NO_OWNER, BlockPool, Indices
from kvframe.cache.block_table import GroupKinds, RowNumbers
from kvframe.cache.events import EventLog
from kvframe.cache.input_index import InputBlocks, InputIndex, Namespace
from kvframe.cache.live_range import LiveRange, Pages, longest_common_prefix
from kvframe.cache.publisher import Publisher
from kvframe.cache.radix_tree import NO_MATCH, Match, RadixTree, last_column
from kvframe.cache.stats import FoundPrefix, GroupLookups
from kvframe.contract.errors import RequestError
from kvframe.contract.eviction import EvictionPolicy
from kvframe.contract.specs import KVCacheSpec
from kvframe.planning.plan import KVCachePlan

_NONE: Mapping[Any, Any] = MappingProxyType({})


@attrs.define(eq=False)
class PrefixHit:
    """The hit of a request: the longest prefix that every group can continue from, and its inputs.

    Attributes:
        num_tokens: Tokens that need not be computed.
        stacks: Per table stack ``[num_groups, num_blocks], int32``: the pages of a prefix at least as long, 0 for none;
            every live block has a page.
        stack_indices: For each group of tokens, the number of its table stack, and its index in the stack.
        inputs: For each input that is cached as a whole, the pages of all its blocks, per group.
        branch: The length of the prefix that an earlier request has too, if it is longer than the hit, because a type
            that stores few blocks stored none at its end; otherwise 0. It is computed again.
        match: The known tokens.
        found_tokens: Per group of tokens, stack by stack, the length of its hit without the other groups; empty if no
            token is known.
        limiting: The groups with a shorter hit than others.
        found_inputs: For each input in each of its groups, whether all its blocks are cached.
    """

    num_tokens: int = 0
    stacks: Sequence[Pages] = ()
    stack_indices: Mapping[int, tuple[int, int]] = _NONE
    inputs: Mapping[str, Mapping[int, Pages]] = _NONE
    branch: int = 0
    match: Match = NO_MATCH
    found_tokens: Sequence[int] = ()
    limiting: Sequence[int] = ()
    found_inputs: Mapping[InputBlocks, bool] = _NONE

    def needed_pages(self, kinds: GroupKinds) -> list[Pages]:
        """Return per group ``[num_blocks], int32``: the pages that a request with this hit references, 0 for none."""
        pages = [is_needed.astype(np.int32) for is_needed in kinds.needed_blocks(self.num_tokens, ())]
        for group, (stack, index) in self.stack_indices.items():
            pages[group] *= self.stacks[stack][index, : len(pages[group])]
        for input_pages in self.inputs.values():
            for group, group_pages in input_pages.items():
                pages[group] = group_pages.copy()
        return pages


NO_HIT = PrefixHit()
"""Nothing is cached, or nothing was looked up."""


class PrefixCache:
    """The block pool, the radix tree with its publisher, and the index of inputs, which need each other.

    Invariant: a page is found only through its owner in the pool.
    """

    def __init__(
        self, kinds: GroupKinds, numbers: RowNumbers, *, is_caching: bool, eviction: EvictionPolicy | None
    ) -> None:
        """Start with an empty pool; a wrong answer of the eviction policy raises a ``PluginError``."""
        plan = kinds.plan
        self.tree = RadixTree(kinds.live, kinds.stacks, plan.max_model_len)
        self.publisher = Publisher(self.tree, kinds, numbers, is_caching=is_caching)
        self._input_groups = kinds.input_groups
        on_evicted = self._remove_evicted if kinds.input_groups else self.tree.remove_evicted
        self.pool = BlockPool(
            plan, reserve_slabs=_reserve(plan), on_evicted=on_evicted if is_caching else None, eviction=eviction
        )
        self.tree.pool = self.pool
        self._is_caching = is_caching
        self._groups = [group for groups in self.tree.groups for group in groups]
        self._live = [[kinds.live[group] for group in groups] for groups in self.tree.groups]
        self._alignment, self._max_tokens = plan.alignment, plan.max_model_len
        self._has_sparse = bool(kinds.sparse)
        self._num_groups = len(plan.groups)
        # If some type always needs the last token, no hit is longer than the known tokens.
        needs_last = [live.needs_last for live in kinds.live.values()]
        self._ends_with_match = any(needs_last)
        self._ends_with_pages = self._ends_with_match and not all(needs_last)

    @cached_property
    def inputs(self) -> InputIndex:
        """The index of inputs."""
        return InputIndex(self._input_groups, self.pool)

    def _remove_evicted(self, owner: int, groups: int | Groups, indices: Indices) -> None:
        """Remove evicted pages from the index that knows their owner: inputs have negative numbers."""
        index = self.inputs if owner < NO_OWNER else self.tree
        index.remove_evicted(owner, groups, indices)

    def find_prefix(
        self, namespace: Namespace, tokens: Sequence[int], max_tokens: int, inputs: Sequence[InputBlocks] = ()
    ) -> PrefixHit:
        """Return the hit of a request's inputs, with all their blocks, and of its first ``max_tokens`` tokens.

        A hit of ``n`` tokens needs exactly the blocks that are live at ``n``, in every group.
        """
        if not self._is_caching:
            return NO_HIT
        match = self.tree.match_prefix(namespace, tokens, max_tokens)
        max_tokens = match.length if self._ends_with_match else min(max_tokens, self._max_tokens)
        if not max_tokens and not inputs:
            return NO_HIT
        stacks = self.tree.pages_of(match, max_tokens)
        if self._ends_with_pages:
            max_tokens = max(last_column(pages) * size for pages, size in zip(stacks, self.tree.sizes, strict=True))
        found_tokens: list[int] = []
        for ranges, pages in zip(self._live, stacks, strict=True):
            if np.count_nonzero(pages) == pages.size:
                found_tokens += [pages.shape[1] * ranges[0].block_size] * len(pages)
            else:
                found_tokens += [live.longest_prefix(row, max_tokens) for live, row in zip(ranges, pages, strict=True)]
        hit_tokens, longest = (min(found_tokens), max(found_tokens)) if found_tokens else (0, 0)
        limiting: Sequence[int] = ()
        if hit_tokens < longest or hit_tokens % self._alignment:
            group_pages = list(zip(chain.from_iterable(self._live), chain.from_iterable(stacks), strict=True))
            hit_tokens = longest_common_prefix(group_pages, self._alignment, hit_tokens)
            limiting = self._limiting(group_pages, found_tokens, hit_tokens)
        branch = 0
        if self._has_sparse and match.length > hit_tokens:
            num_known = self.tree.end_of_pages(match)
            branch = num_known - num_known % self._alignment
        whole_inputs, found_inputs = self._find_inputs(inputs) if inputs else (_NONE, _NONE)
        return PrefixHit(
            num_tokens=hit_tokens,
            stacks=stacks,
            stack_indices=self.tree.stack_indices,
            inputs=whole_inputs,
            branch=branch if branch > hit_tokens else 0,
            match=match,
            found_tokens=found_tokens,
            limiting=limiting,
            found_inputs=found_inputs,
        )

    def pages_of(self, match: Match, num_tokens: int, inputs: Iterable[InputBlocks]) -> list[Pages]:
        """Return per group ``[num_blocks], int32``: the pages of a match's first tokens and of inputs, 0 for none."""
        pages = [np.zeros(0, dtype=np.int32) for _ in range(self._num_groups)]
        stacks = self.tree.pages_of(match, num_tokens)
        for group, (stack, index) in self.tree.stack_indices.items():
            pages[group] = stacks[stack][index]
        for blocks in inputs:
            input_pages = self.inputs.find_input(blocks)
            pages[blocks.group] = np.zeros(blocks.num_blocks, np.int32) if input_pages is None else input_pages
        return pages

    def _limiting(
        self, group_pages: Sequence[tuple[LiveRange, Pages]], found_tokens: Sequence[int], hit_tokens: int
    ) -> list[int]:
        """Return the groups that have no longer hit, if another group has one."""

        def lacks(live: LiveRange, pages: Pages, num_tokens: int) -> bool:
            if num_tokens % self._alignment:
                # No hit of all groups ends here. A group whose blocks end elsewhere cannot continue from it.
                return num_tokens % live.block_size > 0
            return live.longest_prefix(pages, num_tokens) < num_tokens

        longer = {num_tokens for num_tokens in found_tokens if num_tokens > hit_tokens}
        held_by = zip(self._groups, group_pages, strict=True)
        return [group for group, (live, row) in held_by if any(lacks(live, row, num_tokens) for num_tokens in longer)]

    def _find_inputs(
        self, inputs: Sequence[InputBlocks]
    ) -> tuple[dict[str, dict[int, Pages]], dict[InputBlocks, bool]]:
        """Return the pages of inputs that are cached in all groups, and which inputs are cached in which group."""
        pages_of = {blocks: self.inputs.find_input(blocks) for blocks in inputs}
        found_inputs = {blocks: pages is not None and bool(pages.all()) for blocks, pages in pages_of.items()}
        lacking = {blocks.sequence for blocks, is_found in found_inputs.items() if not is_found}
        whole_inputs: dict[str, dict[int, Pages]] = {}
        for blocks, pages in pages_of.items():
            if pages is not None and blocks.sequence not in lacking:
                whole_inputs.setdefault(blocks.sequence, {})[blocks.group] = pages
        return whole_inputs, found_inputs

    def count_hit(self, hit: PrefixHit, num_tokens: int, totals: Sequence[GroupLookups]) -> None:
        """Add the hit of a lookup of so many tokens to the totals of each group."""
        for group in self._groups:
            totals[group].asked_tokens += num_tokens
        if not hit.found_tokens and not hit.found_inputs:
            return
        for group, num_tokens in zip(self._groups, hit.found_tokens, strict=True):
            totals[group].found_tokens += num_tokens
            totals[group].hit_tokens += hit.num_tokens
        for group in hit.limiting:
            totals[group].times_limiting += 1
        found_names = {blocks.sequence for blocks, is_found in hit.found_inputs.items() if is_found}
        for blocks, is_found in hit.found_inputs.items():
            total = totals[blocks.group]
            total.asked_tokens += blocks.num_tokens
            total.found_tokens += blocks.num_tokens * is_found
            total.hit_tokens += blocks.num_tokens * (blocks.sequence in hit.inputs)
            total.times_limiting += not is_found and blocks.sequence in found_names

    def clear(self) -> None:
        """Evict every cached page, and make held ones unfindable."""
        self.pool.unpublish_all()
        self.publisher.unfollow_all()
        self.inputs.remove_all()

    def resize(self, plan: KVCachePlan) -> bool:
        """Change to another plan's number of slabs; return False if a page of a slab to be removed is held."""
        return not plan.groups or self.pool.resize(plan, _reserve(plan))

    def log_events_to(self, log: EventLog | None) -> None:
        """Log all findable blocks, and from now on each one that is published or removed; None stops the log."""
        if log is None:
            self.tree.on_stored = self.inputs.on_stored = self.pool.on_removed = None
            return
        for node in self.tree.walk():
            log.record_stored(node, node.start, node.stop)
        for blocks, pages in self.inputs.entries.values():
            log.record_stored_input(blocks, np.flatnonzero(pages), pages)
        self.tree.on_stored, self.inputs.on_stored = log.record_stored, log.record_stored_input
        self.pool.on_removed = log.record_removed


def _reserve(plan: KVCachePlan) -> int:
    """Return the idle slabs that the plan promises to the longest request."""
    return min(plan.num_slabs_for(group.peak_blocks for group in plan.groups), plan.num_slabs)


def found_prefix(hit: PrefixHit, num_asked: int, plan: KVCachePlan) -> FoundPrefix:
    """Return the result of a lookup of ``num_asked`` tokens, the last one included, as a value; 0 for no lookup."""
    tokens_of = dict(zip(sorted(hit.stack_indices, key=hit.stack_indices.__getitem__), hit.found_tokens, strict=False))
    return FoundPrefix(
        num_tokens=hit.num_tokens,
        known_tokens=hit.match.length,
        of_groups=dict(sorted(tokens_of.items())),
        limited_by=tuple(sorted(hit.limiting)),
        why=_why(hit, num_asked, plan, tokens_of),
    )


def _why(hit: PrefixHit, num_asked: int, plan: KVCachePlan, found_tokens: Mapping[int, int]) -> str:
    if not num_asked:
        return "no prefix was looked up"
    known_tokens = hit.match.length
    if hit.limiting:
        return "; ".join(_why_group(plan, index, found_tokens[index], known_tokens) for index in sorted(hit.limiting))
    if hit.num_tokens + plan.alignment > num_asked - 1:
        return ""
    if not known_tokens:
        return "its first block is not cached for a request of its salt and inputs"
    if hit.num_tokens + plan.alignment > known_tokens:
        return f"from token {known_tokens} on, its blocks are not those of an earlier request"
    return f"the blocks after token {hit.num_tokens} were evicted"


def _why_group(plan: KVCachePlan, index: int, num_found: int, known_tokens: int) -> str:
    """Return why a group's hit is not longer."""
    group = plan.groups[index]
    who, size = f"group {index} ({group.spec.kind})", group.block_size
    if size > plan.max_model_len:
        return f"{who} keeps no state that a later request could continue from"
    if num_found + size > known_tokens:
        return (
            f"{who} has blocks of {size} tokens, and the next one ends after the {known_tokens} tokens that are known"
        )
    if type(group.spec).stored_blocks is not KVCacheSpec.stored_blocks:
        return f"{who} keeps states at few blocks' ends, and has none after token {num_found}"
    return f"{who} lacks blocks after token {num_found}, which were evicted"


@attrs.define(eq=False)
class Pin:
    """A cached prefix that is kept.

    Attributes:
        num_tokens: Its tokens, whole blocks in every group.
        blocks: Per group, by block index, the pages that a request needs to continue after the prefix; 0 for a block
            that it does not need. For an input, the pages of all its blocks.
        is_held: Whether the pages are kept: until ``unpin``, or until the cache is reset.
    """

    num_tokens: int
    blocks: list[BlockIds]
    is_held: bool = True


class Pins:
    """Holds the pages of pins, and checks that the longest request still fits into the rest of the pool.

    Invariant: the pool counts one holder of a page for each pin of it that ``is_held``.
    """

    def __init__(self, kinds: GroupKinds, pool: BlockPool) -> None:
        self._kinds, self._pool = kinds, pool
        self.plan = kinds.plan
        self._pins: dict[int, Pin] = {}

    def pin_prefix(self, hit: PrefixHit, *, checks_capacity: bool = True) -> Pin:
        """Hold the pages that a request needs to continue after a hit; refuse if the longest request no longer fits."""
        pin = Pin(hit.num_tokens, hit.needed_pages(self._kinds))
        if checks_capacity:
            self._check_capacity(pin)
        for group, ids in enumerate(pin.blocks):
            self._pool.add_references(group, ids[ids != 0])
        self._pins[id(pin)] = pin
        return pin

    def unpin_prefix(self, pin: Pin) -> None:
        """Release a pin's pages, which stay cached until they are evicted; do nothing if they were released before."""
        if self._pins.pop(id(pin), None) is None:
            return
        pin.is_held = False
        for group, ids in enumerate(pin.blocks):
            self._pool.release_blocks(ids[ids != 0][::-1], group)

    def unpin_all(self) -> None:
        """Release the pages of every pin."""
        for pin in list(self._pins.values()):
            self.unpin_prefix(pin)

    def fit_into(self, plan: KVCachePlan) -> bool:
        """Return whether the longest request still fits if all pins stay and the pool has a plan's number of slabs."""
        if plan.num_slabs >= self.plan.num_slabs or not len(self.pinned_pages()):
            return True
        needed_slabs, unpinned_slabs = self._needed_and_left(plan, self._pins.values())
        return needed_slabs <= unpinned_slabs

    def pinned_pages(self) -> BlockIds:
        """Return the pages of all pins, each as often as it is pinned."""
        return _pages_of(self._pins.values())

    def _check_capacity(self, pin: Pin) -> None:
        plan, other_pins = self.plan, tuple(self._pins.values())
        needed_before, left_before = self._needed_and_left(plan, other_pins)
        needed_slabs, unpinned_slabs = self._needed_and_left(plan, (*other_pins, pin))
        # Pages that are pinned already take no more capacity.
        if needed_slabs - unpinned_slabs > max(0, needed_before - left_before):
            raise RequestError(
                f"with these {pin.num_tokens} tokens pinned, {unpinned_slabs} of the cache's {plan.num_slabs} slabs "
                f"are left, but a request of {plan.max_model_len} tokens, the most there may be, takes {needed_slabs}; "
                "give the cache more memory, lower max_model_len, or unpin others",
                code="no_capacity",
            )

    def _needed_and_left(self, plan: KVCachePlan, pins: Iterable[Pin]) -> tuple[int, int]:
        """Return the slabs that the longest request needs, and those without a page of some pins, in a smaller plan."""
        pages = np.unique(_pages_of(pins))
        needed_slabs = plan.num_slabs_for(plan.peak_blocks(plan.max_model_len))
        num_removed = self.plan.num_slabs - plan.num_slabs
        return needed_slabs, self._pool.free_list.count_idle_slabs(pages) - num_removed


def _pages_of(pins: Iterable[Pin]) -> BlockIds:
    parts = [ids[ids != 0] for pin in pins for ids in pin.blocks]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
