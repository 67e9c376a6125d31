"""The manager for vLLM, type by type, against the definition: what a spec says is live, and nothing else, is kept."""

from __future__ import annotations

import importlib.util
import random
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from kvframe import FullAttentionSpec, load_plugins
from kvframe.contract import AttentionSpec, BackendError, KVCacheSpec, TokenRange

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make vllm"),
    pytest.mark.filterwarnings("ignore"),
]

SIZES = {"block_size": 4, "num_kv_heads": 1, "head_size": 8}
SPECS = {
    "full": (None, {}),
    "window": ("sliding_window", {"window": 10}),
    "sinks": ("sliding_window", {"window": 10, "num_sink_tokens": 6}),
    "chunks": ("chunked_local", {"chunk": 12}),
}


@attrs.frozen(kw_only=True)
class FadingSpec(AttentionSpec):
    """Every eighth token until a token number, and the last five: ranges die in the middle, and before others."""

    kind = "fading"

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        old = [(start, start + 1) for start in range(0, max(0, n - 5), 8) if n < 40 or start % 16]
        return (*old, *([(max(0, n - 5), n)] if n else []))


def spec_of(name: str) -> KVCacheSpec:
    if name == "fading":
        return FadingSpec(**SIZES)
    kind, options = SPECS[name]
    spec_class: Any = FullAttentionSpec if kind is None else load_plugins().registry.specs.load(kind)
    spec: KVCacheSpec = spec_class(**SIZES, **options)
    return spec


def hosted(spec: KVCacheSpec, max_model_len: int = 96, in_flight: int = 7) -> Any:
    import torch
    from kvframe_vllm.adapter.cache import HostedSpec

    reported = SimpleNamespace(**SIZES, head_size_v=8, dtype=torch.float32, page_size_padded=None)
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=max_model_len), max_in_flight_tokens=in_flight)
    return HostedSpec.over(reported, spec, config)


def make_manager(spec: KVCacheSpec) -> Any:
    from kvframe_vllm.adapter.cache import LiveBlockManager
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(64, enable_caching=True, hash_block_size=4)
    return LiveBlockManager(
        hosted(spec), block_pool=pool, enable_caching=True, kv_cache_group_id=0, scheduler_block_size=4
    )


def admitted_blocks(manager: Any) -> int:
    """Return the most blocks of a request by which vLLM admits it; before vLLM 0.31 the name is a private one."""
    name = "max_admission_blocks_per_request"
    number: int = getattr(manager, name, None) or getattr(manager, f"_{name}")
    return number


