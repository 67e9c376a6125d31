"""Rollback states: they have separate pages, which only running requests have, and which are never cached."""

from __future__ import annotations

from itertools import product
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from kvframe_mamba import MambaSpec
from kvframe_testing.audit import audit_each_verb, count_cached, findable_pages
from kvframe_testing.laws import ConformanceError, check_spec

from kvframe.attention.storage import KVCacheStorage
from kvframe.cache.manager import KVCacheManager
from kvframe.contract.errors import SpecError
from kvframe.contract.specs import LayerSpec
from kvframe.planning.groups import KVCacheGroup, group_layers
from kvframe.planning.plan import KVCachePlan, plan_cache
from kvframe.planning.rollback import RollbackSpec
from tests.cache.plans import StateSpec, full, make_plan, rollback
from tests.covering import few
from tests.support.engines import pool_of

CPU = torch.device("cpu")
Blocks = tuple[tuple[int, int], ...]


def mamba(num_draft_tokens: int = 3, block_size: int = 8, size: int = 16, **options: Any) -> MambaSpec:
    shapes = {"conv_shapes": [[size]], "recurrent_shapes": [[3, size]]}
    return MambaSpec(block_size=block_size, num_draft_tokens=num_draft_tokens, **shapes, **options)


def layer(name: str, spec: Any, shares_with: str | None = None) -> LayerSpec:
    return LayerSpec(name=name, spec=spec, shares_with=shares_with)


def plan_of(*layers: LayerSpec, memory_bytes: int = 1 << 20, **options: int) -> KVCachePlan:
    options = {"max_model_len": 256, "max_num_batched_tokens": 64, **options}
    return plan_cache(group_layers(layers), memory_bytes=memory_bytes, **options)


# --- the type ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "expected"), [(0, ()), (1, ((0, 1),)), (7, ((6, 7),)), (8, ()), (9, ((8, 9),))])
def test_rollback_states_are_live_until_their_blocks_end(n: int, expected: Blocks) -> None:
    assert expected == rollback(8, 3).live_ranges(n)


@pytest.mark.parametrize(
    ("n", "num_new_tokens", "expected"),
    [
        (0, 1, ((0, 1),)),
        (5, 1, ((0, 1),)),
        (7, 1, ()),  # the block's last token: its state is a checkpoint
        (7, 2, ((1, 2),)),
        (6, 2, ((0, 1),)),  # if the second one is rejected, the state after the first one is needed
        (6, 4, ((0, 2),)),
        (6, 5, ((1, 2),)),  # more tokens than there are states: those before the last one are not kept
        (0, 16, ()),
        (3, 30, ((4, 5),)),
    ],
)
def test_a_short_step_stores_a_page_for_each_state_that_it_may_go_back_to(
    n: int, num_new_tokens: int, expected: Blocks
) -> None:
    assert expected == rollback(8, 3).stored_blocks(n, num_new_tokens)


@pytest.mark.parametrize(("block_size", "num_states"), few(12, product((1, 2, 3, 4, 7, 16), (1, 2, 3, 5, 9))))
def test_the_laws_hold(block_size: int, num_states: int) -> None:
    check_spec(rollback(block_size, num_states))


def test_a_request_holds_one_page_and_two_while_a_step_ends_a_block() -> None:
    spec = rollback(16, 3)
    assert 1 == spec.num_resident_blocks(5, 4)
    assert 2 == spec.num_resident_blocks(14, 4)
    assert 2 == spec.peak_blocks(1_000_000, 2048)
    assert 1 == spec.peak_blocks(16, 2048)
    assert 0 == rollback(1, 3).peak_blocks(1_000_000, 2048)


# --- groups and bytes -------------------------------------------------------------------------------------------------


def test_the_group_comes_after_that_of_its_layers() -> None:
    layers = [layer("a", mamba()), layer("b", full()), layer("c", mamba(size=24)), layer("d", mamba(), "a")]
    grouping = group_layers(layers)
    states, others, keys = grouping.groups
    assert (("a", "c"), ("a", "c"), ("b",)) == (states.layers, others.layers, keys.layers)
    assert [0, 1, 2] == [group.index for group in grouping.groups]
    assert (mamba(), rollback(8, 3)) == (states.spec, others.spec)
    assert {"a": (0, 1), "b": (2,), "c": (0, 1), "d": (0, 1)} == {
        name: tuple(group.index for group in grouping.groups_of(name)) for name in "abcd"
    }
    assert [0, 2, 0, 0] == [grouping.group_of(name).index for name in "abcd"]


