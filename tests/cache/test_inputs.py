"""Inputs of requests in the cache: each content is stored once, completely, while a request uses it."""

from __future__ import annotations

from typing import Any

import pytest

from kvframe.cache.input_index import InputSequence, inputs_root
from kvframe.cache.manager import KVCacheManager
from kvframe.contract.errors import PlanError
from kvframe.contract.specs import ENCODER, KVCacheSpec, LayerSpec
from kvframe.planning.groups import group_layers
from kvframe.planning.plan import plan_cache
from tests.cache.plans import encoder, evict, full, make_plan, ranged
from tests.support import managers

PROMPT = list(range(10))


def input_of(num_tokens: int = 10, key: bytes = b"audio") -> dict[str, InputSequence]:
    return {ENCODER: InputSequence(num_tokens, key)}


def make_manager(*specs: KVCacheSpec, max_num_seqs: int = 8, **options: Any) -> KVCacheManager:
    return managers.make_manager(*specs, num_slabs=40, max_num_seqs=max_num_seqs, **options)


def run(manager: KVCacheManager, name: str, **options: object) -> int:
    """Start a request and compute its prompt; return the number of tokens that were hit."""
    return managers.compute(manager, name, PROMPT, **options)


def test_an_input_gets_all_of_its_blocks_with_the_first_tokens_and_keeps_them() -> None:
    manager = make_manager(full(), encoder(block_size=4))
    manager.start("a", PROMPT, inputs=input_of(10))
    assert [[], []] == manager.block_ids("a")
    assert {ENCODER} == manager.missing_inputs("a")
    assert manager.extend("a", 2)
    assert [1, 3] == [len(ids) for ids in manager.block_ids("a")]
    held = manager.block_ids("a")[1]
    assert all(held)
    assert {ENCODER} == manager.missing_inputs("a")
    manager.commit("a", PROMPT, 2)
    assert frozenset() == manager.missing_inputs("a")
    for num_tokens in (5, 10):
        assert manager.extend("a", num_tokens)
        manager.commit("a", PROMPT, num_tokens)
    assert held == manager.block_ids("a")[1]
    assert [*held, 0, 0, 0] == manager.tables[1].ids[manager.row("a")].tolist()
    manager.free("a")
    assert 0 == manager.num_held_pages


def test_a_request_without_the_input_holds_nothing_in_its_groups() -> None:
    manager = make_manager(full(), encoder())
    run(manager, "a")
    assert [] == manager.block_ids("a")[1]
    assert frozenset() == manager.missing_inputs("a")


def test_equal_inputs_are_held_once() -> None:
    manager = make_manager(encoder(), full(), max_num_seqs=10)
    run(manager, "0", inputs=input_of())
    for index in range(1, 10):
        manager.start(str(index), [50 + index], inputs=input_of())
        assert frozenset() == manager.missing_inputs(str(index))
        assert manager.extend(str(index), 1)
    assert 3 == manager.stats.blocks_held[0]
    for index in range(10):
        manager.free(str(index))
    manager.start("later", PROMPT, inputs=input_of())
    assert frozenset() == manager.missing_inputs("later")


@pytest.mark.parametrize(
    "options",
    [{"inputs": input_of(key=b"other")}, {"inputs": input_of(9)}, {"salt": "b"}, {"use_prefix": False}],
    ids=["key", "length", "salt", "not looked for"],
)
def test_another_input_is_not_shared(options: dict[str, object]) -> None:
    manager = make_manager(full(), encoder())
    run(manager, "a", inputs=input_of())
    assert 0 == manager.start("b", PROMPT, **{"inputs": input_of(), **options})  # type: ignore[arg-type]
    assert {ENCODER} == manager.missing_inputs("b")
    assert [] == manager.block_ids("b")[1]


def test_without_prefix_caching_every_request_has_its_own() -> None:
    manager = make_manager(full(), encoder(), prefix_caching=False)
    run(manager, "a", inputs=input_of())
    manager.start("b", PROMPT, inputs=input_of())
    assert {ENCODER} == manager.missing_inputs("b")


