"""What hits of a cache need, as data: for each group, which blocks a request needs to continue, without a type's name.

Another process that knows which blocks there are computes from it exactly the hits that the cache finds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import attrs

from kvframe.cache.live_range import LiveRange, Need
from kvframe.contract.specs import TOKENS
from kvframe.planning.plan import KVCachePlan


@attrs.frozen(kw_only=True)
class GroupLayout:
    """One group of a cache.

    Attributes:
        group: Its index.
        block_size: Tokens per block.
        sequence: What its blocks store: ``"tokens"``, a request's own, or an input: ``"encoder"``.
        need: What a hit needs of its tokens. None for a group of an input, of which all blocks are needed.
    """

    group: int
    block_size: int
    sequence: str = TOKENS
    need: Need | None = None


@attrs.frozen(kw_only=True)
class CacheLayout:
    """What hits of a cache need.

    A request continues after ``n`` tokens, a multiple of ``alignment`` and fewer than its prompt has, if every group
    has the blocks that it needs at ``n``.

    Attributes:
        alignment: Hits are multiples of so many tokens.
        max_tokens: The tokens of the longest request.
        groups: The groups; none if the cache finds nothing.
    """

    alignment: int
    max_tokens: int
    groups: tuple[GroupLayout, ...]

    @classmethod
    def of(cls, plan: KVCachePlan, live: Mapping[int, LiveRange], *, is_caching: bool) -> Self:
        """Return the layout of a plan's cache; ``live`` says when blocks die, for each group of tokens."""
        needs = {index: Need.of(ranges, plan.max_model_len) for index, ranges in live.items()}
        groups = [
            GroupLayout(
                group=group.index,
                block_size=group.block_size,
                sequence=group.spec.sequence,
                need=needs.get(group.index),
            )
            for group in plan.groups
        ]
        return cls(alignment=plan.alignment, max_tokens=plan.max_model_len, groups=tuple(groups) if is_caching else ())
