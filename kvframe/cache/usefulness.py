"""What cached pages are still good for: which hits a prefix gives, and which of its pages no hit needs.

A hit at ``n`` tokens needs the live range at ``n`` of every group. By the law of forgetting, what a hit needs of the
tokens before some place is part of what any shorter hit behind that place needs: of all continuations of a prefix, the
one with the shortest hit needs the most of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from kvframe.cache.forgetting import NEVER, forgetting_of
from kvframe.cache.needs import AskedNeeds, Flags, Pages, needs_of
from kvframe.plan import PlannedGroup


@attrs.frozen(eq=False)
class Uses:
    """What a run of a prefix is used for.

    Attributes:
        first_hit: The shortest hit that ends in the run or after it; ``NEVER`` if there is none.
        useless: Per group that has some, which of the blocks that end in the run have a page that no hit needs.
        safe: Were all hits of fewer tokens than these lost, no page would become useless by it.
    """

    first_hit: int
    useless: Mapping[int, Flags]
    safe: int


class Usefulness:
    """Finds out what pages are good for. It asks no spec for its type.

    Attributes:
        groups: What hits need of each group of tokens.
    """

    def __init__(self, groups: Sequence[PlannedGroup], max_tokens: int) -> None:
        """Look at prefixes.

        Args:
            groups: The groups of tokens.
            max_tokens: The tokens of the longest request.
        """
        forgetting = [forgetting_of(group.spec) for group in groups]
        needs_last = any(each is not None and not each.chunk and each.window != 1 for each in forgetting)
        chunks = [each.chunk for each in forgetting if each is not None and each.chunk]
        self._step = math.lcm(*(group.block_size for group in groups))
        # Where no type always needs the last token, a hit may lie behind the tokens that are known.
        self._beyond = 0 if needs_last else min(math.lcm(self._step, *chunks), max_tokens)
        longest = max_tokens + self._beyond
        self._num_hits = longest // self._step
        self.groups = {group.index: needs_of(group.spec, self._step, longest) for group in groups}
        # Those last that are asked hit by hit.
        self._in_order = sorted(self.groups.items(), key=lambda item: isinstance(item[1], AskedNeeds))

    def first_end(self, num_tokens: int) -> int:
        """Return the shortest hit longer than so many tokens that there could be."""
        return num_tokens - num_tokens % self._step + self._step

    def next_end(self, pages: Mapping[int, Pages], stop: int) -> int:
        """Return the shortest hit behind some tokens that there could be, for what it needs of them.

        Args:
            pages: Per group ``[stop // block_size], int32``: the pages of these tokens, 0 for none.
            stop: How many they are.
        """
        first, count = stop // self._step + 1, 8
        while first <= self._num_hits:
            last = min(first + count, self._num_hits)
            is_end = np.ones(last - first + 1, dtype=np.bool_)
            for group, needs in self._in_order:
                behind = np.ones(last * self._step // needs.size - len(pages[group]), dtype=np.int32)
                is_end &= needs.holds(np.concatenate([pages[group], behind]), first, last, is_end)
            if np.count_nonzero(is_end):
                return (first + int(is_end.argmax())) * self._step
            first, count = last + 1, 8 * count
        return NEVER

    def is_end(self, num_tokens: int) -> bool:
        """Return whether a hit could have so many tokens."""
        return num_tokens % self._step == 0

    def is_hit(self, pages: Mapping[int, Pages], num_tokens: int) -> bool:
        """Return whether so many tokens of a prefix are a hit.

        Args:
            pages: Per group, the pages of at least so many tokens by block, 0 for none.
            num_tokens: How many, a length that a hit may have.
        """
        number = num_tokens // self._step
        return all(needs.holds(pages[group], number, number, None)[0] for group, needs in self._in_order)

    def uses(self, pages: Mapping[int, Pages], start: int, stop: int, next_hit: int = NEVER) -> Uses:
        """Find out what the blocks that end in tokens ``(start, stop]`` of a prefix are used for.

        Args:
            pages: Per group ``[stop // block_size], int32``: the pages of the prefix, 0 for none.
            start: The run's first token.
            stop: The token after its last.
            next_hit: The shortest hit of what comes after the run; ``NEVER`` if there is none.
        """
        first, last = start // self._step + 1, (stop + self._beyond) // self._step
        numbers = np.arange(first, last + 1)
        hits, first_hit = np.zeros(1, dtype=np.int64), next_hit
        if len(numbers):
            is_hit = self._hits(pages, first, last)
            if np.count_nonzero(is_hit):
                hits = np.maximum.accumulate(numbers * is_hit)
                first_hit = (first + int(is_hit.argmax())) * self._step
        if first_hit == NEVER:
            held = {group: pages[group][start // each.size : stop // each.size] != 0 for group, each in self._in_order}
            return Uses(NEVER, {group: has_page for group, has_page in held.items() if has_page.any()}, NEVER)
        useless, safe = {}, NEVER
        for group, needs in self.groups.items():
            start_block, stop_block = start // needs.size, stop // needs.size
            has_page = pages[group][start_block:stop_block] != 0
            uses = self._step * needs.uses(start_block, stop_block, first, hits)
            if next_hit != NEVER:
                uses[needs.needed_by(start_block, stop_block, next_hit)] = next_hit
            used = uses[has_page]
            if np.count_nonzero(used) < len(used):
                useless[group] = has_page & (uses == 0)
                used = used[used != 0]
            if len(used):
                safe = min(safe, int(used.min()))
        return Uses(first_hit, useless, safe)

    def _hits(self, pages: Mapping[int, Pages], first: int, last: int) -> Flags:
        """Return which of the hits of these numbers there are."""
        found: Flags | None = None
        for group, needs in self._in_order:
            of_group = pages[group]
            if self._beyond:
                unknown = np.zeros(last * self._step // needs.size - len(of_group), dtype=np.int32)
                of_group = np.concatenate([of_group, unknown])
            holds = needs.holds(of_group, first, last, found)
            found = holds if found is None else found & holds
        assert found is not None
        return found
