"""Checks that an eviction policy's priorities keep the laws of ``check_policy``. Imports no torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvframe import FullAttentionSpec, KVCacheManager, KVCachePlan, group_layers, plan_cache
from kvframe.contract.eviction import MOST_USES, EvictionPolicy, ReleasedPages
from kvframe.contract.specs import LayerSpec
from kvframe_testing.checks import Check, Checks, make_part
from kvframe_testing.laws import ConformanceError, answer_of
from kvframe_testing.requests import MAX_RUNNING, PageContents, check_manager

USES = np.array([0, 1, 2, 3, 5, 8, 100, 10**4, 10**9])
"""Numbers of uses, in ascending order."""
CLOCKS = (1, 17, 4096, 10**6, 10**9, 10**12, 2**61)
"""Times of release, in ascending order."""
CAPACITIES = (0, 4096, 2**30, 2**37)
"""Bytes of pools."""
PAGE_BYTES = 4096
_RISING = np.linspace(0.0, 1.0, MOST_USES + 1)
REUSE = (np.ones(MOST_USES + 1), np.zeros(MOST_USES + 1), _RISING, _RISING[::-1], np.array([0.5, 0.1, 0.9, 0.2] * 4))
"""Shares of pages that are hit again, by their number of uses."""
SECONDS = np.array([0.0, math.nan, 0.5, 60.0, 10.0**6])
"""For how long pages are needed, as hinted, from the worst hint to the best; NaN if nobody says."""
PRIORITIES = np.array([2**31 - 1, 7, 1, 0, -1, 1 - 2**31])
"""Hinted priorities of requests, from the least urgent one to the most urgent one."""
_LONG = 10**4
"""A page that is no longer used must be evicted before the pool has been refilled this many times."""


def check_policy(policy: EvictionPolicy) -> None:
    """Check a policy's answers for pages of any age and number of uses, and pools of several sizes.

    * *form*: ``priorities`` returns one ``int64`` for each page, for any number of pages; it raises nothing and
      writes to none of its arguments;
    * *alone*: a page's priority does not depend on the pages that are released with it, nor on earlier calls;
    * *uses*: of pages that are released together, a page with more uses is not evicted earlier;
    * *age*: of two pages with equally many uses and equal shares of reuse, the one released later is not evicted
      earlier. With the law of uses, this means that a prefix's end is never evicted after its beginning;
    * *hints*: of two pages that differ in one hint, the one with the worse hint is not evicted later; the other laws
      hold for pages with any equal hints;
    * *forgetting*: no page is kept for ever: a page that is no longer used, with any number of uses, is evicted before
      a page that was released after the pool had been refilled ten thousand times;
    * *requests*: the cache stays right with the policy: random requests find states of their own tokens only
      (``kvframe_testing.requests``).
    """
    for capacity, shares in itertools.product(CAPACITIES, range(len(REUSE))):
        check_in_pool(policy, capacity, shares)
    check_requests(policy)


def check_requests(policy: EvictionPolicy) -> None:
    """Run random requests in a small pool from which a policy evicts, beside the definition of a cache."""
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4)
    grouping = group_layers([LayerSpec(name="layer", spec=spec)])
    plan = plan_cache(grouping, memory_bytes=4096, max_model_len=64, max_num_batched_tokens=16)

    def make(plan: KVCachePlan, contents: PageContents) -> KVCacheManager:
        return KVCacheManager(plan, max_num_seqs=MAX_RUNNING, eviction=policy, copier=contents.copy_within)

    check_manager(make, plan)


def check_in_pool(policy: EvictionPolicy, capacity: int, shares: int) -> None:
    """Check a policy's answers in a pool of one of the ``CAPACITIES``, with the shares of an index in ``REUSE``."""
    ask = _PolicyInPool(policy, capacity, REUSE[shares])
    _check_in_pool(ask)
    ask(1, USES[:0])
    for seconds, priority in ((0.0, 0), (60.0, 0), (math.nan, 7), (math.nan, -7)):
        _check_in_pool(attrs.evolve(ask, seconds_left=seconds, request_priority=priority))
    _check_hints(ask)


