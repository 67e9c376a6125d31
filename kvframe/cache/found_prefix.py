"""What a lookup found of a request's tokens, and why it was not more, as a value for the request's owner."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvframe.cache.prefix_lookup import PrefixHit
from kvframe.contract.specs import KVCacheSpec
from kvframe.planning.plan import KVCachePlan


@attrs.frozen(kw_only=True)
class FoundPrefix:
    """What was found of a request's tokens.

    Attributes:
        num_tokens: The first tokens that are not computed, because every group had the state after them.
        known_tokens: The first tokens, whole blocks, that an earlier request of the same salt and inputs has too.
        of_groups: For each cache group of tokens, by index, the tokens that it alone could have continued from.
        limited_by: The groups that had less than others.
        why: Why it was not more, in one clause; empty if only the last token, and its block, are computed, which always
            are.
    """

    num_tokens: int = 0
    known_tokens: int = 0
    of_groups: Mapping[int, int] = attrs.field(factory=dict)
    limited_by: tuple[int, ...] = ()
    why: str = ""


def found_prefix(hit: PrefixHit, num_asked: int, plan: KVCachePlan) -> FoundPrefix:
    """Return what a lookup found.

    Args:
        hit: Its result.
        num_asked: The tokens that were looked up, the last one included; 0 if there was no lookup.
        plan: The plan of the cache.
    """
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
    """Return why a group could not continue from more of the known tokens."""
    group = plan.groups[index]
    who, size = f"group {index} ({group.spec.kind})", group.block_size
    if size > plan.max_model_len:
        return f"{who} keeps no state that a later request could continue from"
    if num_found + size > known:
        return f"{who} has blocks of {size} tokens, and the next one ends after the {known} tokens that are known"
    if type(group.spec).stored_blocks is not KVCacheSpec.stored_blocks:
        return f"{who} keeps states at few blocks' ends, and has none after token {num_found}"
    return f"{who} lacks blocks after token {num_found}, which were evicted"
