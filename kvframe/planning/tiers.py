"""The capacity of the cache's tiers beside the device: how many prefixes host memory and page stores hold.

A later request continues after ``n`` tokens if it finds the live blocks at ``n``, in every group. So the live ranges
say how many bytes a prefix takes in a tier: of a window its end, of a recurrent layer one state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import attrs

from kvframe.contract.page_store import SEAL_BYTES
from kvframe.planning.plan import KVCachePlan

HOST_MEMORY: Final = "host_memory"
"""The name of the tier in host memory."""

Holds = Callable[[Sequence[int]], bool]
"""Returns whether a tier holds so many blocks of each group."""


@attrs.frozen(kw_only=True)
class TierCapacity:
    """What a tier holds, if it has only the blocks that requests can continue from.

    Attributes:
        name: ``HOST_MEMORY``, or the registered name of a page store.
        num_bytes: Its bytes; None if the store does not know its capacity.
        num_requests: The prefixes of requests of the greatest length that it holds; None if that is not known, or if
            there is no limit, because such a prefix takes no block.
        num_tokens: The tokens of these prefixes, and of one more as far as it fits; None likewise.
    """

    name: str
    num_bytes: int | None
    num_requests: int | None
    num_tokens: int | None


def prefix_blocks(plan: KVCachePlan, num_tokens: int) -> tuple[int, ...]:
    """Return how many blocks of each group a request needs to continue after ``num_tokens`` tokens.

    Of an input, such as an encoder's, it needs all blocks; the longest input is counted.
    """
    return tuple(
        -(-plan.max_input_lens[group.spec.sequence] // group.block_size)
        if group.is_of_input
        else sum(stop - start for start, stop in group.answers.live_blocks(num_tokens))
        for group in plan.groups
    )


def host_capacity(plan: KVCachePlan, num_slabs: int) -> TierCapacity:
    """Return the capacity of host memory that is divided into slabs as the plan's pool is."""
    num_bytes = num_slabs * plan.slab_bytes
    return _capacity(plan, HOST_MEMORY, num_bytes, lambda num_blocks: plan.num_slabs_for(num_blocks) <= num_slabs)


def store_capacity(plan: KVCachePlan, name: str, num_bytes: int | None) -> TierCapacity:
    """Return the capacity of a page store.

    Args:
        plan: The plan whose pages it keeps.
        name: The store's name.
        num_bytes: The most bytes of its records; None if it does not know.
    """
    if num_bytes is None:
        return TierCapacity(name=name, num_bytes=None, num_requests=None, num_tokens=None)

    def holds(num_blocks: Sequence[int]) -> bool:
        records = zip(num_blocks, plan.groups, strict=True)
        return sum(count * (group.page_bytes + SEAL_BYTES) for count, group in records) <= num_bytes

    return _capacity(plan, name, num_bytes, holds)


def _capacity(plan: KVCachePlan, name: str, num_bytes: int, holds: Holds) -> TierCapacity:
    # A request computes its last token itself.
    longest = (plan.max_model_len - 1) // plan.alignment
    of_longest = prefix_blocks(plan, longest * plan.alignment)
    if not any(of_longest):
        return TierCapacity(name=name, num_bytes=num_bytes, num_requests=None, num_tokens=None)
    above = 1
    while holds([count * above for count in of_longest]):
        above *= 2
    num_requests = _largest(above, lambda number: holds([count * number for count in of_longest]))

    def holds_too(length: int) -> bool:
        blocks = zip(of_longest, prefix_blocks(plan, length * plan.alignment), strict=True)
        return holds([count * num_requests + more for count, more in blocks])

    length = _largest(longest, holds_too) if longest else 0
    return TierCapacity(
        name=name,
        num_bytes=num_bytes,
        num_requests=num_requests,
        num_tokens=(num_requests * longest + length) * plan.alignment,
    )


def _largest(above: int, is_met: Callable[[int], bool]) -> int:
    """Return the number below ``above`` up to which a condition is met, by bisection; 0 for none."""
    low = 0
    while above - low > 1:
        middle = (low + above) // 2
        low, above = (middle, above) if is_met(middle) else (low, middle)
    return low