def policy_checks(
    policy_class: type[EvictionPolicy], options: Mapping[str, Any] | None = None, *, name: str = ""
) -> Checks:
    """Return the checks of a policy: one for each pool and share of reuse, and random requests."""
    part = f"eviction policy {name or policy_class.name!r}"
    policy = make_part(part, policy_class, options)
    checks = [
        Check(
            name=f"pool={capacity}-shares={shares}",
            features=("a pool without pages" if not capacity else f"a pool of {capacity:,} bytes",),
            run=partial(check_in_pool, policy, capacity, shares),
        )
        for capacity, shares in itertools.product(CAPACITIES, range(len(REUSE)))
    ]
    checks.append(Check(name="requests", features=("random requests",), run=partial(check_requests, policy)))
    return Checks(part=part, checks=tuple(checks))


@attrs.frozen
class _PolicyInPool:
    """A policy in a pool of ``capacity`` bytes, with given shares of reuse."""

    policy: EvictionPolicy
    capacity: int
    reuse: npt.NDArray[np.float64]
    seconds_left: float | None = None
    request_priority: int = 0

    def __call__(self, clock: int, uses: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        sizes = np.full(len(uses), PAGE_BYTES)
        pages = ReleasedPages(clock, uses.copy(), sizes, self.capacity, self.reuse.copy())
        if self.seconds_left is not None:
            levels = np.full(len(uses), self.request_priority)
            pages = attrs.evolve(
                pages, request_priorities=levels, seconds_left=np.full(len(uses), float(self.seconds_left))
            )
        priorities: npt.NDArray[np.int64] = answer_of(
            f"{self.policy!r}: form: priorities()", self.policy.priorities, pages
        )
        arguments = ((pages.uses, uses), (pages.num_bytes, np.full(len(uses), PAGE_BYTES)), (pages.reuse, self.reuse))
        self.require(
            all(map(np.array_equal, *zip(*arguments, strict=True))), "form: priorities() writes to its argument"
        )
        is_right = (
            isinstance(priorities, np.ndarray) and priorities.shape == uses.shape and priorities.dtype == np.int64
        )
        self.require(is_right, f"form: priorities() has to return int64 of shape {uses.shape}, not {priorities!r}")
        return priorities.copy()

    def require(self, holds: bool, problem: str) -> None:
        if not holds:
            context = f"in a pool of {self.capacity} bytes, with shares of reuse {self.reuse.tolist()}"
            if self.seconds_left is not None:
                context += f", needed for {self.seconds_left} seconds, of requests of priority {self.request_priority}"
            raise ConformanceError(f"{self.policy!r}: {problem}, {context}")

    def require_ascending(self, priorities: npt.NDArray[np.int64], subject: str) -> None:
        is_ascending = all(one <= next_one for one, next_one in itertools.pairwise(priorities.tolist()))
        self.require(is_ascending, f"{subject} {priorities.tolist()}")


def _check_hints(ask: _PolicyInPool) -> None:
    """Check that a page with a worse hint is not evicted later than one with a better hint."""
    for clock in CLOCKS:
        for priority in PRIORITIES.tolist():
            priorities_by_seconds = [
                attrs.evolve(ask, seconds_left=seconds, request_priority=priority)(clock, USES)
                for seconds in SECONDS.tolist()
            ]
            for column in np.stack(priorities_by_seconds).T:
                ask.require_ascending(column, f"hints: needed for {SECONDS.tolist()} seconds, priorities are")
        for seconds in SECONDS.tolist():
            priorities_by_urgency = [
                attrs.evolve(ask, seconds_left=seconds, request_priority=priority)(clock, USES)
                for priority in PRIORITIES.tolist()
            ]
            for column in np.stack(priorities_by_urgency).T:
                ask.require_ascending(column, f"hints: of requests of priority {PRIORITIES.tolist()}, they are")


def _check_in_pool(ask: _PolicyInPool) -> None:
    priorities = np.stack([ask(clock, USES) for clock in CLOCKS])
    for clock, row in zip(CLOCKS, priorities, strict=True):
        lone_row = np.concatenate([ask(clock, USES[[place]]) for place in range(len(USES))])
        ask.require(np.array_equal(lone_row, row), "alone: priorities depend on the other pages that are released")
        ask.require(
            np.array_equal(ask(clock, USES[::-1])[::-1], row), "alone: priorities depend on the order of the pages"
        )
        ask.require_ascending(row, f"uses: at {clock}, priorities of pages used {USES.tolist()} times are")
    for uses, column in zip(USES.tolist(), priorities.T, strict=True):
        ask.require_ascending(column, f"age: used {uses} times, priorities at {list(CLOCKS)} are")
    if ask.capacity:
        late_row = ask(CLOCKS[-2] + _LONG * ask.capacity, USES[:1])
        ask.require(bool((priorities[-2] < late_row).all()), "forgetting: pages are kept for ever once they are used")
