"""Prefix lookup: finds a request's longest cached prefix over all groups, why it is not longer, and pins prefixes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from kvframe.planning.plan import KVCachePlan, PlannedGroup

_NONE: Mapping[Any, Any] = MappingProxyType({})


@attrs.define(eq=False)
class PrefixHit:
    """The hit of a request: the longest prefix that every group can continue from, and its inputs.

    Attributes:
        num_tokens: Tokens that need not be computed.
        stacks: Per table stack ``[num_groups, num_blocks], int32``: the pages of a prefix at least as long, 0 for none;
            every live block has a page.
        place: For each group of tokens, the number of its table stack, and its place in the stack.
        inputs: For each input that is cached as a whole, the pages of all its blocks, per group.
        branch: The length of the prefix that an earlier request has too, if it is longer than the hit, because a type
            that stores few blocks stored none at its end; otherwise 0. It is computed again.
        match: The known tokens.
        found: Per group of tokens, stack by stack, the length of its hit without the other groups; empty if no token is
            known.
        limiting: The groups with a shorter hit than others.
        of_inputs: The hit of each input in each of its groups.
    """

    num_tokens: int = 0
    stacks: Sequence[Pages] = ()
    place: Mapping[int, tuple[int, int]] = _NONE
    inputs: Mapping[str, Mapping[int, Pages]] = _NONE
    branch: int = 0
    match: Match = NO_MATCH
    found: Sequence[int] = ()
    limiting: Sequence[int] = ()
    of_inputs: Sequence[tuple[int, GroupLookups]] = ()

    def needed_pages(self, group: PlannedGroup) -> Pages:
        """Return ``[num_blocks], int32``: the pages that a request with this hit references, 0 for none."""
        if group.is_of_input:
            of_input: Pages = self.inputs.get(group.spec.sequence, {}).get(group.index, np.zeros(0, dtype=np.int32))
            return of_input.copy()
        needed = np.zeros(self.num_tokens // group.block_size, dtype=np.int32)
        for start, stop in group.answers.live_blocks(self.num_tokens) if self.num_tokens else ():
            stack, place = self.place[group.index]
            needed[start:stop] = self.stacks[stack][place, start:stop]
        return needed


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
        self.publisher = Publisher(self.tree, kinds, numbers)
        self.inputs = InputIndex(kinds.of_inputs)
        on_evicted = self._remove_evicted if kinds.of_inputs else self.tree.remove_evicted
        self.pool = BlockPool(
            plan, reserve_slabs=_reserve(plan), on_evicted=on_evicted if is_caching else None, eviction=eviction
        )
        self.tree.pool = self.inputs.pool = self.pool
        self._is_caching = is_caching
        self._groups = [group for groups in self.tree.groups for group in groups]
        self._live = [[kinds.live[group] for group in groups] for groups in self.tree.groups]
        self._alignment, self._max_tokens = plan.alignment, plan.max_model_len
        self._has_sparse = bool(kinds.sparse)
        self._kinds = tuple(group.spec.kind for group in plan.groups)
        # If some type always needs the last token, no hit is longer than the known tokens.
        needs_last = [live.needs_last for live in kinds.live.values()]
        self._ends_with_match = any(needs_last)
        self._ends_with_pages = self._ends_with_match and not all(needs_last)

    def _remove_evicted(self, owner: int, groups: int | Groups, indices: Indices) -> None:
        """Remove evicted pages from the index that knows their owner: inputs have negative numbers."""
        index = self.inputs if owner < NO_OWNER else self.tree
        index.remove_evicted(owner, groups, indices)

    def find_prefix(
        self, namespace: Namespace, tokens: Sequence[int], most: int, inputs: Sequence[InputBlocks] = ()
    ) -> PrefixHit:
        """Return the hit of a request's inputs, with all their blocks, and of its first ``most`` tokens.

        A hit of ``n`` tokens needs exactly the blocks that are live at ``n``, in every group.
        """
        if not self._is_caching:
            return NO_HIT
        match = self.tree.match_prefix(namespace, tokens, most)
        most = match.length if self._ends_with_match else min(most, self._max_tokens)
        if not most and not inputs:
            return NO_HIT
        of_stack = self.tree.pages_of(match, most)
        if self._ends_with_pages:
            most = max(last_column(pages) * size for pages, size in zip(of_stack, self.tree.sizes, strict=True))
        found: list[int] = []
        for live_of_stack, pages in zip(self._live, of_stack, strict=True):
            if np.count_nonzero(pages) == pages.size:
                found += [pages.shape[1] * live_of_stack[0].block_size] * len(pages)
            else:
                found += [live.longest_prefix(row, most) for live, row in zip(live_of_stack, pages, strict=True)]
        hit, longest = (min(found), max(found)) if found else (0, 0)
        limiting: Sequence[int] = ()
        if hit < longest or hit % self._alignment:
            held = list(zip(chain.from_iterable(self._live), chain.from_iterable(of_stack), strict=True))
            hit = longest_common_prefix(held, self._alignment, hit)
            limiting = self._limiting(held, found, hit)
        branch = 0
        if self._has_sparse and match.length > hit:
            known = self.tree.end_of_pages(match)
            branch = known - known % self._alignment
        whole_inputs, of_inputs = self._find_inputs(inputs) if inputs else (_NONE, ())
        return PrefixHit(
            num_tokens=hit,
            stacks=of_stack,
            place=self.tree.place,
            inputs=whole_inputs,
            branch=branch if branch > hit else 0,
            match=match,
            found=found,
            limiting=limiting,
            of_inputs=of_inputs,
        )

    def _limiting(self, held: Sequence[tuple[LiveRange, Pages]], found: Sequence[int], hit: int) -> list[int]:
        """Return the groups that have no longer hit, if another group has one."""

        def lacks(live: LiveRange, pages: Pages, num_tokens: int) -> bool:
            if num_tokens % self._alignment:
                # No hit of all groups ends here. A group whose blocks end elsewhere cannot continue from it.
                return num_tokens % live.block_size > 0
            return live.longest_prefix(pages, num_tokens) < num_tokens

        longer = {num_tokens for num_tokens in found if num_tokens > hit}
        held_by = zip(self._groups, held, strict=True)
        return [group for group, (live, row) in held_by if any(lacks(live, row, num_tokens) for num_tokens in longer)]

    def _find_inputs(
        self, inputs: Sequence[InputBlocks]
    ) -> tuple[dict[str, dict[int, Pages]], list[tuple[int, GroupLookups]]]:
        """Return the pages of completely cached inputs, and the hit of each input in each group."""
        known = {each: self.inputs.find_input(each) for each in inputs}
        found = {each: pages for each, pages in known.items() if pages is not None and pages.all()}
        some = {each.sequence for each in found}
        lacking = {each.sequence for each in inputs if each not in found}
        whole: dict[str, dict[int, Pages]] = {}
        lookups = []
        for each in inputs:
            is_found, is_hit = each in found, each.sequence not in lacking
            is_limiting = not is_found and each.sequence in some
            size = each.num_tokens
            of_group = GroupLookups(self._kinds[each.group], size, size * is_found, size * is_hit, is_limiting)
            lookups.append((each.group, of_group))
            if is_hit:
                whole.setdefault(each.sequence, {})[each.group] = found[each]
        return whole, lookups

    def count_hit(self, hit: PrefixHit, num_tokens: int, totals: Sequence[GroupLookups]) -> None:
        """Add the hit of a lookup of so many tokens to the totals of each group."""
        for group in self._groups:
            totals[group].asked_tokens += num_tokens
        if not hit.found and not hit.of_inputs:
            return
        for group, num_tokens in zip(self._groups, hit.found, strict=True):
            totals[group].found_tokens += num_tokens
            totals[group].hit_tokens += hit.num_tokens
        for group in hit.limiting:
            totals[group].times_limiting += 1
        for group, lookups in hit.of_inputs:
            totals[group].add(lookups)

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

    def published(self) -> Iterator[tuple[int, int]]:
        """Yield the group and block id of each findable page."""
        for node in self.tree.walk():
            for pages, groups in zip(node.pages, self.tree.groups, strict=True):
                for group, row in zip(groups, pages, strict=True):
                    yield from ((group, page) for page in row[row != 0].tolist())
        for blocks, pages in self.inputs.entries.values():
            yield from ((blocks.group, page) for page in pages[pages != 0].tolist())


def _reserve(plan: KVCachePlan) -> int:
    """Return the idle slabs that the plan promises to the longest request."""
    return min(plan.num_slabs_for(group.peak_blocks for group in plan.groups), plan.num_slabs)


def found_prefix(hit: PrefixHit, num_asked: int, plan: KVCachePlan) -> FoundPrefix:
    """Return the result of a lookup of ``num_asked`` tokens, the last one included, as a value; 0 for no lookup."""
    found = dict(zip(sorted(hit.place, key=hit.place.__getitem__), hit.found, strict=False))
    return FoundPrefix(
        num_tokens=hit.num_tokens,
        known_tokens=hit.match.length,
        of_groups=dict(sorted(found.items())),
        limited_by=tuple(sorted(hit.limiting)),
        why=_why(hit, num_asked, plan, found),
    )


def _why(hit: PrefixHit, num_asked: int, plan: KVCachePlan, found: Mapping[int, int]) -> str:
    if not num_asked:
        return "no prefix was looked up"
    known = hit.match.length
    if hit.limiting:
        return "; ".join(_why_group(plan, index, found[index], known) for index in sorted(hit.limiting))
    if hit.num_tokens + plan.alignment > num_asked - 1:
        return ""
    if not known:
        return "its first block is not cached for a request of its salt and inputs"
    if hit.num_tokens + plan.alignment > known:
        return f"from token {known} on, its blocks are not those of an earlier request"
    return f"the blocks after token {hit.num_tokens} were evicted"


def _why_group(plan: KVCachePlan, index: int, num_found: int, known: int) -> str:
    """Return why a group's hit is not longer."""
    group = plan.groups[index]
    who, size = f"group {index} ({group.spec.kind})", group.block_size
    if size > plan.max_model_len:
        return f"{who} keeps no state that a later request could continue from"
    if num_found + size > known:
        return f"{who} has blocks of {size} tokens, and the next one ends after the {known} tokens that are known"
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

    def __init__(self, plan: KVCachePlan, pool: BlockPool) -> None:
        self.plan = plan
        self._pool = pool
        self._pins: dict[int, Pin] = {}

    def pin_prefix(self, hit: PrefixHit, *, checks_capacity: bool = True) -> Pin:
        """Hold the pages that a request needs to continue after a hit; refuse if the longest request no longer fits."""
        pin = Pin(hit.num_tokens, [hit.needed_pages(group) for group in self.plan.groups])
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
        needed, left = self._needed_and_left(plan, self._pins.values())
        return needed <= left

    def pinned_pages(self) -> BlockIds:
        """Return the pages of all pins, each as often as it is pinned."""
        return _pages_of(self._pins.values())

    def _check_capacity(self, pin: Pin) -> None:
        plan, others = self.plan, tuple(self._pins.values())
        needed_before, left_before = self._needed_and_left(plan, others)
        needed, left = self._needed_and_left(plan, (*others, pin))
        # Pages that are pinned already take no more capacity.
        if needed - left > max(0, needed_before - left_before):
            raise RequestError(
                f"with these {pin.num_tokens} tokens pinned, {left} of the cache's {plan.num_slabs} slabs are left, "
                f"but a request of {plan.max_model_len} tokens, the most there may be, takes {needed}; give the cache "
                "more memory, lower max_model_len, or unpin others",
                code="no_capacity",
            )

    def _needed_and_left(self, plan: KVCachePlan, pins: Iterable[Pin]) -> tuple[int, int]:
        """Return the slabs that the longest request needs, and those without a page of some pins, in a smaller plan."""
        pages = np.unique(_pages_of(pins))
        needed = plan.num_slabs_for(plan.peak_blocks(plan.max_model_len))
        num_removed = self.plan.num_slabs - plan.num_slabs
        return needed, self._pool.free_list.count_idle_slabs(pages) - num_removed


def _pages_of(pins: Iterable[Pin]) -> BlockIds:
    parts = [ids[ids != 0] for pin in pins for ids in pin.blocks]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