@pytest.mark.parametrize("checkpoints", ["aligned", "all"])
def test_a_checkpoint_takes_the_bytes_of_one_state(checkpoints: str) -> None:
    layers = (layer("a", mamba(0, checkpoints=checkpoints)), layer("b", mamba(0, size=5, checkpoints=checkpoints)))
    drafting = tuple(attrs.evolve(each, spec=attrs.evolve(each.spec, num_draft_tokens=3)) for each in layers)
    (plain,), (states, others) = plan_of(*layers).groups, plan_of(*drafting).groups
    assert plain.page_bytes == states.page_bytes == (64 + 192) + (32 + 64)
    assert 3 * plain.page_bytes == others.page_bytes
    assert plain.layer_offsets == states.layer_offsets == others.layer_offsets
    assert plain.peak_blocks == states.peak_blocks


def test_the_most_states_of_a_request_are_10_and_not_16() -> None:
    # The one it continues from, two at a step's end and one at its branch; two pages of three while a block ends.
    plan = plan_of(layer("a", mamba()), max_model_len=100_000, max_num_batched_tokens=2048)
    assert [4, 2] == [group.peak_blocks for group in plan.groups]
    assert plan.bytes_per_request == (4 + 2 * 3) * plan.groups[0].page_bytes


def test_without_checkpoints_or_drafts_there_is_no_such_group() -> None:
    assert 1 == len(plan_of(layer("a", mamba(0))).groups)
    (group,) = plan_of(layer("a", mamba(checkpoints="none"))).groups
    assert 4 * plan_of(layer("a", mamba(0))).groups[0].page_bytes == group.page_bytes


@attrs.frozen(kw_only=True)
class OwnState(StateSpec):
    """A state that says how many rollback states it has, and how many states a page."""

    said: Any = 2
    in_a_page: Any = 1
    layout_fields = frozenset({"said"})

    @property
    def num_rollback_states(self) -> Any:
        return self.said

    @property
    def states_per_block(self) -> Any:
        return self.in_a_page


@pytest.mark.parametrize("said", [-1, None, 2.0, True, 10**9])
def test_a_wrong_number_of_rollback_states_is_refused(said: Any) -> None:
    with pytest.raises(SpecError, match=r"^the cache spec 'state': num_rollback_states is "):
        group_layers([layer("a", OwnState(block_size=4, said=said))])


def test_a_page_of_several_states_has_no_rollback_states_beside_it() -> None:
    spec = OwnState(block_size=4, in_a_page=2)
    with pytest.raises(
        SpecError, match=r"^the cache spec 'state': states_per_block is 2; expected an int .* at most 1"
    ):
        group_layers([layer("a", spec)])
    with pytest.raises(ConformanceError, match="it has num_rollback_states, and several states_per_block"):
        check_spec(spec)


@attrs.frozen(kw_only=True)
class LiveForLonger(OwnState):
    """A type that needs two tokens."""

    def live_ranges(self, n: int) -> Blocks:
        return ((max(0, n - 2), n),) if n else ()


def test_rollback_states_are_of_types_that_need_the_last_token() -> None:
    with pytest.raises(ConformanceError, match=r"is for the last token's state, and live at 2 is \(\(0, 2\),\)"):
        check_spec(LiveForLonger(block_size=4))


def test_layers_with_other_rollback_states_are_of_another_group() -> None:
    layers = [layer(name, OwnState(block_size=4, said=said)) for name, said in (("a", 2), ("b", 0), ("c", 1), ("d", 2))]
    groups: tuple[KVCacheGroup, ...] = group_layers(layers).groups
    assert [("a", "d"), ("a", "d"), ("b",), ("c",), ("c",)] == [group.layers for group in groups]
    assert [2, 1] == [group.spec.num_states for group in groups if isinstance(group.spec, RollbackSpec)]


# --- in the pool ------------------------------------------------------------------------------------------------------


def test_every_part_of_a_page_is_a_state_of_every_layer() -> None:
    layers = (layer("a", mamba()), layer("b", mamba(size=24)))
    grouping, plan = group_layers(layers), plan_of(*layers)
    storage = KVCacheStorage(plan, grouping, CPU)
    states, others = plan.groups
    step = states.page_bytes // plan.block_id_bytes
    page = plan.null_bytes // plan.block_id_bytes
    num_ids = (plan.total_bytes - states.page_bytes) // plan.block_id_bytes + 1
    assert (num_ids, 1, 16) == storage.views["a"]["conv_0"].shape
    storage.fill(1, [page], 1.0)
    for views in storage.views.values():
        for tensor in views.values():
            assert [0, 1, 1, 1, 0] == [tensor[page + part * step].mean() for part in (-1, 0, 1, 2, 3)]
    first = plan.null_bytes
    assert not storage.pool[:first].any()
    assert not storage.pool[first + others.page_bytes :].any()


