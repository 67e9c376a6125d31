"""The torch backend's metadata: refreshed, shared and divided without a change in what layers compute."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvframe_testing.case import Request
from kvframe_testing.metadata import make_metadata
from kvframe_testing.state import GridSpec
from kvframe_torch import builder as builder_module
from kvframe_torch import tiles as tiles_module
from kvframe_torch.backend import TorchBackend
from kvframe_torch.builder import TorchMetadata, TorchMetadataBuilder
from kvframe_torch.tiles import Rules, batch_edges

from kvframe import load_plugins
from kvframe.contract.backend import AttentionBackend
from kvframe.contract.metadata import SEQ_STARTS, Axis, CommonAttentionMetadata, Extension
from kvframe.contract.specs import LayerSpec, QuerySpec, RelativeBias

TorchReferenceBackend: type[AttentionBackend] = load_plugins().registry.backends.load("torch_reference")
CPU = torch.device("cpu")
any_time = settings(deadline=None)
MASKS: tuple[Mapping[str, Any], ...] = (
    {},
    {"window": 3},
    {"window": 9, "num_sink_tokens": 2},
    {"window": 5, "num_sink_tokens": 7},
    {"causal": False},
)


def layer_of(relative_bias: RelativeBias | None = None, **options: Any) -> LayerSpec:
    spec = GridSpec(**{"block_size": 4, "num_kv_heads": 1, "head_size": 4, **options})
    query = QuerySpec(
        num_heads=max(2, spec.num_kv_heads), head_size=spec.head_size, scale=0.3, relative_bias=relative_bias
    )
    return LayerSpec(name="layer", spec=spec, query=query)


@st.composite
def rows(draw: st.DrawFn) -> list[Request]:
    """Return requests, some but not all of which have no token in the step."""
    lengths = st.tuples(st.integers(0, 40), st.integers(0, 6), st.floats(0, 1))
    sizes = draw(st.lists(lengths, max_size=6))
    first = (draw(st.integers(0, 40)), draw(st.integers(1, 6)), 0.0)
    return [Request(computed, new, num_hidden=int(hidden * computed)) for computed, new, hidden in (first, *sizes)]


@st.composite
def cross_rows(draw: st.DrawFn) -> list[Request]:
    """Return requests whose keys are of another sequence: fewer keys than queries, none, or none that is visible."""
    lengths = st.tuples(st.integers(0, 6), st.integers(0, 40), st.floats(0, 1))
    sizes = draw(st.lists(lengths, min_size=1, max_size=7))
    return [Request(0, new, num_keys=keys, num_hidden=int(hidden * keys)) for new, keys, hidden in sizes]


def metadata_of(
    requests: list[Request], seed: int = 0, *, padding: int = 0, starts: bool = True, block_size: int = 4
) -> CommonAttentionMetadata:
    """Return a step in which the blocks of all requests are drawn at random, each block for one request only."""
    metadata = make_metadata(requests, block_size)
    table = metadata.block_table
    ids = torch.from_numpy(np.random.default_rng(seed).permutation(table.numel()) + 1)
    hidden = torch.tensor([request.num_hidden for request in requests], dtype=torch.int32)
    return attrs.evolve(
        metadata,
        block_table=ids.int().view(table.shape),
        slot_mapping=torch.zeros(metadata.num_actual_tokens + padding, dtype=torch.int64),
        extensions={SEQ_STARTS: Extension(hidden, Axis.REQUEST, hidden)} if starts else {},
    )


def attend(backend_class: type[AttentionBackend], layer: LayerSpec, metadata: CommonAttentionMetadata) -> torch.Tensor:
    """Return a backend's output over a cache in which all tokens that no query sees are NaN."""
    assert isinstance(layer.spec, GridSpec)
    shape = (1 + metadata.block_table.numel(), 4, 1, 4)
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(len(metadata.slot_mapping), 2, 4, generator=generator)
    cache = {name: torch.randn(shape, generator=generator) for name in "kv"}
    live_slots = torch.zeros(shape[:2], dtype=torch.bool)
    starts = metadata.query_start_loc_cpu.tolist()
    for request, seq_len in enumerate(metadata.seq_lens_cpu.tolist()):
        hidden = int(metadata.extensions[SEQ_STARTS].values[request]) if metadata.extensions else 0
        num_new = starts[request + 1] - starts[request]
        for position in range(seq_len - num_new, seq_len):
            causal = layer.spec.causal and metadata.causal
            live = (*layer.spec.live_ranges(position), (position, position + 1)) if causal else ((0, seq_len),)
            for token in (token for start, stop in live for token in range(max(start, hidden), stop)):
                live_slots[metadata.block_table[request, token // 4], token % 4] = True
    for state in cache.values():
        state[~live_slots] = float("nan")
    backend = backend_class([layer], CPU)
    assert layer.query is not None
    if layer.query.relative_bias is not None:
        backend.bind(layer, {"relative_bias": torch.randn(4, 2, generator=generator)})
    return backend.attend(layer, query, cache, build(backend, metadata))


def build(backend: AttentionBackend, metadata: CommonAttentionMetadata) -> Any:
    """Return what the layers of a backend read."""
    return backend.make_builder().build(metadata)


def built_for(layer: LayerSpec, metadata: CommonAttentionMetadata) -> TorchMetadata:
    built = build(TorchBackend([layer], CPU), metadata)
    assert isinstance(built, TorchMetadata)
    return built


@contextlib.contextmanager
def limits(small: bool) -> Iterator[None]:
    """Divide into many batches and tiles if ``small``, and keep no mask."""
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(tiles_module, "MAX_BATCH_PAIRS", 48)
            patch.setattr(builder_module, "MAX_KEPT_PAIRS", 0)
            patch.setattr(tiles_module, "MAX_ROWS", 6)
            patch.setattr(tiles_module, "FREE_PADDING_ELEMENTS", 0)
        yield


def assert_same(expected: Any, result: Any) -> None:
    """Hold two values equal, bit for bit."""
    if attrs.has(type(expected)):
        for field in attrs.fields(type(expected)):
            assert_same(getattr(expected, field.name), getattr(result, field.name))
    elif isinstance(expected, tuple):
        assert len(expected) == len(result)
        for element, other in zip(expected, result, strict=True):
            assert_same(element, other)
    elif isinstance(expected, torch.Tensor):
        assert (expected.dtype, expected.shape) == (result.dtype, result.shape)
        assert torch.equal(expected, result)
    else:
        assert expected == result


# --- refresh and reuse ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@any_time
@given(requests=rows(), seeds=st.tuples(st.integers(0, 99), st.integers(0, 99)))
def test_a_refresh_equals_a_rebuild(mask: Mapping[str, Any], requests: list[Request], seeds: tuple[int, int]) -> None:
    first_step, other = (metadata_of(requests, seed) for seed in seeds)
    builder = TorchBackend([layer_of(**mask)], CPU).make_builder()
    built = builder.build(first_step)
    fields = builder.refreshed_fields(built, other)
    assert builder.table_fields == set(fields)
    assert_same(builder.build(other), attrs.evolve(built, **fields))


def test_a_refresh_from_a_wider_table_reads_the_same_pages() -> None:
    builder = TorchBackend([layer_of()], CPU).make_builder()
    common = metadata_of([Request(9, 1), Request(30, 2)])
    wider = attrs.evolve(common, block_table=torch.nn.functional.pad(common.block_table, (0, 3)))
    built = builder.build(common)
    assert_same(built.pages, builder.refreshed_fields(built, wider)["pages"])


@any_time
@given(requests=rows())
def test_layers_with_equal_reuse_keys_get_equal_metadata(requests: list[Request]) -> None:
    query = QuerySpec(num_heads=2, head_size=4, scale=9.0, soft_cap=1.0, has_sinks=True)
    layers = (layer_of(window=5), attrs.evolve(layer_of(window=5), query=query))
    builder, other = (TorchBackend([layer], CPU).make_builder() for layer in layers)
    assert builder.reuse_key == other.reuse_key
    common = metadata_of(requests)
    assert_same(builder.build(common), other.build(common))


@any_time
@given(
    requests=st.lists(rows(), min_size=2, max_size=4), masks=st.lists(st.sampled_from(MASKS), min_size=4, max_size=4)
)
def test_groups_that_are_built_together_get_what_each_gets_alone(
    requests: list[list[Request]], masks: list[Mapping[str, Any]]
) -> None:
    builders = [TorchBackend([layer_of(**mask)], CPU).make_builder() for mask in masks]
    steps = [
        metadata_of(rows_of_step, seed, padding=seed, block_size=2 << seed)
        for seed, rows_of_step in enumerate(requests)
    ]
    alone = [builder.build(step) for builder, step in zip(builders, steps, strict=False)]
    assert_same(tuple(alone), tuple(TorchMetadataBuilder.build_together([*zip(builders, steps, strict=False)])))


def test_groups_whose_windows_no_request_has_reached_differ_in_their_pages_alone() -> None:
    builders = [TorchBackend([layer_of(**mask)], CPU).make_builder() for mask in ({}, {"window": 10}, {"window": 9})]
    step = metadata_of([Request(9, 1), Request(4, 1)], starts=False)
    tables = [metadata_of([Request(9, 1), Request(4, 1)], seed).block_table for seed in range(3)]
    steps = [attrs.evolve(step, block_table=table) for table in tables]
    full, reached, hides = TorchMetadataBuilder.build_together([*zip(builders, steps, strict=True)])
    assert full.dead is reached.dead
    assert tables[1][0].tolist() == reached.pages[:3].tolist() != full.pages[:3].tolist() == tables[0][0].tolist()
    # The window of nine hides the first token of ten.
    assert 0 not in full.dead.tolist()
    assert 0 in hides.dead.tolist()
    assert_same(reached, builders[1].build(steps[1]))
    assert full.batches()[0].mask(torch.float32) is reached.batches()[0].mask(torch.float32)


@pytest.mark.parametrize(
    "other",
    [
        layer_of(window=6),
        layer_of(window=5, num_sink_tokens=1),
        layer_of(window=5, num_kv_heads=2),
        layer_of(RelativeBias(num_buckets=4, max_distance=9), window=5),
    ],
)
def test_what_changes_the_batches_changes_the_reuse_key(other: LayerSpec) -> None:
    keys = {TorchBackend([layer], CPU).make_builder().reuse_key for layer in (layer_of(window=5), other)}
    assert 2 == len(keys)


# --- what is hidden ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@any_time
@given(requests=rows(), starts=st.booleans(), padding=st.integers(0, 2), small=st.booleans())
def test_any_batch_equals_the_reference(
    mask: Mapping[str, Any], requests: list[Request], starts: bool, padding: int, small: bool
) -> None:
    common = metadata_of(requests, padding=padding, starts=starts)
    expected = attend(TorchReferenceBackend, layer_of(**mask), common)
    with limits(small):
        torch.testing.assert_close(attend(TorchBackend, layer_of(**mask), common), expected)


@st.composite
def chunks(draw: st.DrawFn) -> list[Request]:
    """Return requests with many tokens in the step, or one."""
    computed, new = st.sampled_from([0, 1, 15, 16, 30, 61]), st.sampled_from([1, 9, 16, 17, 32, 40, 65])
    pairs = draw(st.lists(st.tuples(computed, new, st.sampled_from([0.0, 0.0, 0.5])), min_size=1, max_size=5))
    return [Request(before, now, num_hidden=int(hidden * before)) for before, now, hidden in pairs]


@pytest.mark.parametrize(
    "mask", [*(pytest.param(mask, marks=pytest.mark.whole) for mask in MASKS[:3]), MASKS[3], {"window": 24}]
)
@given(requests=chunks(), max_rows=st.sampled_from([24, 64]))
def test_long_chunks_equal_the_reference(mask: Mapping[str, Any], requests: list[Request], max_rows: int) -> None:
    common = metadata_of(requests)
    expected = attend(TorchReferenceBackend, layer_of(**mask), common)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles_module, "MAX_ROWS", max_rows)
        torch.testing.assert_close(attend(TorchBackend, layer_of(**mask), common), expected)


@pytest.mark.parametrize("mask", MASKS)
@any_time
@given(requests=rows(), both_ways=st.booleans(), padding=st.integers(0, 2), small=st.booleans())
def test_any_batch_with_a_learned_bias_equals_the_reference(
    mask: Mapping[str, Any], requests: list[Request], both_ways: bool, padding: int, small: bool
) -> None:
    layer = layer_of(RelativeBias(num_buckets=4, max_distance=9, bidirectional=both_ways), **mask)
    common = metadata_of(requests, padding=padding)
    expected = attend(TorchReferenceBackend, layer, common)
    with limits(small):
        torch.testing.assert_close(attend(TorchBackend, layer, common), expected)


@any_time
@given(
    requests=cross_rows(),
    not_causal=st.sampled_from(["mask", "batch"]),
    starts=st.booleans(),
    padding=st.integers(0, 2),
    small=st.booleans(),
)
def test_any_batch_over_another_sequence_equals_the_reference(
    requests: list[Request], not_causal: str, starts: bool, padding: int, small: bool
) -> None:
    common = attrs.evolve(metadata_of(requests, padding=padding, starts=starts), causal=not_causal == "mask")
    layer = layer_of(causal=not_causal == "batch")
    expected = attend(TorchReferenceBackend, layer, common)
    with limits(small):
        torch.testing.assert_close(attend(TorchBackend, layer, common), expected)


def test_repeated_queries_are_not_taken_for_tokens_that_are_not_computed() -> None:
    # Two tiles of three queries, one of them repeated, have as many rows as the batch has tokens.
    common = metadata_of([Request(0, 3, num_keys=9), Request(0, 2, num_keys=9), Request(0, 1, num_keys=0)])
    expected = attend(TorchReferenceBackend, layer_of(causal=False), common)
    torch.testing.assert_close(attend(TorchBackend, layer_of(causal=False), common), expected)


def test_a_tile_with_a_bias_that_differs_from_head_to_head_has_fewer_queries() -> None:
    query = QuerySpec(num_heads=64, head_size=4, scale=0.5)
    plain = attrs.evolve(layer_of(num_kv_heads=64), query=query)
    biased = attrs.evolve(plain, query=attrs.evolve(query, relative_bias=RelativeBias(num_buckets=4, max_distance=9)))
    prompts = [built_for(layer, metadata_of([Request(4000, 256)])) for layer in (plain, biased)]
    tiles = [[batch.num_queries for batch in built.batches() for _ in range(batch.num_tiles)] for built in prompts]
    assert [[256], [32] * 8] == tiles
    # Decodes are as many to a batch as without a bias.
    decodes = metadata_of([Request(4000, 1)] * 100)
    assert built_for(plain, decodes).sizes == built_for(biased, decodes).sizes


def test_a_batch_gathers_as_much_as_a_cache_holds() -> None:
    layer = attrs.evolve(
        layer_of(block_size=16, num_kv_heads=8, head_size=128),
        query=QuerySpec(num_heads=8, head_size=128, scale=0.1),
    )
    short = built_for(layer, metadata_of([Request(511, 1)] * 64, block_size=16)).batches()
    assert [(4, 512)] * 16 == [(batch.num_tiles, batch.num_keys) for batch in short]


def test_what_no_query_of_a_tile_sees_is_counted_from_the_batchs_first_token() -> None:
    requests = [Request(201, 1, num_hidden=98), Request(201, 1, num_hidden=97)]
    built = built_for(layer_of(), metadata_of(requests))
    # 4 tokens to a page; pages before the hidden tokens' last one are not read.
    assert [0, 1, 106, 107, 108, 214, 215] == built.dead.tolist()
    with limits(True):
        built = built_for(layer_of(), metadata_of(requests))
    assert [[0, 1, 106, 107], [0, 106, 107]] == [batch.dead.tolist() for batch in built.batches()]


def test_padding_repeats_a_page_of_which_each_token_is_seen() -> None:
    common = metadata_of([Request(40, 1), Request(29, 1)], starts=False)
    built = built_for(layer_of(), common)
    assert [*common.block_table[1, :8].tolist(), *common.block_table[1, [1] * 3].tolist()] == built.pages[11:].tolist()
    assert [41, 42, 43, 44 + 30, 44 + 31] == built.dead.tolist()


def test_requests_without_keys_are_not_computed() -> None:
    common = metadata_of([Request(0, 3, num_keys=9), Request(0, 200, num_keys=0), Request(0, 1, num_keys=2)])
    built = built_for(layer_of(causal=False), common)
    assert [[203], [0, 1, 2]] == [batch.rows.tolist() for batch in built.batches()]


@pytest.mark.parametrize("backend", [TorchBackend, TorchReferenceBackend])
def test_tokens_before_a_requests_start_are_not_seen(backend: type[AttentionBackend]) -> None:
    hidden = attend(backend, layer_of(), metadata_of([Request(5, 1, num_hidden=5)]))
    alone = attend(backend, layer_of(), metadata_of([Request(5, 1, num_hidden=0)]))
    assert not torch.equal(alone, hidden)
    assert bool((hidden[0, 0] == hidden[0, 1]).all())


def test_pages_before_a_requests_start_are_not_gathered() -> None:
    common = metadata_of([Request(20, 1, num_hidden=17)])
    built = TorchBackend([layer_of()], CPU).make_builder().build(common)
    assert common.block_table[0, [4, 5]].tolist() == built.pages.tolist()


@pytest.mark.parametrize("backend", [TorchBackend, TorchReferenceBackend])
def test_padded_tokens_get_zeros(backend: type[AttentionBackend]) -> None:
    output = attend(backend, layer_of(), metadata_of([Request(5, 2), Request(7, 0)], padding=3))
    assert [True, True, False, False, False] == [bool(row.any()) for row in output]


@pytest.mark.parametrize("backend", [TorchBackend, TorchReferenceBackend])
def test_a_step_without_a_token_for_any_request_gives_zeros(backend: type[AttentionBackend]) -> None:
    output = attend(backend, layer_of(), metadata_of([Request(5, 0), Request(7, 0)], padding=2))
    assert [False, False] == [bool(row.any()) for row in output]


# --- how requests become batches --------------------------------------------------------------------------------------


def batched(
    lengths: list[int], free_padding: int = 0, max_keys: int = 1 << 15, num_queries: int = 1
) -> list[list[int]]:
    """Return the lengths of each batch of tiles, with pages of one token."""
    rules = Rules.of(layer_of(), CPU)._replace(max_keys=max_keys, free_padding=free_padding)
    num_pages = np.array(sorted(lengths, reverse=True))
    edges = batch_edges(np.full_like(num_pages, num_queries), num_pages, 1, [rules]).tolist()
    return [num_pages[first:stop].tolist() for first, stop in itertools.pairwise(edges)]


@any_time
@given(
    lengths=st.lists(st.integers(1, 9000), min_size=1, max_size=20),
    free_padding=st.sampled_from([0, 10_000]),
    max_keys=st.sampled_from([100, 20_000]),
)
def test_padding_is_less_than_half_of_a_batch_or_little(lengths: list[int], free_padding: int, max_keys: int) -> None:
    batches = batched(lengths, free_padding, max_keys)
    assert sorted(lengths, reverse=True) == [length for batch in batches for length in batch]
    for batch in batches:
        num_keys = len(batch) * batch[0]
        assert len(batch) == 1 or num_keys <= max_keys
        assert 2 * batch[-1] > batch[0] or num_keys - sum(batch) <= free_padding


def test_lengths_within_a_factor_of_two_are_one_batch() -> None:
    assert [[31, 20, 16]] == batched([16, 31, 20])


def test_other_lengths_are_divided_from_the_longest_down() -> None:
    assert [[700, 640], [100, 90]] == batched([100, 640, 700, 90])
    assert [[700, 640, 100, 90]] == batched([100, 640, 700, 90], free_padding=2000)


def test_padding_costs_more_if_tiles_have_several_queries() -> None:
    assert [[31], [20], [16, 16]] == batched([16, 31, 20, 16], num_queries=2)
    # 3 * 31 - 67 tokens of padding, for 2 queries each.
    assert [[[31, 20, 16]], [[31], [20, 16]]] == [
        batched([16, 31, 20], max_padding, num_queries=2) for max_padding in (52, 51)
    ]


def test_a_request_that_fills_a_batch_alone_is_one() -> None:
    assert [[700], [300, 300]] == batched([300, 700, 300], max_keys=600)


def test_tiles_of_as_many_queries_are_one_batch_if_their_mask_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    common = metadata_of([Request(8, 4), Request(4, 4), Request(4, 2), Request(8, 4)])
    assert [(1, 2), (3, 4)] == [
        (batch.num_tiles, batch.num_queries) for batch in built_for(layer_of(), common).batches()
    ]
    monkeypatch.setattr(tiles_module, "MAX_BATCH_PAIRS", 4 * 12 * 2)
    assert [1, 2, 1] == [batch.num_tiles for batch in built_for(layer_of(), common).batches()]


def test_a_long_prompts_pages_are_gathered_once_and_each_tile_reads_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles_module, "MAX_ROWS", 16)
    requests = [Request(0, 20), Request(0, 20)]
    full, window = (built_for(layer_of(**mask), metadata_of(requests)).batches() for mask in ({}, {"window": 4}))
    assert [[5, 0, 0]] * 2 == [[batch.num_pages for batch in batches] for batches in (full, window)]
    assert [(2, 8), (2, 8), (2, 4)] == [(batch.num_tiles, batch.num_queries) for batch in full]
    gathered = torch.arange(20).expand(2, 1, 20)
    assert [[*range(8)], [*range(16)], [*range(20)]] == [batch.read(gathered)[0, 0].tolist() for batch in full]
    assert [[*range(8)], [*range(4, 16)], [*range(12, 20)]] == [batch.read(gathered)[0, 0].tolist() for batch in window]


