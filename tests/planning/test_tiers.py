"""What tiers hold: prefixes, counted by the blocks that are live at their ends, to the byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframe import Setup, Stack, load_plugins
from kvframe.contract.errors import StackError
from kvframe.contract.specs import KVCacheSpec, LayerSpec
from kvframe.planning.groups import group_layers
from kvframe.planning.plan import KVCachePlan, plan_cache
from kvframe.planning.tiers import host_capacity, prefix_blocks, store_capacity
from tests.cache.plans import encoder, full, ranged, state
from tests.models.serving import GREEDY, TinyModel, ids
from tests.support.plugins import plugin
from tests.support.stores import SHELVES, Shelf, ShelfStore, shelf_plugin

PAGE = 128
"""Bytes of a page of ``full()`` and ``ranged()``: keys and values of 4 tokens."""
RECORD = PAGE + 32
"""Bytes of a page with its seal, as a page store keeps it."""


def plan_of(*specs: KVCacheSpec, longest: int = 65) -> KVCachePlan:
    """Return the plan of a layer for each spec; a request of the greatest length has a prefix of 64 tokens."""
    layers = [LayerSpec(name=str(index), spec=spec) for index, spec in enumerate(specs)]
    return plan_cache(
        group_layers(layers),
        memory_bytes=2**20,
        max_model_len=longest,
        max_num_batched_tokens=16,
        max_input_lens={"encoder": 10},
    )


def held(plan: KVCachePlan, num_bytes: int) -> tuple[int | None, int | None]:
    tier = store_capacity(plan, "disk", num_bytes)
    assert ("disk", num_bytes) == (tier.name, tier.num_bytes)
    return tier.num_requests, tier.num_tokens


def test_a_prefix_of_full_attention_takes_every_block() -> None:
    # 16 blocks for each of three, and five more.
    assert (3, 3 * 64 + 20) == held(plan_of(full()), (3 * 16 + 5) * RECORD)
    assert (2, 2 * 64 + 60) == held(plan_of(full()), 3 * 16 * RECORD - 1)


def test_a_prefix_shorter_than_the_longest_is_counted_in_tokens() -> None:
    assert (0, 12) == held(plan_of(full()), 4 * RECORD - 1)
    assert (0, 0) == held(plan_of(full()), RECORD - 1)


def test_of_a_window_its_end_is_counted() -> None:
    # After 64 tokens, tokens 57 to 63 are live, in two blocks.
    plan = plan_of(full(), ranged(window=8))
    assert (16, 2) == prefix_blocks(plan, 64)
    assert (5, 5 * 64) == held(plan, 5 * 18 * RECORD)
    # 9 tokens more need a block of full attention and one of the window each, until the window is full.
    assert (5, 5 * 64 + 4) == held(plan, (5 * 18 + 2) * RECORD)


def test_of_a_recurrent_layer_one_state_is_counted() -> None:
    plan = plan_of(state())
    (group,) = plan.groups
    assert (1,) == prefix_blocks(plan, 64)
    assert (7, 7 * 64) == held(plan, 8 * (group.page_bytes + 32) - 1)


def test_an_input_is_counted_at_its_greatest_length() -> None:
    assert (16, 3) == prefix_blocks(plan_of(full(), encoder()), 64)


def test_there_is_no_limit_to_prefixes_that_take_no_block() -> None:
    # A chunk of 16 tokens ends where the prefix ends.
    assert (None, None) == held(plan_of(ranged(chunk=16)), 10 * RECORD)


def test_host_memory_is_counted_in_slabs() -> None:
    plan = plan_of(full(), ranged(window=8))
    (pages,) = {group.pages_per_slab for group in plan.groups}
    of_full, of_window = -(-2 * 16 // pages), -(-2 * 2 // pages)
    tier = host_capacity(plan, of_full + of_window)
    assert ("host_memory", (of_full + of_window) * plan.slab_bytes) == (tier.name, tier.num_bytes)
    assert tier.num_requests is not None
    assert tier.num_requests >= 2
    assert host_capacity(plan, of_full + of_window - 1).num_requests == 1


def test_a_store_that_knows_no_capacity_has_no_numbers() -> None:
    tier = store_capacity(plan_of(full()), "shelf", None)
    assert (None, None, None) == (tier.num_bytes, tier.num_requests, tier.num_tokens)


@given(num_bytes=st.integers(0, 2**15), window=st.integers(1, 40), longest=st.integers(6, 80))
def test_one_more_prefix_would_not_fit(num_bytes: int, window: int, longest: int) -> None:
    plan = plan_of(full(), ranged(window=window), longest=longest)
    num_requests, num_tokens = held(plan, num_bytes)
    assert num_requests is not None
    assert num_tokens is not None
    prefix = (longest - 1) // 4 * 4
    of_longest, of_more = (
        sum(prefix_blocks(plan, length)) * RECORD for length in (prefix, num_tokens - num_requests * prefix)
    )
    assert num_requests * of_longest + of_more <= num_bytes < (num_requests + 1) * of_longest
    longer = num_tokens - num_requests * prefix + 4
    if longer < prefix:
        assert num_requests * of_longest + sum(prefix_blocks(plan, longer)) * RECORD > num_bytes


# --- by a stack -------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class BoundedStore(ShelfStore):
    name: ClassVar[str] = "bounded"
    size: Any = 3 * 16 * RECORD

    @property
    def capacity(self) -> Any:
        return self.size


@pytest.fixture
def set_up(tmp_path: Path) -> Callable[..., Setup]:
    registry = load_plugins(
        plugins=[plugin("stores", page_stores={"shelf": ShelfStore, "bounded": BoundedStore})]
    ).registry
    layer = {"name": "a", "kind": "full_attention", "num_kv_heads": 1, "head_size": 4}
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"max_model_len": 65, "layers": [layer]}), encoding="utf-8")

    def set_up(**cache: Any) -> Setup:
        stack = Stack.from_mapping({"cache": {"memory": "1MiB", "block_size": 4, **cache}})
        return Setup.read(path, stack, registry, runs_here=False)

    return set_up


def test_tiers_are_in_the_order_in_which_they_are_asked(set_up: Callable[..., Setup]) -> None:
    setup = set_up(host_memory="128KiB", stores=["bounded", "shelf"])
    assert [("host_memory", 64), ("bounded", 3), ("shelf", None)] == [
        (tier.name, tier.num_requests) for tier in setup.tiers()
    ]
    assert [] == set_up().tiers()


def test_without_prefix_caching_tiers_hold_nothing(set_up: Callable[..., Setup]) -> None:
    assert [] == set_up(host_memory="128KiB", stores=["bounded"], prefix_caching=False).tiers()
    # A request is not longer than a block, so no later one continues from it.
    assert [] == set_up(host_memory="128KiB", stores=["bounded"], block_size=128).tiers()


@pytest.mark.parametrize("size", [-1, 1.5, "1GiB", True])
def test_a_wrong_capacity_is_one_sentence(set_up: Callable[..., Setup], size: Any) -> None:
    with pytest.raises(StackError, match=r"^page store 'bounded': capacity must be a number of bytes or None, not "):
        set_up(stores=[{"name": "bounded", "size": size}]).tiers()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mamba2", "qwen3_next", "deepseek_v3"])
def test_these_blocks_are_what_an_engine_brings_back(family: str, tmp_path: Path) -> None:
    SHELVES.clear()
    SHELVES["one"] = Shelf()
    model = TinyModel.save(tmp_path / family, family)
    model = attrs.evolve(model, registry=load_plugins(plugins=[shelf_plugin()]).registry)
    prompt = ids(3, 61)
    for _ in range(2):
        with model.engine(block_size=4, max_model_len=80, stores=["shelf"]) as engine:
            (output,) = engine.generate([prompt], GREEDY)
            assert engine.flush_page_stores()
            stats, plan = engine.stats(), engine.plan
    assert output.cached is not None
    assert 0 < output.cached.num_tokens
    assert sum(prefix_blocks(plan, output.cached.num_tokens)) == stats.restored_blocks["shelf"]
