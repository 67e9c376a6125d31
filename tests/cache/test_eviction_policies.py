"""Eviction policies: the pool evicts pages in a policy's order, and a bad policy is replaced."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvframe_testing.audit import audit, findable_pages

from kvframe.cache.block_order import FreeList
from kvframe.cache.block_pool import BlockPool
from kvframe.cache.manager import KVCacheManager
from kvframe.contract.errors import PluginError
from kvframe.contract.eviction import LRU, MOST_USES, EvictionPolicy, ReleasedPages
from kvframe.contract.specs import KVCacheSpec
from tests.cache.lives import Lives, Tally
from tests.cache.plans import full, make_plan, masked
from tests.cache.test_against_definition import SPECS
from tests.support.engines import pool_of
from tests.support.managers import serve

BOUND = np.iinfo(np.int64)


@attrs.frozen(kw_only=True)
class OldestFirst(EvictionPolicy):
    """LRU as a plugin would write it; the built-in policy has its own path through the pool."""

    name = "oldest_first"

    def priorities(self, pages: ReleasedPages) -> npt.NDArray[np.int64]:
        return LRU.priorities(pages)


@attrs.frozen(kw_only=True)
class OftenUsedLast(EvictionPolicy):
    """Evicts by the number of uses only."""

    name = "often_used_last"

    def priorities(self, pages: ReleasedPages) -> npt.NDArray[np.int64]:
        return pages.uses


@attrs.frozen(kw_only=True)
class Arbitrary(EvictionPolicy):
    """Answers any numbers; with few different ones, many pages have the same priority."""

    name = "arbitrary"
    low: int = BOUND.min
    high: int = BOUND.max

    def priorities(self, pages: ReleasedPages) -> npt.NDArray[np.int64]:
        draw = np.random.default_rng(pages.clock)
        return draw.integers(self.low, self.high, size=len(pages.uses), endpoint=True)


@attrs.frozen
class Failing(EvictionPolicy):
    """Answers like another policy a number of times, then with a given answer."""

    name = "failing"
    answer: Any
    num_good: int = 0
    good: EvictionPolicy = OftenUsedLast()
    calls: Iterator[int] = attrs.field(factory=itertools.count)

    def priorities(self, pages: ReleasedPages) -> npt.NDArray[np.int64]:
        if next(self.calls) < self.num_good:
            return self.good.priorities(pages)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer  # type: ignore[no-any-return]


@attrs.frozen
class Overheard(EvictionPolicy):
    """Records the answers of another policy."""

    name = "overheard"
    policy: EvictionPolicy
    answers: list[list[int]] = attrs.field(factory=list)

    def priorities(self, pages: ReleasedPages) -> npt.NDArray[np.int64]:
        priorities = self.policy.priorities(pages)
        self.answers.append(priorities.tolist())
        return priorities


class Order:
    """A pool, and beside it a list of the cached pages, which is sorted at each eviction."""

    def __init__(self, specs: Sequence[KVCacheSpec], policy: EvictionPolicy, seed: int) -> None:
        self.draw = random.Random(seed)
        self.is_lru = policy is LRU
        self.policy = policy if self.is_lru else Overheard(policy)
        self.plan = make_plan(*specs, num_slabs=200)
        self.evicted: list[int] = []
        self.pool = BlockPool(
            self.plan, on_evicted=lambda owner, group, pages: self.evicted.extend(pages.tolist()), eviction=self.policy
        )
        self.held: dict[int, int] = {}
        self.cached: dict[int, tuple[int, int, int, int]] = {}
        self.num_releases = 0

    def take(self) -> None:
        """Take pages; there are enough free ones, so none is evicted."""
        if len(self.held) + len(self.cached) > 40:
            return
        counts = [self.draw.randint(0, 3) for _ in self.plan.groups]
        taken = self.pool.allocate_blocks(counts)
        assert taken is not None
        assert not self.evicted
        self.pool.publish_blocks(1, taken, taken)
        groups = [group for group, count in enumerate(counts) for _ in range(count)]
        self.held.update(zip(taken.tolist(), groups, strict=True))

    def release(self) -> None:
        """Release pages of one group."""
        group = self.draw.randrange(len(self.plan.groups))
        pages = [page for page, its in self.held.items() if its == group]
        self.draw.shuffle(pages)
        pages = pages[: self.draw.randint(0, 5)]
        if not pages:
            return
        self.pool.release_blocks(np.array(pages, dtype=np.int32), group)
        priorities = [0] * len(pages) if self.is_lru else self.policy.answers[-1]
        self.num_releases += 1
        for place, (page, priority) in enumerate(zip(pages, priorities, strict=True)):
            del self.held[page]
            self.cached[page] = (priority, self.num_releases, place, group)

    def find(self) -> None:
        """Hold cached pages again, and count this as a use or not."""
        group = self.draw.randrange(len(self.plan.groups))
        pages = [page for page, key in self.cached.items() if key[3] == group]
        pages = self.draw.sample(pages, min(len(pages), self.draw.randint(0, 3)))
        if not pages:
            return
        found = np.array(pages, dtype=np.int32)
        self.pool.add_references(group, found)
        if self.draw.random() < 0.7:
            self.pool.count_uses(np.append(found, np.int32(0)))
        for page in pages:
            del self.cached[page]
            self.held[page] = group

    def give_up(self) -> None:
        """Evict pages of one group, or of any, and compare with the list."""
        count, group = self.draw.randint(1, 4), self.draw.randrange(len(self.plan.groups))
        # If any page can serve any group, there is one order for all groups.
        is_any = FreeList.fits(self.plan)
        order = sorted((key, page) for page, key in self.cached.items() if is_any or key[3] == group)
        expected = [page for _, page in order[:count]]
        if is_any:
            self.pool.evict_first(0, count)
        else:
            # The built-in policy counts time in releases.
            assert self.pool.first_priority(group) == (order[0][0][self.is_lru] if order else None)
            self.pool.evict_first(group, count)
        assert expected == self.evicted
        self.evicted.clear()
        for page in expected:
            del self.cached[page]


POLICIES: list[EvictionPolicy] = [LRU, OldestFirst(), OftenUsedLast(), Arbitrary(), Arbitrary(low=0, high=2)]


SPECS_OF_POOLS = [[full()], [full(), masked(window=8)], [full(), full(num_kv_heads=2), masked(window=9)]]


@pytest.mark.parametrize("specs", SPECS_OF_POOLS, ids=["one group", "equal pages", "slabs"])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_pages_are_given_up_in_the_order_that_the_policy_says(policy: EvictionPolicy, specs: list[KVCacheSpec]) -> None:
    num_given_up = 0
    for seed in range(4):
        order = Order(specs, policy, seed)
        for _ in range(300):
            order.draw.choice([order.take, order.release, order.release, order.find, order.give_up])()
            assert len(order.cached) == order.pool.num_cached
        num_given_up += sum(order.pool.blocks_evicted)
    assert num_given_up > 100


@settings(derandomize=True)
@given(
    specs=st.lists(SPECS, min_size=1, max_size=4),
    num_slabs=st.integers(8, 40),
    policy=st.sampled_from([OftenUsedLast(), Arbitrary(), Arbitrary(low=-1, high=1)]),
    num_good=st.integers(0, 400),
    seed=st.integers(0, 2**32),
    num_events=st.integers(1, 120),
)
def test_whatever_a_policy_says_the_cache_is_as_defined(
    specs: list[KVCacheSpec], num_slabs: int, policy: EvictionPolicy, num_good: int, seed: int, num_events: int
) -> None:
    failing = Failing("no array", num_good=1 + num_good, good=policy)
    lives = Lives(specs, num_slabs, True, seed, Tally(), eviction=failing)
    for _ in range(num_events):
        lives.happen()
    lives.end()


@pytest.mark.parametrize("specs", SPECS_OF_POOLS, ids=["one group", "equal pages", "slabs"])
def test_lru_in_a_policys_way_through_the_pool_is_lru(specs: list[KVCacheSpec]) -> None:
    plan = make_plan(*specs, num_slabs=40)
    managers = [KVCacheManager(plan, max_num_seqs=2, eviction=policy) for policy in (None, OldestFirst())]
    draw = random.Random(0)
    prompts = [[draw.randint(0, 1) for _ in range(draw.randint(5, 60))] for _ in range(12)]
    hits = [[serve(manager, prompt) for manager in managers] for prompt in draw.choices(prompts, k=300)]
    built_in, by_policy = np.array(hits).sum(axis=0).tolist()
    assert managers[0].stats.num_evictions > 100
    if FreeList.fits(plan):
        assert managers[0].stats == managers[1].stats
    else:
        # A slab is evicted when its last cached page is. The built-in policy uses its last page, cached or not.
        assert by_policy == pytest.approx(built_in, rel=0.15)


# --- the data that a policy gets --------------------------------------------------------------------------------------


@attrs.frozen
class Listening(EvictionPolicy):
    """LRU that records its arguments."""

    name = "listening"
    told: list[tuple[int, list[int], list[int], int]] = attrs.field(factory=list)

    def priorities(self, pages: ReleasedPages) -> npt.NDArray[np.int64]:
        self.told.append((pages.clock, pages.uses.tolist(), pages.num_bytes.tolist(), pages.capacity))
        return LRU.priorities(pages)


def listening_manager(num_slabs: int = 40) -> tuple[KVCacheManager, Listening, int]:
    policy, plan = Listening(), make_plan(full(), num_slabs=num_slabs)
    manager = KVCacheManager(plan, max_num_seqs=4, eviction=policy)
    policy.told.clear()
    return manager, policy, plan.groups[0].page_bytes


def test_a_policy_is_told_how_often_pages_were_found_and_how_much_is_new() -> None:
    manager, policy, size = listening_manager()
    serve(manager, [1] * 8)
    serve(manager, [1] * 13)
    serve(manager, [1] * 13)
    capacity = manager.plan.total_bytes
    # The end of a request is released first. Its last block is not full, so it cannot be found.
    assert policy.told == [
        (1 + 2 * size, [0, 0], [size] * 2, capacity),
        (2 + 3 * size, [0, 1, 1], [size] * 3, capacity),
        (3 + 3 * size, [1, 2, 2], [size] * 3, capacity),
    ]


def test_a_policy_is_told_which_share_is_found_again_by_the_number_of_uses() -> None:
    policy, plan = Told(), make_plan(full(), num_slabs=40)
    manager = KVCacheManager(plan, max_num_seqs=1, eviction=policy)
    for index in range(200):
        serve(manager, [7] * 9)
        serve(manager, [100 + index] * 9)
    first, *_, last = policy.reuse
    assert first == [1.0] * (MOST_USES + 1)
    # Prompts are not repeated, except one. A prompt that was hit once is hit again.
    assert last[0] < 0.3
    assert last[MOST_USES] > 0.9


@attrs.frozen
class Told(EvictionPolicy):
    """LRU that records the shares of reuse."""

    name = "told"
    reuse: list[list[float]] = attrs.field(factory=list)

    def priorities(self, pages: ReleasedPages) -> npt.NDArray[np.int64]:
        self.reuse.append(pages.reuse.tolist())
        return LRU.priorities(pages)


def test_a_request_that_waits_for_room_uses_nothing() -> None:
    manager, policy, _ = listening_manager(num_slabs=6)
    serve(manager, [1] * 8)
    assert manager.extend("runs", 12) if manager.start("runs", [2] * 12) == 0 else False
    for _ in range(5):
        assert 8 == manager.start("waits", [*[1] * 8, *[3] * 20])
        assert not manager.extend("waits", 28)
        manager.free("waits")
    assert [uses for _, uses, _, _ in policy.told] == [[0, 0]] * 6


def test_the_uses_of_a_page_end_with_its_content() -> None:
    manager, policy, _ = listening_manager(num_slabs=3)
    for _ in range(3):
        serve(manager, [1] * 9)
    serve(manager, [2] * 12)
    serve(manager, [3] * 12)
    assert [uses for _, uses, _, _ in policy.told] == [[0, 0], [1, 1], [2, 2], [0] * 3, [0] * 3]
    serve(manager, [3] * 12)
    manager.reset_prefix_cache()
    serve(manager, [3] * 12)
    assert [0] * 3 == policy.told[-1][1]


# --- a policy that breaks the contract --------------------------------------------------------------------------------

WRONG = [
    (ValueError("no\nidea"), "failed: ValueError: no idea"),
    (SystemExit(3), "failed: SystemExit: 3"),
    (None, "has to return int64 of shape (3,), not NoneType"),
    ([1, 2, 3], "has to return int64 of shape (3,), not list"),
    (np.zeros(2, dtype=np.int64), "has to return int64 of shape (3,), not int64 of shape (2,)"),
    (np.zeros((3, 1), dtype=np.int64), "has to return int64 of shape (3,), not int64 of shape (3, 1)"),
    (np.zeros(3), "has to return int64 of shape (3,), not float64 of shape (3,)"),
]


@pytest.mark.parametrize(("answer", "reason"), WRONG, ids=[reason for _, reason in WRONG])
def test_a_policy_that_cannot_answer_is_refused_before_anything_runs(answer: Any, reason: str) -> None:
    with pytest.raises(PluginError) as caught:
        KVCacheManager(make_plan(full()), max_num_seqs=1, eviction=Failing(answer))
    assert f"eviction policy 'failing': priorities() {reason}" == str(caught.value)


@pytest.mark.parametrize("specs", SPECS_OF_POOLS, ids=["one group", "equal pages", "slabs"])
def test_a_policy_that_fails_later_is_set_aside_and_the_cache_goes_on_by_lru(
    specs: list[KVCacheSpec], caplog: pytest.LogCaptureFixture
) -> None:
    plan = make_plan(*specs, num_slabs=60)
    # For all pages that were released before it fails, its order is the reverse of LRU.
    policy = Failing(ZeroDivisionError("late"), num_good=11, good=NewestFirst())
    failed = KVCacheManager(plan, max_num_seqs=1, eviction=policy)
    lru = KVCacheManager(plan, max_num_seqs=1)
    assert failed.eviction is policy
    for index in range(60):
        for manager in (failed, lru):
            serve(manager, [index, *range(8)])
            audit(manager)
    assert failed.eviction is LRU
    assert lru.stats.num_evictions > 0
    assert set(findable_pages(lru)) == set(findable_pages(failed))
    (record,) = caplog.records
    assert record.getMessage() == (
        "eviction policy 'failing': priorities() failed: ZeroDivisionError: late; it is set aside, and the least "
        "recently used blocks are evicted first"
    )


@attrs.frozen(kw_only=True)
class NewestFirst(EvictionPolicy):
    """The reverse of LRU."""

    name = "newest_first"

    def priorities(self, pages: ReleasedPages) -> npt.NDArray[np.int64]:
        return -LRU.priorities(pages)


def test_many_pages_that_are_taken_again_and_again_leave_few_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvframe.cache.block_order.MAX_STALE", 8)
    monkeypatch.setattr("kvframe.cache.slabs.MAX_STALE", 8)
    plan = make_plan(*SPECS_OF_POOLS[2], num_slabs=60)
    manager = KVCacheManager(plan, max_num_seqs=1, eviction=OftenUsedLast())
    for _ in range(60):
        serve(manager, list(range(30)))
    pool: Any = pool_of(manager)
    assert sum(order._num_entries for order in pool._orders) <= 2 * (pool_of(manager).num_cached + 8) + 16
    assert len(pool.free_list._by_priority) <= 2 * manager.plan.num_slabs + 8