def test_a_tile_reads_sink_tokens_beside_those_of_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles_module, "MAX_ROWS", 8)
    *_, last = built_for(layer_of(window=4, num_sink_tokens=3), metadata_of([Request(0, 20)])).batches()
    assert [0, 1, 2, *range(11, 20)] == last.read(torch.arange(20).expand(1, 1, 20))[0, 0].tolist()
    # Query 16 sees the tokens from 13 on.
    assert [1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0] == (last.mask(torch.float32)[0, 0, 0] == 0).int().tolist()


def test_a_mask_is_computed_from_the_first_token_that_some_query_does_not_see() -> None:
    def num_open(mask: Mapping[str, Any], *requests: Request) -> list[int]:
        return [
            batch.num_open for batch in built_for(layer_of(**mask), metadata_of([*requests], starts=False)).batches()
        ]

    assert [6] == num_open({}, Request(9, 1), Request(5, 1))
    assert [9] == num_open({}, Request(8, 3))
    assert [0] == num_open({"window": 5}, Request(8, 3))


# --- masks ------------------------------------------------------------------------------------------------------------


def seen(layer: LayerSpec, *requests: Request) -> list[Any]:
    """Return, for each batch, which gathered tokens each query of each tile sees."""
    batches = built_for(layer, metadata_of([*requests])).batches()
    return [(batch.mask(torch.float32)[:, 0] == 0).int().tolist() for batch in batches]


