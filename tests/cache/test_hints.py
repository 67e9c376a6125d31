"""Hints of requests in the cache: needed pages stay for a time, others go earlier, and nobody pins the pool."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import ClassVar

import attrs
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvframe_scan_resistant.policy import ScanResistant
from kvframe_testing.audit import audit, audit_each_verb

from kvframe.cache.hints import HintedPages, Hints
from kvframe.cache.manager import KVCacheManager
from kvframe.contract import EvictionPolicy, PluginError, ReleasedPages
from kvframe.contract.eviction import LRU
from kvframe.contract.specs import KVCacheSpec
from tests.cache.plans import full, make_plan, ranged, state
from tests.support.managers import make_manager

BLOCK = 4
SPECS_OF_POOLS: list[list[KVCacheSpec]] = [
    [full(block_size=BLOCK)],
    [full(block_size=BLOCK), ranged(block_size=BLOCK, window=9)],
    [full(block_size=BLOCK), ranged(block_size=2, window=5, num_kv_heads=3), state(block_size=BLOCK)],
]


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1.0

    def __call__(self) -> float:
        return self.now


def serve(manager: KVCacheManager, tokens: Sequence[int], hints: Hints | None = None, owner: str = "") -> int:
    """Compute a request and free it with its hints; return the tokens hit."""
    num_hit = manager.start("served", tokens)
    assert manager.extend("served", len(tokens))
    manager.commit("served", tokens, len(tokens))
    if hints is None:
        manager.free("served")
    else:
        manager.free("served", hints=hints, owner=owner)
    audit(manager)
    return num_hit


def text(index: int, num_tokens: int = 32) -> list[int]:
    return list(range(1000 * index, 1000 * index + num_tokens))


def found(manager: KVCacheManager, index: int, num_tokens: int = 32) -> int:
    return manager.find([*text(index, num_tokens), 7])


def pool(clock: Clock, *, share: float = 0.5, policy: EvictionPolicy | None = None) -> KVCacheManager:
    """Return a manager of a pool of 40 blocks of 4 tokens."""
    eviction = ScanResistant() if policy is None else policy
    spec = full(block_size=BLOCK)
    return make_manager(spec, num_slabs=40, max_model_len=40, eviction=eviction, now=clock, max_kept_share=share)


# --- what each hint does ----------------------------------------------------------------------------------------------


def test_a_prefix_stays_as_long_as_it_is_needed_and_counts_as_others_after_that() -> None:
    clock = Clock()
    manager = pool(clock)
    serve(manager, text(0), Hints(keep_seconds=60))
    for index in range(1, 12):
        serve(manager, text(index))
    assert 32 == found(manager, 0)
    clock.now = 61.5
    serve(manager, text(12))
    # Five texts fit into the pool. When its time was over, the first one counted as released then.
    for index in range(13, 18):
        serve(manager, text(index))
    assert [0, 0, 32, 32, 32, 32, 32] == [found(manager, index) for index in (0, *range(12, 18))]


def test_a_prompt_that_is_sent_once_goes_before_older_ones() -> None:
    manager = pool(Clock())
    for index in range(4):
        serve(manager, text(index))
    serve(manager, text(4), Hints(keep_seconds=0))
    serve(manager, text(5))
    assert [32, 32, 32, 32, 0, 32] == [found(manager, index) for index in range(6)]


def test_prompts_of_less_urgent_requests_go_before_older_ones() -> None:
    manager = pool(Clock())
    # Each text is a fifth of the pool: the fourth one seems to have come two and a half texts earlier.
    for index in range(5):
        serve(manager, text(index), Hints(priority=1) if index == 3 else None)
    serve(manager, text(5))
    serve(manager, text(6))
    assert [0, 32, 32, 0, 32, 32, 32] == [found(manager, index) for index in range(7)]


def test_what_others_use_too_is_worth_the_best_of_their_hints() -> None:
    clock, shared = Clock(), text(0, 16)
    manager = pool(clock)
    serve(manager, [*shared, *text(1, 16)])
    serve(manager, [*shared, *text(2, 16)], Hints(keep_seconds=0, priority=5))
    for index in range(3, 6):
        serve(manager, text(index))
    # 24 blocks of three texts, and 12 of the two: the four that only the request without a further need used are gone.
    serve(manager, text(6))
    assert (32, 16) == (manager.find([*shared, *text(1, 16), 7]), manager.find([*shared, *text(2, 16), 7]))


def test_without_a_policy_hints_are_ignored() -> None:
    manager = pool(Clock(), policy=LRU)
    serve(manager, text(0), Hints(keep_seconds=60))
    for index in range(1, 6):
        serve(manager, text(index))
    assert 0 == found(manager, 0)


def test_a_request_that_is_preempted_gives_no_hints() -> None:
    manager = pool(Clock())
    manager.start("served", text(0))
    manager.extend("served", 32)
    manager.commit("served", text(0), 32)
    manager.free("served")
    assert not manager._pool.is_hinted


# --- nobody pins the pool ---------------------------------------------------------------------------------------------


def test_an_owner_keeps_a_share_of_the_pool_at_most() -> None:
    manager = pool(Clock(), share=0.5)
    for index in range(20):
        serve(manager, text(index), Hints(keep_seconds=10**400), "hostile")
    hinted = manager._pool._policy.hinted  # type: ignore[union-attr]
    assert hinted is not None
    page_bytes = manager.plan.groups[0].page_bytes
    # 40 blocks: two texts of eight blocks are half of the pool at most, a third one is kept by nobody.
    assert 16 * page_bytes == hinted.kept_bytes("hostile")
    assert [32, 32, 0, 0] == [found(manager, index) for index in range(4)]
    # The others' prompts have the rest of the pool: three texts of eight blocks.
    for index in range(30, 33):
        serve(manager, text(index))
    assert [32, 32, 32] == [found(manager, index) for index in range(30, 33)]


def test_a_hostile_owner_takes_little_from_others() -> None:
    hits = []
    for hints in (None, Hints(keep_seconds=10**6)):
        manager, draw = pool(Clock(), share=0.25), random.Random(0)
        num_hit = 0
        for index in range(200):
            serve(manager, text(1000 + index), hints, "hostile")
            num_hit += serve(manager, [*text(draw.randrange(3), 28), *text(5000 + index, 4)])
        hits.append(num_hit)
    without, with_hostile = hits
    assert with_hostile >= 0.5 * without > 0


def test_a_share_is_free_again_when_the_time_is_over() -> None:
    clock = Clock()
    manager = pool(clock)
    for index in range(2):
        serve(manager, text(index), Hints(keep_seconds=60), "a")
    clock.now = 62.0
    serve(manager, text(2), Hints(keep_seconds=60), "a")
    hinted = manager._pool._policy.hinted  # type: ignore[union-attr]
    assert hinted is not None
    assert 8 * manager.plan.groups[0].page_bytes == hinted.kept_bytes("a")
    manager.reset_prefix_cache()
    assert 0 == hinted.kept_bytes("a")


# --- whatever happens -------------------------------------------------------------------------------------------------


@given(st.data())
def test_any_hints_leave_the_cache_right_and_bytes_counted(data: st.DataObject) -> None:
    """The audited cache finds at most what it computed, kept bytes add up, and only pages that are cached are kept."""
    clock, share = Clock(), data.draw(st.sampled_from([0.1, 0.5, 1.0]))
    specs = data.draw(st.sampled_from(SPECS_OF_POOLS))
    plan = make_plan(*specs, num_slabs=40, max_model_len=40)
    manager = audit_each_verb(
        KVCacheManager(plan, max_num_seqs=2, eviction=ScanResistant(), now=clock, max_kept_share=share)
    )
    known: set[tuple[int, ...]] = set()
    for _ in range(data.draw(st.integers(1, 25))):
        tokens = [
            *text(data.draw(st.integers(0, 2)), 12),
            *text(data.draw(st.integers(3, 9)), data.draw(st.integers(1, 20))),
        ]
        hints = Hints(
            priority=data.draw(st.integers(-2, 2)),
            keep_seconds=data.draw(st.sampled_from([None, 0, 0.5, 5, 50])),
            session_id=data.draw(st.sampled_from(["", "x", "y"])),
        )
        num_hit = serve(manager, tokens, hints, data.draw(st.sampled_from("ab")))
        assert not num_hit or tuple(tokens[:num_hit]) in known
        known |= {tuple(tokens[:stop]) for stop in range(len(tokens) + 1)}
        clock.now += data.draw(st.floats(0, 10))
        if (hinted := manager._pool._policy.hinted) is not None:  # type: ignore[union-attr]
            for owner in "ab":
                number = hinted._numbers.get(owner, 0)
                counted = int(hinted._bytes[hinted._owner == number].sum()) if number else 0
                assert counted == hinted.kept_bytes(owner) <= share * plan.total_bytes
        if data.draw(st.integers(0, 9)) == 0:
            manager.reset_prefix_cache()
            known.clear()


@attrs.frozen
class FailsWithHints(EvictionPolicy):
    """Cannot read hints once a page is needed no more."""

    name: ClassVar[str] = "fails_with_hints"

    def priorities(self, pages: ReleasedPages) -> npt.NDArray[np.int64]:
        if pages.clock > 1 and pages.seconds_left is not None and (pages.seconds_left == 0).any():
            raise ZeroDivisionError("no time left")
        return pages.uses * 0 + pages.clock


@pytest.mark.parametrize("specs", SPECS_OF_POOLS, ids=["one group", "equal pages", "slabs"])
def test_a_policy_that_fails_at_a_hint_is_set_aside(specs: list[KVCacheSpec], caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    plan = make_plan(*specs, num_slabs=40, max_model_len=40)
    manager = KVCacheManager(plan, max_num_seqs=1, eviction=FailsWithHints(), now=clock)
    for index in range(30):
        serve(manager, text(index), Hints(keep_seconds=1, session_id="a"))
    assert manager.eviction is LRU
    (line,) = caplog.messages
    assert "ZeroDivisionError" in line


def test_a_policy_is_tried_with_hints_when_the_cache_is_made() -> None:
    @attrs.frozen
    class Wrong(EvictionPolicy):
        name: ClassVar[str] = "wrong"

        def priorities(self, pages: ReleasedPages) -> npt.NDArray[np.int64]:
            return pages.uses if pages.seconds_left is None else pages.seconds_left  # type: ignore[return-value]

    with pytest.raises(PluginError, match="has to return int64"):
        pool(Clock(), policy=Wrong())


def test_pages_have_the_best_hints_of_their_requests() -> None:
    clock = Clock()
    hinted = HintedPages(np.array([True, False, False, False]), clock, 1000)
    ids, pages, sizes = np.arange(4, dtype=np.int32), np.arange(4), np.full(4, 100)
    hinted.use(ids, pages, sizes, Hints(keep_seconds=0, priority=3), "a")
    assert [math.isnan(each) for each in hinted.seconds_left(pages)] == [True, False, False, False]
    assert [0, 3, 3, 3] == hinted.levels(pages).tolist()
    hinted.use(ids[1:3], pages[1:3], sizes[1:3], Hints(keep_seconds=9, priority=-1), "a")
    hinted.use(ids[2:], pages[2:], sizes[2:], Hints(keep_seconds=4), "b")
    assert [9.0, 9.0, 4.0] == hinted.seconds_left(pages[1:]).tolist()
    assert [-1, -1, 0] == hinted.levels(pages[1:]).tolist()
    assert (200, 100) == (hinted.kept_bytes("a"), hinted.kept_bytes("b"))
    hinted.forget(pages[:3])
    assert (0, 100) == (hinted.kept_bytes("a"), hinted.kept_bytes("b"))
    clock.now = 5.5
    hinted.use(ids[3:], pages[3:], sizes[3:], Hints(), "c")
    assert (0, [0, 0, 0, 0]) == (hinted.kept_bytes("b"), hinted.levels(pages).tolist())


# --- sessions ---------------------------------------------------------------------------------------------------------


def turn(session_id: str, keep_seconds: float | None = 60) -> Hints:
    return Hints(keep_seconds=keep_seconds, session_id=session_id)


def test_what_only_earlier_requests_of_a_session_used_goes_first() -> None:
    """An agent rewrites its context: of the earlier one, only what the new one begins with stays."""
    manager, shared = pool(Clock(), share=1.0), text(0, 16)
    serve(manager, text(9))
    serve(manager, [*shared, *text(1, 16)], turn("a"))
    serve(manager, [*shared, *text(2, 16)], turn("a"))
    # 20 blocks are used; three texts need four more than are free.
    for index in range(3, 6):
        serve(manager, text(index))
    assert 32 == found(manager, 9)
    assert (16, 32) == (manager.find([*shared, *text(1, 16), 7]), manager.find([*shared, *text(2, 16), 7]))


def test_the_last_request_of_a_session_ends_what_the_earlier_ones_kept() -> None:
    hits = []
    for session_id in ("", "a"):
        manager = pool(Clock(), share=1.0)
        serve(manager, text(0), turn(session_id))
        serve(manager, [*text(0), *text(1, 4)], turn(session_id, keep_seconds=0))
        for index in range(2, 7):
            serve(manager, text(index))
        hits.append([found(manager, index) for index in (0, 2)])
    assert [[32, 0], [0, 32]] == hits


def test_sessions_leave_what_others_use() -> None:
    manager, shared = pool(Clock(), share=1.0), text(0, 16)
    serve(manager, [*shared, *text(1, 16)], turn("a"), "owner")
    serve(manager, [*shared, *text(2, 16)], turn("b"), "owner")
    # The session of another owner has the same id.
    serve(manager, text(3), turn("a", keep_seconds=0), "other")
    serve(manager, text(4), turn("a"), "owner")
    hinted = manager._pool._policy.hinted  # type: ignore[union-attr]
    assert hinted is not None
    page_bytes = manager.plan.groups[0].page_bytes
    # The shared blocks and those of "b", and the last text of "a".
    assert (16 * page_bytes, 0) == (hinted.kept_bytes("owner"), hinted.kept_bytes("other"))
    for index in range(5, 8):
        serve(manager, text(index))
    assert [16, 32] == [manager.find([*shared, *text(index, 16), 7]) for index in (1, 2)]
    assert [0, 32] == [found(manager, index) for index in (3, 4)]


def test_a_million_sessions_take_no_memory_but_that_of_pages() -> None:
    manager = pool(Clock())
    serve(manager, text(0), turn("x" * 1024))
    hinted = manager._pool._policy.hinted  # type: ignore[union-attr]
    assert hinted is not None
    for index in range(300):
        serve(manager, text(index), turn(f"{index}"), "hostile")
    owned = [each for each in vars(hinted).values() if isinstance(each, dict)]
    assert all(len(each) <= 2 for each in owned)
    assert hinted._session is not None
    assert len(hinted._session) == len(hinted._until)