@pytest.mark.parametrize("name", [*SPECS, "fading"])
def test_a_request_holds_its_live_blocks_and_those_it_computes(name: str) -> None:
    spec = spec_of(name)
    for seed in range(20):
        draw = random.Random(seed)
        manager, num_computed, max_held = make_manager(spec), 0, 0
        num_free = manager.block_pool.get_num_free_blocks()
        while num_computed < 96:
            new = draw.randint(1, min(7, 96 - num_computed))
            manager.remove_skipped_blocks("r", num_computed)
            manager.allocate_new_blocks("r", num_computed + new, num_computed + new)
            row = manager.req_to_blocks["r"]
            held_blocks = {index for index, block in enumerate(row) if not block.is_null}
            live = {index for span in spec.live_blocks(num_computed) for index in range(*span)}
            assert live | set(range(num_computed // 4, -(-(num_computed + new) // 4))) == held_blocks
            assert num_free - len(held_blocks) == manager.block_pool.get_num_free_blocks()
            max_held = max(max_held, len(held_blocks))
            num_computed += new
        assert max_held <= admitted_blocks(manager) == spec.peak_blocks(96, 7)
        manager.free("r")
        assert num_free == manager.block_pool.get_num_free_blocks()


@pytest.mark.parametrize("name", [*SPECS, "fading"])
@pytest.mark.parametrize("alignment", [4, 8])
def test_a_hit_is_the_longest_prefix_whose_live_blocks_are_cached(name: str, alignment: int) -> None:
    from kvframe_vllm.adapter.cache import LiveBlockManager

    spec = spec_of(name)
    for seed in range(200):
        draw = random.Random(seed)
        cached = {block for block in range(24) if draw.random() < 0.8}
        pool = SimpleNamespace(
            hash_block_size=4,
            null_block=None,
            get_cached_block=lambda block, groups, cached=cached: (
                [(block, group) for group in groups] if block in cached else None
            ),
        )
        limit = draw.randint(0, 96)
        rows, length = LiveBlockManager.find_longest_cache_hit(
            list(range(24)), limit, [0, 1], pool, hosted(spec), False, alignment
        )
        lives = {
            n: {block for span in spec.live_blocks(n) for block in range(*span)} for n in range(0, limit + 1, alignment)
        }
        longest = max(n for n, live in lives.items() if live <= cached)
        assert longest == length
        for group, row in enumerate(rows):
            assert [(block, group) if block in lives[longest] else None for block in range(longest // 4)] == row


def test_a_type_that_keeps_no_block_before_a_chunk_hits_at_its_start_without_any() -> None:
    from kvframe_vllm.adapter.cache import LiveBlockManager

    pool = SimpleNamespace(hash_block_size=4, null_block=None, get_cached_block=lambda block, groups: None)
    rows, length = LiveBlockManager.find_longest_cache_hit(
        list(range(24)), 40, [0], pool, hosted(spec_of("chunks")), False, 4
    )
    assert (36, [None] * 9) == (length, rows[0])


@pytest.mark.parametrize("name", [*SPECS, "fading"])
@pytest.mark.parametrize(("num_local", "num_tokens"), [(0, 64), (24, 64), (60, 64)])
def test_of_tokens_that_a_connector_loads_only_live_blocks_are_held(name: str, num_local: int, num_tokens: int) -> None:
    """vLLM makes every block findable that is not null, whether it was loaded or not."""
    spec = spec_of(name)
    manager = make_manager(spec)
    num_free = manager.block_pool.get_num_free_blocks()
    # What vLLM has by itself: the blocks that are live at its own hit.
    lives = {block for span in spec.live_blocks(num_local) for block in range(*span)}
    local = [manager.block_pool.get_new_blocks(1)[0] if block in lives else None for block in range(num_local // 4)]
    row = [manager.block_pool.null_block if block is None else block for block in local]
    manager.block_pool.free_blocks([block for block in local if block is not None])

    manager.add_local_computed_blocks("r", row, num_local, num_tokens - num_local)
    manager.allocate_external_computed_blocks("r", num_local, num_tokens - num_local)
    live = {block for span in spec.live_blocks(num_tokens) for block in range(*span)}
    loaded_row = manager.req_to_blocks["r"]
    assert num_tokens // 4 == len(loaded_row)
    assert {block for block in live if block >= num_local // 4} == {
        index for index in range(num_local // 4, num_tokens // 4) if not loaded_row[index].is_null
    }
    manager.free("r")
    assert num_free == manager.block_pool.get_num_free_blocks()


def test_drafting_heads_are_refused() -> None:
    from kvframe_vllm.adapter.cache import LiveBlockManager

    with pytest.raises(BackendError, match="EAGLE or MTP"):
        LiveBlockManager.find_longest_cache_hit([], 0, [0], None, hosted(spec_of("full")), True, 4)


def test_the_inner_spec_follows_every_change_of_the_block_size() -> None:
    import dataclasses

    outer = hosted(spec_of("sinks"))
    assert 4 == outer.inner.block_size
    assert 8 == outer.copy_with_new_block_size(8).inner.block_size
    assert 16 == dataclasses.replace(outer, block_size=16).inner.block_size
    assert outer == outer.copy_with_new_block_size(8).copy_with_new_block_size(4)


def test_layers_share_a_block_table_if_they_differ_in_layout_only() -> None:
    wide = attrs.evolve(spec_of("window"), head_size=16)
    first = hosted(spec_of("window"))
    assert first.is_uniform_with_collection({"a": first, "b": hosted(wide)})
    assert not first.is_uniform_with_collection({"a": first, "b": hosted(spec_of("sinks"))})
    assert not first.is_uniform_with_collection({"a": first, "b": hosted(spec_of("full"))})