def test_tokens_share_a_prefix_only_after_equal_inputs() -> None:
    manager = make_manager(full(), encoder())
    run(manager, "a", inputs=input_of())
    assert 8 == run(manager, "b", inputs=input_of())
    assert 0 == run(manager, "c", inputs=input_of(key=b"other"))
    assert 0 == run(manager, "d")
    assert 8 == run(manager, "e", inputs=input_of(key=b"other"))


def test_every_set_of_inputs_has_prefixes_of_its_own() -> None:
    one, other = InputSequence(3, b"x"), InputSequence(3, b"y")
    sets: list[dict[str, InputSequence]] = [{}, {"a": one}, {"a": other}, {"b": one}, {"a": one, "b": one}]
    assert 5 == len({inputs_root(inputs) for inputs in sets})
    assert inputs_root({"b": other, "a": one}) == inputs_root({"a": one, "b": other})


def test_an_input_that_lost_a_block_in_one_group_is_computed_again() -> None:
    manager = make_manager(full(), encoder(4), encoder(2))
    run(manager, "a", inputs=input_of())
    lost = manager.block_ids("a")[2][1]
    manager.free("a")
    evict(manager, lost)
    assert 8 == manager.start("b", PROMPT, inputs=input_of())
    assert {ENCODER} == manager.missing_inputs("b")
    assert [[], []] == manager.block_ids("b")[1:]
    assert manager.extend("b", 9)
    assert [3, 5] == [len(ids) for ids in manager.block_ids("b")[1:]]


def test_an_input_gets_its_blocks_even_if_no_token_needs_one() -> None:
    manager = make_manager(full(), encoder())
    run(manager, "a", inputs=input_of())
    lost = manager.block_ids("a")[1][1]
    manager.free("a")
    evict(manager, lost)
    assert 8 == manager.start("b", PROMPT, inputs=input_of())
    assert manager.extend("b", 8)
    assert [2, 3] == [len(ids) for ids in manager.block_ids("b")]


def test_inputs_are_cached_where_nothing_is_kept_of_tokens() -> None:
    manager = make_manager(encoder())
    assert 0 == run(manager, "a", inputs=input_of())
    assert [True] * 3 == [block_id > 0 for block_id in manager.block_ids("a")[0]]
    assert 0 == run(manager, "b", inputs=input_of())
    assert manager.block_ids("a") == manager.block_ids("b")
    assert (0, 0) == (manager.stats.queried_tokens, manager.stats.hit_tokens)


def test_an_input_that_does_not_fit_leaves_everything_as_it_was() -> None:
    plan = make_plan(full(), encoder(), num_slabs=2, max_encoder_len=1000)
    manager = KVCacheManager(plan, max_num_seqs=1)
    manager.start("a", PROMPT, inputs=input_of(1000))
    assert not manager.extend("a", 1)
    assert [[], []] == manager.block_ids("a")
    assert {ENCODER} == manager.missing_inputs("a")


def test_a_plan_counts_the_longest_input_whatever_the_tokens() -> None:
    plan = make_plan(ranged(window=4), encoder(block_size=4), max_encoder_len=30)
    assert 8 == plan.groups[1].peak_blocks
    assert (1, 8) == plan.peak_blocks(1)
    assert (1, 2) == plan.peak_blocks(1, {ENCODER: 5})
    assert (1, 0) == plan.peak_blocks(1, {})
    assert plan.bytes_per_token == plan.groups[0].page_bytes // 4
    assert {ENCODER: 30} == plan.to_dict()["max_input_lens"]


def test_inputs_do_not_decide_where_prefixes_may_end() -> None:
    assert 6 == make_plan(full(2), ranged(3, window=4), encoder(5)).alignment
    manager = make_manager(full(2), encoder(16))
    run(manager, "a", inputs=input_of())
    assert 8 == run(manager, "b", inputs=input_of())


def test_an_input_of_unknown_length_is_refused() -> None:
    grouping = group_layers([LayerSpec(name="cross", spec=encoder())])
    with pytest.raises(PlanError, match=r"layer 'cross' .* the sequence 'encoder', .* max_encoder_len"):
        plan_cache(grouping, memory_bytes=2**20, max_model_len=8, max_num_batched_tokens=8)
