"""Prefix lookups: how much of a request is cached, over any number of groups, and which group limits the hit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.cache.input_index import InputBlocks, InputIndex
from kvframe.cache.live_range import LiveRange, longest_common_prefix
from kvframe.cache.radix_tree import NO_MATCH, Match, Namespace, RadixTree
from kvframe.cache.rows import GroupKinds
from kvframe.cache.stats import GroupLookups
from kvframe.planning.plan import KVCachePlan

Pages = npt.NDArray[np.int32]


_NONE: Mapping[Any, Any] = MappingProxyType({})


@attrs.define(eq=False)
class PrefixHit:
    """What is cached of a request: the longest prefix that every group can continue from, and its inputs.

    Attributes:
        num_tokens: Tokens that need not be computed.
        stacks: Per table stack ``[num_groups, num_blocks], int32``: the pages of a prefix at least as long, 0 for none;
            every live block has a page.
        place: For each group of tokens, its table stack, and which of the stack's groups it is.
        inputs: For each input that is cached as a whole, the pages of all its blocks, per group.
        branch: The longest prefix of an earlier request, if it is longer than the hit: a type that stores few blocks
            kept none there, so that it is computed again; otherwise 0.
        match: How far the tokens are known.
        found: Per group of tokens, stack by stack, the tokens that it alone could have continued from; empty if nothing
            is known.
        limiting: The groups that had less than others.
        of_inputs: What was found of each input in each of its groups.
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

    def pages(self, group: int) -> Pages:
        """Return ``[num_blocks], int32``: the pages of a group of tokens, 0 for none."""
        stack, place = self.place[group]
        pages: Pages = self.stacks[stack][place]
        return pages

    def found_pages(self, plan: KVCachePlan) -> Iterator[Pages]:
        """Go through the pages that a request references when it begins with this hit."""
        for index in self.place if self.num_tokens else ():
            pages = self.pages(index)
            for start, stop in plan.groups[index].answers.live_blocks(self.num_tokens):
                yield pages[start:stop]
        for of_input in self.inputs.values():
            yield from of_input.values()


NO_HIT = PrefixHit()
"""Nothing is cached, or nothing was looked up."""


class PrefixLookup:
    """Finds prefixes and inputs. It asks no spec for its type."""

    def __init__(self, plan: KVCachePlan, kinds: GroupKinds, tree: RadixTree, inputs: InputIndex) -> None:
        """Look into a radix tree and an index of inputs."""
        self._tree = tree
        self._inputs = inputs
        self._stacks = [[plan.groups[group] for group in groups] for groups in tree.groups]
        self._groups = [group for groups in tree.groups for group in groups]
        self._live = kinds.live
        self._alignment, self._max_tokens = plan.alignment, plan.max_model_len
        self._has_sparse = bool(kinds.sparse)
        self._kinds = tuple(group.spec.kind for group in plan.groups)
        # If some type always needs the last token, no hit is longer than the tokens that are known.
        needs_last = [kinds.live[group].needs_last for group in self._groups]
        self._ends_with_match = any(needs_last)
        self._ends_with_pages = self._ends_with_match and not all(needs_last)

    def find_prefix(
        self, namespace: Namespace, tokens: Sequence[int], num_tokens: int, inputs: Sequence[InputBlocks] = ()
    ) -> PrefixHit:
        """Return what is cached of a request's inputs and of its tokens but the last one.

        A hit of ``n`` tokens needs exactly the blocks that are live at ``n``, in every group. An input needs all its
        blocks, in every group that keeps state of it.

        Args:
            namespace: The requests that it shares blocks with have the same.
            tokens: Its tokens.
            num_tokens: How many of them there are, at least one.
            inputs: Its inputs.
        """
        match = self._tree.match_prefix(namespace, tokens, num_tokens - 1)
        most = match.length if self._ends_with_match else min(num_tokens - 1, self._max_tokens)
        if not most and not inputs:
            return NO_HIT
        of_stack = self._tree.pages_of(match, most)
        if self._ends_with_pages:
            most = max(_last_page(pages) * size for pages, size in zip(of_stack, self._tree.sizes, strict=True))
        found: list[int] = []
        for groups, pages in zip(self._stacks, of_stack, strict=True):
            if np.count_nonzero(pages) == pages.size:
                found += [pages.shape[1] * groups[0].block_size] * len(groups)
            else:
                found += [
                    self._live[group.index].longest_prefix(row, most) for group, row in zip(groups, pages, strict=True)
                ]
        longest, most = (max(found), min(found)) if found else (0, 0)
        is_equal = most == longest and not most % self._alignment
        hit = most if is_equal else longest_common_prefix(self._held(of_stack), self._alignment, most)
        known = match.length - match.length % self._alignment
        whole_inputs, of_inputs = self._find_inputs(inputs) if inputs else (_NONE, ())
        return PrefixHit(
            num_tokens=hit,
            stacks=of_stack,
            place=self._tree.place,
            inputs=whole_inputs,
            branch=known if self._has_sparse and known > hit else 0,
            match=match,
            found=found,
            limiting=self._limiting(of_stack, found, hit) if longest > hit else (),
            of_inputs=of_inputs,
        )

    def _held(self, of_stack: Sequence[Pages]) -> list[tuple[LiveRange, Pages]]:
        """Return the live range and the pages of each group of tokens, stack by stack."""
        return [
            (self._live[group], pages) for group, pages in zip(self._groups, chain.from_iterable(of_stack), strict=True)
        ]

    def _limiting(self, of_stack: Sequence[Pages], found: Sequence[int], hit: int) -> list[int]:
        """Return the groups that could not continue from a longer prefix, though another group could."""
        longer = [other for other in set(found) if other > hit]
        held = zip(self._groups, self._held(of_stack), strict=True)
        return [group for group, (live, row) in held if any(self._lacks(live, row, other) for other in longer)]

    def _lacks(self, live: LiveRange, pages: Pages, num_tokens: int) -> bool:
        """Return whether a group cannot continue from so many tokens."""
        if num_tokens % self._alignment:
            # No hit of all groups ends here. A group whose blocks end elsewhere cannot continue from it.
            return num_tokens % live.block_size > 0
        return live.longest_prefix(pages, num_tokens) < num_tokens

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

    def _find_inputs(
        self, inputs: Sequence[InputBlocks]
    ) -> tuple[dict[str, dict[int, Pages]], list[tuple[int, GroupLookups]]]:
        """Return the pages of completely cached inputs, and what was found of each input in each group."""
        found = {each.group: self._inputs.find_input(each) for each in inputs}
        some = {each.sequence for each in inputs if found[each.group] is not None}
        lacking = {each.sequence for each in inputs if found[each.group] is None}
        whole: dict[str, dict[int, Pages]] = {}
        lookups = []
        for each in inputs:
            pages = found[each.group]
            alone, together = pages is not None, each.sequence not in lacking
            is_limiting = not alone and each.sequence in some
            size = each.num_tokens
            of_group = GroupLookups(self._kinds[each.group], size, size * alone, size * together, is_limiting)
            lookups.append((each.group, of_group))
            if pages is not None and together:
                whole.setdefault(each.sequence, {})[each.group] = pages
        return whole, lookups


def _last_page(pages: Pages) -> int:
    held = np.flatnonzero(pages.any(axis=0))
    return int(held[-1]) + 1 if len(held) else 0
