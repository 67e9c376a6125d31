"""Plans of ranks with shares of a model's layers: each rank has its own memory, and all make equal decisions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframe.cache.manager import KVCacheManager
from kvframe.contract.errors import PlanError, SpecError
from kvframe.contract.specs import KVCacheSpec, LayerSpec
from kvframe.planning.groups import group_layers
from kvframe.planning.plan import KVCachePlan, plan_cache
from kvframe.planning.ranks import plan_ranks
from tests.cache.plans import full, ranged, state


def layer(name: str, spec: KVCacheSpec | None, shares_with: str | None = None) -> LayerSpec:
    return LayerSpec(name=name, spec=spec, shares_with=shares_with)


def plan(*ranks: list[LayerSpec], memory: tuple[int, ...] = (), **options: Any) -> tuple[KVCachePlan, ...]:
    return plan_ranks(
        ranks,
        memory_bytes=memory or (2**16,) * len(ranks),
        max_model_len=64,
        max_num_batched_tokens=16,
        **options,
    )


def heads(count: int, window: int = 6) -> list[LayerSpec]:
    """Return a rank's shares of two layers: so many heads of each."""
    return [layer("0", full(num_kv_heads=count)), layer("1", ranged(window=window, num_kv_heads=count))]


@given(
    requests=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20), st.booleans()), min_size=1, max_size=12),
    memory=st.integers(2**12, 2**14),
)
def test_managers_with_equal_calls_make_equal_decisions(requests: list[tuple[int, int, bool]], memory: int) -> None:
    ranks = [[*heads(count), layer("2", state())] for count in (1, 3)]
    plans = plan(*ranks, memory=(memory, 3 * memory))
    managers = [KVCacheManager(each, max_num_seqs=len(requests)) for each in plans]
    for name, (shared, rest, is_freed) in enumerate(requests):
        tokens = [*range(shared), *range(100 * name, 100 * name + rest)]
        (done,) = {manager.start(str(name), tokens) for manager in managers}
        for end in range(done + 10, len(tokens) + 10, 10):
            (is_there,) = {manager.extend(str(name), min(end, len(tokens))) for manager in managers}
            if not is_there:
                break
            for manager in managers:
                manager.commit(str(name), tokens, min(end, len(tokens)))
        resident = [
            [[block_id != 0 for block_id in ids] for ids in manager.block_ids(str(name))] for manager in managers
        ]
        assert resident[0] == resident[1]
        if is_freed or not is_there:
            for manager in managers:
                manager.free(str(name))
    assert 1 == len({str(manager.stats.lookups) for manager in managers})
    assert 1 == len({manager.stats.num_evictions for manager in managers})


@pytest.mark.parametrize("memory", [2**12, 2**13, 2**14, 2**16])
def test_ranks_with_equal_shares_are_planned_as_one_of_them_alone(memory: int) -> None:
    found = plan(heads(2), heads(2), heads(2), memory=(memory,) * 3)[0]
    alone = plan_cache(group_layers(heads(2)), memory_bytes=memory, max_model_len=64, max_num_batched_tokens=16)
    assert [g.pages_per_slab for g in alone.groups] == [g.pages_per_slab for g in found.groups]
    assert alone.num_slabs == found.num_slabs


def test_ranks_with_more_heads_have_larger_pages_of_the_same_slots() -> None:
    first, second = plan(heads(2), heads(1))
    assert [2 * group.page_bytes for group in second.groups] == [group.page_bytes for group in first.groups]
    assert [g.pages_per_slab for g in first.groups] == [g.pages_per_slab for g in second.groups]
    assert first.num_slabs == second.num_slabs
    assert max(first.total_bytes, second.total_bytes) <= 2**16


def test_the_rank_with_the_least_memory_decides() -> None:
    roomy = plan(heads(1), heads(1))
    tight = plan(heads(1), heads(1), memory=(2**16, 2**15))
    assert tight[0].num_slabs == tight[1].num_slabs < roomy[0].num_slabs
    assert all(each.total_bytes <= 2**15 for each in tight)
    with pytest.raises(PlanError, match=r"give at least"):
        plan(heads(1), heads(1), memory=(2**16, 100))


def test_ranks_may_keep_no_state() -> None:
    found = plan([layer("0", None)], [layer("0", None)])
    assert [((), 0, 0)] * 2 == [(each.groups, each.num_slabs, each.total_bytes) for each in found]


def test_conflicting_shares_are_one_error_with_the_layer_and_its_ranks() -> None:
    other = heads(1, window=8)
    with pytest.raises(
        SpecError, match=r"'1' .*ranks 0, 2: RangeSpec.*window=6.*; rank 1: RangeSpec.*window=8"
    ) as found:
        plan(heads(1), other, heads(1))
    assert "its specs may differ in their layout only, such as in their heads" in str(found.value)
    with pytest.raises(SpecError, match=r"'0' .*rank 0: FullAttention.*; rank 1: keeps nothing"):
        plan([layer("0", full())], [layer("0", None)])
    shared = [layer("0", full()), layer("1", full(), "0")]
    with pytest.raises(SpecError, match=r"'1' .*rank 0: .*, with the cache of '0'; rank 1: "):
        plan(shared, [layer("0", full()), layer("1", full())])


def test_each_rank_has_a_share_of_every_layer() -> None:
    with pytest.raises(SpecError, match="the ranks have different layers"):
        plan(heads(1), heads(1)[:1])
    with pytest.raises(SpecError, match="two layers are named '0'"):
        plan(*([layer("0", full()), layer("0", full())] for _ in range(2)))