def test_a_mask_hides_what_a_querys_window_has_passed_and_what_follows_the_query() -> None:
    # The first gathered token is at position 4.
    assert [[[[0, 1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 0, 0]]]] == seen(layer_of(window=4), Request(8, 2))


def test_sink_tokens_lie_before_the_window() -> None:
    layer = layer_of(window=2, num_sink_tokens=3)
    # Far from the window they are in a page of their own; near it they are in its first page.
    assert [[[[1, 1, 1, 0, 0, 1, 1, 0]]]] == seen(layer, Request(22, 1))
    assert [[[[1, 1, 1, 0, 1, 1, 0, 0]]]] == seen(layer, Request(5, 1))
    assert [[[[0, 1, 1, 1]]]] == seen(layer, Request(3, 1, num_hidden=1))


def test_a_learned_bias_counts_the_tokens_between_sinks_and_window() -> None:
    layer = layer_of(RelativeBias(num_buckets=4, max_distance=30), window=2, num_sink_tokens=3)
    (batch,) = built_for(layer, metadata_of([Request(22, 1)])).batches()
    by_distance = torch.arange(-30, 31)[None]
    assert [-22, -21, -20, -19, -2, -1, 0, 1] == batch.learned_bias(by_distance).flatten().tolist()


def test_layers_share_the_masks_of_a_step_if_these_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    common = metadata_of([Request(5, 3)])
    mask, other = (built_for(layer_of(), common).batches()[0].mask for _ in range(2))
    assert mask(torch.float32) is mask(torch.float32)
    assert mask(torch.float32) is not other(torch.float32)
    assert torch.float16 == mask(torch.float16).dtype
    monkeypatch.setattr(builder_module, "MAX_KEPT_PAIRS", 3 * 8 - 1)
    (batch,) = built_for(layer_of(), common).batches()
    assert batch.mask(torch.float32) is not batch.mask(torch.float32)


def test_pages_that_are_seen_whole_have_no_dead_tokens() -> None:
    assert [] == built_for(layer_of(), metadata_of([Request(7, 1), Request(7, 1)], starts=False)).dead.tolist()


def test_what_is_built_says_what_depends_on_the_block_table() -> None:
    assert {"pages"} == TorchBackend([layer_of()], CPU).make_builder().table_fields
    assert "pages" in {field.name for field in attrs.fields(TorchMetadata)}
