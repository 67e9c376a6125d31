"""Plans of a model whose layers are spread over ranks: each rank has its own memory, and all make equal decisions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvframe.cache.manager import KVCacheManager
from kvframe.contract.errors import PlanError, SpecError
from kvframe.contract.specs import KVCacheSpec, LayerSpec
from kvframe.planning.groups import group_layers
from kvframe.planning.plan import plan_cache
from kvframe.planning.ranks import RankPlans, plan_ranks
from tests.cache.plans import full, ranged, state


def layer(name: str, spec: KVCacheSpec | None, shares_with: str | None = None) -> LayerSpec:
    return LayerSpec(name=name, spec=spec, shares_with=shares_with)


def plan(*ranks: list[LayerSpec], memory: tuple[int, ...] = (), **options: Any) -> RankPlans:
    return plan_ranks(
        ranks,
        memory_bytes=memory or (2**16,) * len(ranks),
        max_model_len=64,
        max_num_batched_tokens=16,
        **options,
    )


HYBRID = (
    [layer("0", full()), layer("1", ranged(window=6))],
    [layer("2", full()), layer("3", full())],
    [layer("4", None)],
)


def test_a_group_has_one_number_on_all_ranks_whether_they_have_layers_of_it_or_not() -> None:
    found = plan(*HYBRID)
    assert [[("0",), ("1",)], [("2", "3"), ()], []] == [[g.layers for g in each.groups] for each in found.groupings]
    first, second, last = found.plans
    assert [group.spec for group in first.groups] == [group.spec for group in second.groups]
    assert [g.pages_per_slab for g in first.groups] == [g.pages_per_slab for g in second.groups]
    assert first.num_slabs == second.num_slabs > 0
    assert 2 * first.groups[0].page_bytes == second.groups[0].page_bytes
    assert ((), 0, 0) == (last.groups, last.num_slabs, last.total_bytes)
    assert all(each.total_bytes <= 2**16 for each in found.plans)


def test_the_rank_with_the_least_memory_decides_for_all_stages() -> None:
    roomy, tight = plan(*HYBRID), plan(*HYBRID, memory=(2**16, 2**15, 0))
    assert roomy.plans[1].num_slabs > tight.plans[1].num_slabs
    assert {tight.plans[1].num_slabs} == {each.num_slabs for each in tight.plans[:2]}
    with pytest.raises(PlanError, match=r"rank 1: .* give at least"):
        plan(*HYBRID, memory=(2**16, 100, 0))


def test_one_rank_is_planned_as_a_model_that_is_not_spread() -> None:
    layers = [layer("0", full()), layer("1", ranged(window=6)), layer("2", state())]
    expected = plan_cache(group_layers(layers), memory_bytes=2**16, max_model_len=64, max_num_batched_tokens=16)
    assert (expected,) == plan(layers).plans


def test_a_rank_that_keeps_nothing_does_not_keep_the_others_from_caching() -> None:
    found = plan(*HYBRID)
    assert (True, False, None) == (found.prefix_caching, found.whole_prompts, found.note)
    assert not plan(*HYBRID, prefix_caching=False).prefix_caching


def test_if_no_rank_keeps_state_there_is_one_note_for_all() -> None:
    found = plan([layer("0", None)], [layer("1", None)], memory=(0, 0))
    assert [0, 0] == [each.total_bytes for each in found.plans]
    assert (False, True) == (found.prefix_caching, found.whole_prompts)
    assert (
        "no layer keeps anything of the past: each prompt is computed in one step, and no prefix is cached"
        == found.note
    )


def test_a_layer_reads_no_cache_of_another_rank() -> None:
    with pytest.raises(SpecError, match="'1' of rank 1 shares the cache of '0', which is on rank 0"):
        plan([layer("0", full())], [layer("1", full(), "0")])


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20), st.booleans()), min_size=1, max_size=12),
    memory=st.integers(2**12, 2**14),
)
def test_managers_with_equal_calls_make_equal_decisions(requests: list[tuple[int, int, bool]], memory: int) -> None:
    ranks = (
        [layer("0", full()), layer("1", full(num_kv_heads=3))],
        [layer("2", ranged(window=6)), layer("3", state())],
    )
    plans = plan(*ranks, memory=(memory, memory)).plans
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


# --- tensor-parallel groups -------------------------------------------------------------------------------------------


def heads(count: int, window: int = 6) -> list[LayerSpec]:
    """Return a rank's shares of two layers: so many heads of each."""
    return [layer("0", full(num_kv_heads=count)), layer("1", ranged(window=window, num_kv_heads=count))]


def test_layers_of_one_name_are_shares_of_one_layer_on_the_ranks_of_one_tensor_parallel_group() -> None:
    found = plan(heads(2), heads(2), tensor_parallel_size=2)
    assert [("0",), ("1",)] == [group.layers for group in found.whole.groups]
    assert found.plans[0] == found.plans[1]


