"""The policy in plain numbers, its laws, and a hot prefix during one-off prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
from kvframe_scan_resistant.policy import ScanResistant
from kvframe_testing.suites import EvictionTests

from kvframe import FullAttentionSpec, KVCacheManager, group_layers, plan_cache
from kvframe.contract import LRU, MOST_USES, EvictionPolicy, LayerSpec, ReleasedPages

POOL_PAGES, BLOCK = 256, 16


def priorities(policy: ScanResistant, uses: Sequence[int], reuse: dict[int, float], *, rest: float = 0.0) -> list[int]:
    """Return the priorities of pages at clock 1,000 in a pool of 100 bytes."""
    shares = np.array([reuse.get(kind, rest) for kind in range(MOST_USES + 1)])
    return policy.priorities(ReleasedPages(1000, np.array(uses), np.full(len(uses), 16), 100, shares)).tolist()


def test_where_new_pages_are_found_as_often_as_others_it_is_least_recently_used() -> None:
    assert [1000, 1000, 1000] == priorities(ScanResistant(), [0, 1, 99], {}, rest=0.8)


def test_before_anything_is_known_it_is_least_recently_used() -> None:
    assert [1000, 1000] == priorities(ScanResistant(), [0, 99], {}, rest=1.0)
    assert [1000, 1000] == priorities(ScanResistant(), [0, 99], {}, rest=0.0)


def test_a_kind_that_is_found_again_is_evicted_later_by_its_square_advantage() -> None:
    # Pages used once are hit twice as often as new ones: (1 - 1/2)^2 * 4 * 100.
    assert [1000, 1100] == priorities(ScanResistant(), [0, 1], {0: 0.4}, rest=0.8)
    assert [1000, 1400] == priorities(ScanResistant(), [0, 1], {0: 0.0}, rest=0.8)
    assert [1000, 1050] == priorities(ScanResistant(patience=2), [0, 1], {0: 0.4}, rest=0.8)


def test_a_page_is_worth_what_any_page_is_that_was_used_less() -> None:
    assert [1000, 1100, 1100] == priorities(ScanResistant(), [0, 1, 2], {0: 0.4, 1: 0.8, 2: 0.1})


def test_pages_used_fifteen_times_or_more_are_one_kind() -> None:
    assert [1000, 1400, 1400] == priorities(ScanResistant(), [14, 15, 16], {15: 0.9})


class TestScanResistant(EvictionTests):
    policy = "scan_resistant"


class TestScanResistantWithoutPatience(EvictionTests):
    policy = "scan_resistant"
    options: ClassVar[Mapping[str, Any]] = {"patience": 0}


class TestScanResistantWithLittlePatience(EvictionTests):
    policy = "scan_resistant"
    options: ClassVar[Mapping[str, Any]] = {"patience": 0.5}


class TestScanResistantWithMostPatience(EvictionTests):
    policy = "scan_resistant"
    options: ClassVar[Mapping[str, Any]] = {"patience": 1000}


@pytest.mark.parametrize("patience", [-1, 1001, float("nan"), True, "4"])
def test_a_patience_that_is_none_is_refused(patience: Any) -> None:
    with pytest.raises(ValueError, match="patience must be a number from 0 to 1000"):
        ScanResistant(patience=patience)


# --- in a cache -------------------------------------------------------------------------------------------------------


def make_manager(policy: EvictionPolicy) -> KVCacheManager:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8)
    plan = plan_cache(
        group_layers([LayerSpec(name="layer", spec=spec)]),
        memory_bytes=2**22,
        max_model_len=POOL_PAGES * BLOCK,
        max_num_batched_tokens=POOL_PAGES * BLOCK,
    )
    return KVCacheManager(attrs.evolve(plan, num_slabs=POOL_PAGES), max_num_seqs=1, eviction=policy)


def serve(manager: KVCacheManager, tokens: Sequence[int]) -> int:
    hit = manager.start("served", tokens)
    assert manager.extend("served", len(tokens))
    manager.commit("served", tokens, len(tokens))
    manager.free("served")
    return hit


def one_off(index: int, num_tokens: int) -> list[int]:
    return list(range(10**6 * (index + 1), 10**6 * (index + 1) + num_tokens))


@pytest.mark.parametrize(("policy", "num_hits"), [(LRU, 0), (ScanResistant(patience=0), 0), (ScanResistant(), 512)])
def test_a_scan_of_one_off_prompts_does_not_flush_a_hot_prefix(policy: EvictionPolicy, num_hits: int) -> None:
    manager, hot = make_manager(policy), list(range(512))
    for index in range(100):
        serve(manager, [*hot, *one_off(index, 64)])
    for index in range(100, 132):
        # Twice the size of the pool.
        serve(manager, one_off(index, 256))
    assert num_hits == manager.find([*hot, 1])


def test_a_prefix_that_nobody_uses_any_more_goes_in_the_end() -> None:
    manager, hot = make_manager(ScanResistant()), list(range(512))
    for index in range(100):
        serve(manager, [*hot, *one_off(index, 64)])
    for index in range(100, 200):
        serve(manager, one_off(index, 256))
    assert manager.find([*hot, 1]) == 0


def test_conversations_find_what_they_find_with_lru() -> None:
    hits = []
    for policy in (LRU, ScanResistant()):
        manager = make_manager(policy)
        texts = [one_off(index, 640) for index in range(60)]
        # Four at a time, in turn, each of them in ten turns.
        hits.append(
            sum(
                serve(manager, text[: 64 * turn])
                for start in range(0, 60, 4)
                for turn in range(1, 11)
                for text in texts[start : start + 4]
            )
        )
    assert hits[0] == hits[1] > 0