def test_the_last_page_of_a_pool_that_grew_is_within_it() -> None:
    layers = (layer("a", mamba()),)
    grouping, plan = group_layers(layers), plan_of(*layers, memory_bytes=50_000)
    storage = KVCacheStorage(plan, grouping, CPU)
    grown = plan.resized(80_000)
    storage.move(grown, storage.reserve(grown))
    last = (grown.total_bytes - plan.groups[1].page_bytes) // plan.block_id_bytes
    storage.fill(1, [last], 1.0)
    step = plan.groups[0].page_bytes // plan.block_id_bytes
    view = storage.views["a"]["recurrent_0"]
    assert last + 2 * step == len(view) - 1
    assert [1, 1, 1] == [view[last + part * step].mean() for part in range(3)]


# --- in the cache -----------------------------------------------------------------------------------------------------


def make_manager(*specs: Any, num_slabs: int = 60) -> KVCacheManager:
    copied: list[Any] = []
    manager = KVCacheManager(
        make_plan(*specs, num_slabs=num_slabs),
        max_num_seqs=4,
        copier=lambda group, pages, others: copied.extend((group, page) for page in pages),
    )
    audit_each_verb(manager)
    manager.copied = copied  # type: ignore[attr-defined]
    return manager


def resident(manager: KVCacheManager, name: str) -> list[list[int]]:
    return [[index for index, page in enumerate(ids) if page] for ids in manager.block_ids(name)]


def compute(manager: KVCacheManager, name: str, tokens: list[int], *steps: tuple[int, int]) -> None:
    """Extend and commit; the second number of a step is less if drafts are rejected."""
    for extended, committed in steps:
        assert manager.extend(name, extended)
        manager.commit(name, tokens, committed)


def test_a_running_request_has_both_pages_of_its_block_and_a_full_block_one() -> None:
    manager, tokens = make_manager(mamba(2, block_size=4), full()), list(range(40))
    manager.start("a", tokens)
    compute(manager, "a", tokens, (10, 10))
    assert [[2], [2], [0, 1, 2]] == resident(manager, "a")
    compute(manager, "a", tokens, (13, 11))
    assert [[2], [2], [0, 1, 2, 3]] == resident(manager, "a")
    assert manager.extend("a", 14)
    assert [[2, 3], [2, 3], [0, 1, 2, 3]] == resident(manager, "a")
    manager.commit("a", tokens, 12)
    assert [[2], [], [0, 1, 2, 3]] == resident(manager, "a")


def test_no_page_of_rollback_states_is_ever_found_and_no_hit_needs_one() -> None:
    manager, tokens = make_manager(mamba(2, block_size=4, checkpoints="all"), full()), list(range(40))
    manager.start("a", tokens)
    compute(manager, "a", tokens, *((n + 3, n + 1) for n in range(23)))
    assert {0, 2} == {group for group, _ in findable_pages(manager)}
    manager.free("a")
    assert {0, 2} == {group for group, _ in findable_pages(manager)}
    assert [5, 0, 5] == [count_cached(pool_of(manager))[group] for group in range(3)]
    assert 20 == manager.start("b", tokens)
    assert [[4], [], [0, 1, 2, 3, 4]] == resident(manager, "b")
    assert (1, 0, 5) == tuple(pool_of(manager).blocks_held)
    assert [1, 0, 5] == [np.count_nonzero(pages) for pages in manager.pin(tokens).blocks]


def test_a_fork_gets_copies_of_both_pages_of_a_block_that_is_not_full() -> None:
    manager, tokens = make_manager(mamba(2, block_size=4)), list(range(40))
    manager.start("a", tokens)
    compute(manager, "a", tokens, (6, 6))
    pages = [ids[1] for ids in manager.block_ids("a")]
    assert manager.fork("a", "b", [*tokens[:6], 90, 91])
    assert [(0, pages[0]), (1, pages[1])] == manager.copied  # type: ignore[attr-defined]
    compute(manager, "b", [*tokens[:6], 90, 91], (7, 7))
    compute(manager, "a", tokens, (7, 7))
    assert pages == [ids[1] for ids in manager.block_ids("a")]


def test_decodes_within_a_block_ask_for_no_page() -> None:
    manager, tokens = make_manager(mamba(2, block_size=8)), list(range(60))
    manager.start("a", tokens)
    asked: list[int] = []
    allocate = manager._coordinator.allocator.allocate_for_row
    manager._coordinator.allocator.allocate_for_row = lambda row, n: asked.append(n) or allocate(row, n)  # type: ignore
    compute(manager, "a", tokens, *((n, n) for n in range(1, 33)))
    assert [1, 9, 17, 25] == asked