@pytest.mark.parametrize("memory", [2**12, 2**13, 2**14, 2**16])
def test_ranks_with_equal_shares_are_planned_as_one_of_them_alone(memory: int) -> None:
    found = plan(heads(2), heads(2), heads(2), memory=(memory,) * 3, tensor_parallel_size=3).plans[0]
    alone = plan_cache(group_layers(heads(2)), memory_bytes=memory, max_model_len=64, max_num_batched_tokens=16)
    assert [g.pages_per_slab for g in alone.groups] == [g.pages_per_slab for g in found.groups]
    assert alone.num_slabs == found.num_slabs


def test_ranks_with_more_heads_have_larger_pages_of_the_same_slots() -> None:
    first, second = plan(heads(2), heads(1), tensor_parallel_size=2).plans
    assert [2 * group.page_bytes for group in second.groups] == [group.page_bytes for group in first.groups]
    assert [g.pages_per_slab for g in first.groups] == [g.pages_per_slab for g in second.groups]
    assert first.num_slabs == second.num_slabs
    assert max(first.total_bytes, second.total_bytes) <= 2**16


def test_the_rank_of_a_tensor_parallel_group_with_the_least_memory_decides() -> None:
    roomy = plan(heads(1), heads(1), tensor_parallel_size=2)
    tight = plan(heads(1), heads(1), memory=(2**16, 2**15), tensor_parallel_size=2)
    assert tight.plans[0].num_slabs == tight.plans[1].num_slabs < roomy.plans[0].num_slabs
    assert all(each.total_bytes <= 2**15 for each in tight.plans)


def test_stages_of_tensor_parallel_groups_follow_each_other() -> None:
    later = [layer("2", full())]
    found = plan(heads(1), heads(1), later, later, tensor_parallel_size=2)
    assert [("0", "2"), ("1",)] == [group.layers for group in found.whole.groups]
    expected = [[("0",), ("1",)]] * 2 + [[("2",), ()]] * 2
    assert expected == [[group.layers for group in each.groups] for each in found.groupings]
    assert 1 == len({each.num_slabs for each in found.plans})


def test_ranks_of_a_tensor_parallel_group_may_lack_layers_of_a_group_or_all_of_them() -> None:
    found = plan(heads(1)[:1], heads(1), [], [layer("2", None)], tensor_parallel_size=4)
    assert [[("0",), ()], [("0",), ("1",)], [], []] == [[g.layers for g in e.groups] for e in found.groupings]
    assert found.plans[0].num_slabs == found.plans[1].num_slabs > 0
    assert [0, 0] == [each.total_bytes for each in found.plans[2:]]


def test_a_layer_that_the_first_rank_lacks_keeps_its_place_in_the_order() -> None:
    first, second = [layer("0", full()), layer("3", full())], [layer(str(number), full()) for number in range(4)]
    assert ("0", "1", "2", "3") == plan(first, second, tensor_parallel_size=2).whole.groups[0].layers


def test_no_rank_of_a_tensor_parallel_group_may_keep_state() -> None:
    found = plan([layer("0", None)], [layer("0", None)], tensor_parallel_size=2)
    assert ([(), ()], True) == ([each.groups for each in found.plans], found.whole_prompts)


def test_conflicting_shares_are_one_error_with_the_layer_and_its_ranks() -> None:
    other = heads(1, window=8)
    with pytest.raises(
        SpecError, match=r"'1' .*ranks 0, 2: RangeSpec.*window=6.*; rank 1: RangeSpec.*window=8"
    ) as found:
        plan(heads(1), other, heads(1), tensor_parallel_size=3)
    assert "its specs may differ in their layout only, such as in their heads" in str(found.value)
    with pytest.raises(SpecError, match=r"'0' .*rank 0: FullAttention.*; rank 1: keeps nothing"):
        plan([layer("0", full())], [layer("0", None)], tensor_parallel_size=2)
    shared = [layer("0", full()), layer("1", full(), "0")]
    with pytest.raises(SpecError, match=r"'1' .*rank 0: .*, with the cache of '0'; rank 1: "):
        plan(shared, [layer("0", full()), layer("1", full())], tensor_parallel_size=2)


def test_equal_names_outside_of_a_tensor_parallel_group_are_two_layers() -> None:
    with pytest.raises(SpecError, match=r"two layers are named '0', on ranks 0, 1 and on ranks 2, 3; .* 2 ranks here"):
        plan(heads(1), heads(1), heads(1), heads(1), tensor_parallel_size=2)
    with pytest.raises(SpecError, match="two layers of rank 1 are named '0'"):
        plan(heads(1), [layer("0", full()), layer("0", full())], tensor_parallel_size=2)


def test_a_share_reads_the_cache_on_its_own_rank() -> None:
    shared = [layer("0", full()), layer("1", full(), "0")]
    assert {"1": "0"} == plan(shared, shared, tensor_parallel_size=2).groupings[1].follows
    with pytest.raises(SpecError, match="'1' of rank 1 shares the cache of '0', which is on rank 0"):
        plan(shared, shared[1:], tensor_parallel_size=2)


def test_ranks_that_cannot_be_divided_into_groups_are_refused() -> None:
    with pytest.raises(PlanError, match="3 ranks cannot be divided into tensor-parallel groups of 2"):
        plan(*HYBRID, tensor_parallel_size=2)
