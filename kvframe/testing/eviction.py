"""Checks that an eviction policy's priorities keep the laws of ``check_policy``. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.contract.errors import PluginError
from kvframe.contract.eviction import MOST_USES, EvictionPolicy, ReleasedPages
from kvframe.contract.foreign import call
from kvframe.testing.checks import Check, Checks, make_part
from kvframe.testing.laws import ConformanceError

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
    * *forgetting*: no page is kept for ever: a page that is no longer used, with any number of uses, is evicted before
      a page that was released after the pool had been refilled ten thousand times.
    """
    for capacity, shares in itertools.product(CAPACITIES, range(len(REUSE))):
        check_in_pool(policy, capacity, shares)


def check_in_pool(policy: EvictionPolicy, capacity: int, shares: int) -> None:
    """Check a policy's answers in a pool of one of the ``CAPACITIES``, with the shares of an index in ``REUSE``."""
    ask = _PolicyInPool(policy, capacity, REUSE[shares])
    _check_in_pool(ask)
    ask(1, USES[:0])


def policy_checks(
    policy_class: type[EvictionPolicy], options: Mapping[str, Any] | None = None, *, name: str = ""
) -> Checks:
    """Return the checks of a policy, one for each pool and share of reuse."""
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
    return Checks(part=part, checks=tuple(checks))


@attrs.frozen
class _PolicyInPool:
    """A policy in a pool of ``capacity`` bytes, with given shares of reuse."""

    policy: EvictionPolicy
    capacity: int
    reuse: npt.NDArray[np.float64]

    def __call__(self, clock: int, uses: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        sizes = np.full(len(uses), PAGE_BYTES)
        pages = ReleasedPages(clock, uses.copy(), sizes, self.capacity, self.reuse.copy())
        try:
            priorities = call("form: priorities()", self.policy.priorities, pages)
        except PluginError as error:
            raise ConformanceError(f"{self.policy!r}: {error}") from error.__cause__
        arguments = ((pages.uses, uses), (pages.num_bytes, np.full(len(uses), PAGE_BYTES)), (pages.reuse, self.reuse))
        self.require(
            all(map(np.array_equal, *zip(*arguments, strict=True))), "form: priorities() writes to its argument"
        )
        is_right = (
            isinstance(priorities, np.ndarray) and priorities.shape == uses.shape and priorities.dtype == np.int64
        )
        self.require(is_right, f"form: priorities() has to return int64 of shape {uses.shape}, not {priorities!r}")
        return priorities.copy()

    def require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            where = f"in a pool of {self.capacity} bytes, with shares of reuse {self.reuse.tolist()}"
            raise ConformanceError(f"{self.policy!r}: {otherwise}, {where}")

    def require_ascending(self, priorities: npt.NDArray[np.int64], what: str) -> None:
        is_ascending = all(one <= next_one for one, next_one in itertools.pairwise(priorities.tolist()))
        self.require(is_ascending, f"{what} {priorities.tolist()}")


def _check_in_pool(ask: _PolicyInPool) -> None:
    priorities = np.stack([ask(clock, USES) for clock in CLOCKS])
    for clock, row in zip(CLOCKS, priorities, strict=True):
        alone = np.concatenate([ask(clock, USES[[place]]) for place in range(len(USES))])
        ask.require(np.array_equal(alone, row), "alone: priorities depend on the other pages that are released")
        ask.require(
            np.array_equal(ask(clock, USES[::-1])[::-1], row), "alone: priorities depend on the order of the pages"
        )
        ask.require_ascending(row, f"uses: at {clock}, priorities of pages used {USES.tolist()} times are")
    for uses, column in zip(USES.tolist(), priorities.T, strict=True):
        ask.require_ascending(column, f"age: used {uses} times, priorities at {list(CLOCKS)} are")
    if ask.capacity:
        later = ask(CLOCKS[-2] + _LONG * ask.capacity, USES[:1])
        ask.require(bool((priorities[-2] < later).all()), "forgetting: pages are kept for ever once they are used")
