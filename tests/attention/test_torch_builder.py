"""The torch backend's metadata can be refreshed, shared and divided without changing the layers' outputs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kvframe.builtin import torch_builder, torch_pieces
from kvframe.builtin.torch_backend import TorchBackend
from kvframe.builtin.torch_builder import TorchMetadata, TorchMetadataBuilder
from kvframe.builtin.torch_cut import cut_batches
from kvframe.builtin.torch_reference import TorchReferenceBackend
from kvframe.builtin.torch_tiles import NO_LIMIT, IntArray, Rules, ranges
from kvframe.contract.backend import AttentionBackend
from kvframe.contract.metadata import SEQ_STARTS, Axis, CommonAttentionMetadata, Extension
from kvframe.contract.specs import LayerSpec, QuerySpec, RelativeBias
from kvframe.testing.case import Request
from kvframe.testing.metadata import make_metadata
from kvframe.testing.state import GridSpec

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
    query = QuerySpec(num_heads=2, head_size=4, scale=0.5, relative_bias=relative_bias)
    return LayerSpec(name="layer", spec=spec, query=query)


@st.composite
def rows(draw: st.DrawFn) -> list[Request]:
    """Return requests, some but not all of which have no token in the step."""
    lengths = st.tuples(st.integers(0, 40), st.integers(0, 6), st.floats(0, 1))
    drawn = draw(st.lists(lengths, max_size=6))
    first = (draw(st.integers(0, 40)), draw(st.integers(1, 6)), 0.0)
    return [Request(computed, new, num_hidden=int(hidden * computed)) for computed, new, hidden in (first, *drawn)]


@st.composite
def cross_rows(draw: st.DrawFn) -> list[Request]:
    """Return requests whose keys are of another sequence: fewer keys than queries, none, or none that is visible."""
    lengths = st.tuples(st.integers(0, 6), st.integers(0, 40), st.floats(0, 1))
    drawn = draw(st.lists(lengths, min_size=1, max_size=7))
    return [Request(0, new, num_keys=keys, num_hidden=int(hidden * keys)) for new, keys, hidden in drawn]


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
    seen = torch.zeros(shape[:2], dtype=torch.bool)
    starts = metadata.query_start_loc_cpu.tolist()
    for request, seq_len in enumerate(metadata.seq_lens_cpu.tolist()):
        hidden = int(metadata.extensions[SEQ_STARTS].values[request]) if metadata.extensions else 0
        num_new = starts[request + 1] - starts[request]
        for position in range(seq_len - num_new, seq_len):
            causal = layer.spec.causal and metadata.causal
            live = (*layer.spec.live_ranges(position), (position, position + 1)) if causal else ((0, seq_len),)
            for token in (token for start, stop in live for token in range(max(start, hidden), stop)):
                seen[metadata.block_table[request, token // 4], token % 4] = True
    for state in cache.values():
        state[~seen] = float("nan")
    backend = backend_class([layer], CPU)
    assert layer.query is not None
    if layer.query.relative_bias is not None:
        backend.bind(layer, {"relative_bias": torch.randn(4, 2, generator=generator)})
    return backend.forward(layer, query, cache, backend.make_builder().build(metadata), None)


@contextlib.contextmanager
def limits(small: bool) -> Iterator[None]:
    """Divide into many pieces; if ``small``, layers make some of the masks themselves."""
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(torch_builder, "MAX_PIECE_KEYS", 48)
            patch.setattr(torch_builder, "MAX_FOLDED_QUERIES", 6)
            patch.setattr(torch_builder, "FREE_PADDING_ELEMENTS", 0)
            patch.setattr(torch_pieces, "MAX_SHARED_KEYS", 0)
        yield


def assert_same(expected: Any, found: Any) -> None:
    """Assert that two values are bitwise equal; for metadata, the fields that layers read, and a refresh."""
    if isinstance(expected, TorchMetadata):
        read = attrgetter("pieces", "pages", "row_stride")
        assert_same(read(expected), read(found))
        one, other = (each.page_index_cpu - each.table_start for each in (expected, found))
        assert_same(one, other)
    elif attrs.has(type(expected)):
        for field in attrs.fields(type(expected)):
            assert_same(getattr(expected, field.name), getattr(found, field.name))
    elif isinstance(expected, tuple):
        assert len(expected) == len(found)
        for one, other in zip(expected, found, strict=True):
            assert_same(one, other)
    elif isinstance(expected, torch.Tensor):
        assert (expected.dtype, expected.shape) == (found.dtype, found.shape)
        assert torch.equal(expected, found)
    else:
        assert expected == found


# --- refresh and reuse ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@any_time
@given(requests=rows(), seeds=st.tuples(st.integers(0, 99), st.integers(0, 99)))
def test_a_refresh_equals_a_rebuild(mask: Mapping[str, Any], requests: list[Request], seeds: tuple[int, int]) -> None:
    one, other = (metadata_of(requests, seed) for seed in seeds)
    builder = TorchBackend([layer_of(**mask)], CPU).make_builder()
    built = builder.build(one)
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
    layers = (
        layer_of(window=5),
        attrs.evolve(layer_of(window=5), query=QuerySpec(num_heads=2, head_size=4, scale=9.0)),
    )
    one, other = (TorchBackend([layer], CPU).make_builder() for layer in layers)
    assert one.reuse_key == other.reuse_key
    common = metadata_of(requests)
    assert_same(one.build(common), other.build(common))


@pytest.mark.parametrize(
    "other",
    [
        layer_of(window=6),
        layer_of(window=5, num_sink_tokens=1),
        layer_of(window=5, dtype="float16"),
        attrs.evolve(layer_of(window=5), query=QuerySpec(num_heads=4, head_size=4, scale=0.5)),
        attrs.evolve(layer_of(window=5), query=QuerySpec(num_heads=2, head_size=4, scale=0.5, soft_cap=1.0)),
        attrs.evolve(layer_of(window=5), query=QuerySpec(num_heads=2, head_size=4, scale=0.5, has_sinks=True)),
        layer_of(RelativeBias(num_buckets=4, max_distance=9), window=5),
    ],
)
def test_what_changes_the_pieces_changes_the_reuse_key(other: LayerSpec) -> None:
    keys = {TorchBackend([layer], CPU).make_builder().reuse_key for layer in (layer_of(window=5), other)}
    assert 2 == len(keys)


# --- all groups at once -----------------------------------------------------------------------------------------------


@st.composite
def groups(draw: st.DrawFn) -> list[tuple[LayerSpec, int]]:
    """Return layers of several groups, some of them equal, each with the number of its wrapper chain."""
    options = st.fixed_dictionaries(
        {"block_size": st.sampled_from([2, 4, 16]), "dtype": st.sampled_from(["float32", "bfloat16"])}
    )
    queries = st.builds(QuerySpec, num_heads=st.sampled_from([1, 2]), head_size=st.just(4), scale=st.just(0.5))
    layers = st.builds(
        lambda mask, sizes, query: attrs.evolve(layer_of(**mask, **sizes), query=query),
        st.sampled_from(MASKS),
        options,
        queries,
    )
    kinds = draw(st.lists(st.tuples(layers, st.integers(0, 1)), min_size=1, max_size=4))
    return draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=8))


def lay_tables(steps: list[CommonAttentionMetadata], layout: str) -> list[CommonAttentionMetadata]:
    """Return the steps with block tables in the memory layout that ``layout`` names."""
    if layout == "columns":
        return [attrs.evolve(step, block_table=step.block_table.T.contiguous().T) for step in steps]
    if layout == "together":
        tables: dict[int, torch.Tensor] = {}
        for size in {step.block_size for step in steps}:
            alike = [step.block_table for step in steps if step.block_size == size]
            most = [max(dims) for dims in zip(*(table.shape for table in alike), strict=True)]
            tables[size] = torch.zeros(len(steps), *most, dtype=torch.int32)
        for number, step in enumerate(steps):
            place = tables[step.block_size][number, : step.block_table.shape[0], : step.block_table.shape[1]]
            place.copy_(step.block_table)
            steps[number] = attrs.evolve(step, block_table=place)
    return steps


@any_time
@given(
    members=groups(),
    requests=st.tuples(rows(), rows()),
    layout=st.sampled_from(["apart", "together", "columns"]),
    starts=st.booleans(),
    padding=st.integers(0, 2),
    causal=st.tuples(st.booleans(), st.booleans()),
    small=st.booleans(),
)
def test_groups_that_are_built_together_equal_groups_that_are_built_one_by_one(
    members: list[tuple[LayerSpec, int]],
    requests: tuple[list[Request], list[Request]],
    layout: str,
    starts: bool,
    padding: int,
    causal: tuple[bool, bool],
    small: bool,
) -> None:
    behind = [metadata_of(each, padding=padding, starts=starts) for each in requests]
    steps = []
    for seed, (layer, chain) in enumerate(members):
        assert layer.spec is not None
        own = metadata_of(requests[chain], seed, block_size=layer.spec.block_size)
        steps.append(
            attrs.evolve(behind[chain], block_table=own.block_table, block_size=own.block_size, causal=causal[chain])
        )
    with limits(small):
        builders = [TorchBackend([layer], CPU).make_builder() for layer, _ in members]
        builds = list(zip(builders, lay_tables(steps, layout), strict=True))
        together = TorchMetadataBuilder.build_together(builds)
        for (builder, step), found in zip(builds, together, strict=True):
            assert_same(builder.build(step), found)
            assert_same(found.pages, builder.refreshed_fields(found, step)["pages"])


class Gathers(TorchDispatchMode):
    """Counts the gathers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_gathers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.num_gathers += func is torch.ops.aten.index_select.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("layout", "expected"), [("together", 1), ("apart", 3)])
def test_block_tables_in_one_tensor_are_gathered_from_at_once(layout: str, expected: int) -> None:
    builders = [TorchBackend([layer_of(window=window)], CPU).make_builder() for window in (3, 5, 9)]
    steps = lay_tables([metadata_of([Request(9, 1), Request(30, 2)], seed) for seed in range(3)], layout)
    with Gathers() as gathers:
        TorchMetadataBuilder.build_together(list(zip(builders, steps, strict=True)))
    assert expected == gathers.num_gathers


def test_groups_without_a_token_are_built_beside_others() -> None:
    builder = TorchBackend([layer_of()], CPU).make_builder()
    steps = [metadata_of([Request(5, 0)]), metadata_of([Request(5, 1)])]
    found = TorchMetadataBuilder.build_together([(builder, step) for step in steps])
    assert [0, 1] == [len(built.pieces) for built in found]


def test_a_window_as_long_as_all_requests_costs_no_layout_of_its_own() -> None:
    builders = [TorchBackend([layer], CPU).make_builder() for layer in (layer_of(), layer_of(window=10))]
    common = metadata_of([Request(9, 1), Request(4, 2)])
    one, other = TorchMetadataBuilder.build_together([(builder, common) for builder in builders])
    assert one.pieces == other.pieces


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


@pytest.mark.parametrize("mask", [*MASKS[:4], {"window": 24}])
@pytest.mark.parametrize("max_rows", [24, 64])
@settings(deadline=None, max_examples=30)
@given(requests=chunks())
def test_tiles_that_share_a_mask_equal_the_reference(
    mask: Mapping[str, Any], max_rows: int, requests: list[Request]
) -> None:
    common = metadata_of(requests)
    expected = attend(TorchReferenceBackend, layer_of(**mask), common)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_builder, "MAX_FOLDED_QUERIES", max_rows)
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


def test_a_bias_that_differs_from_head_to_head_takes_as_much_memory_as_a_mask() -> None:
    bias = RelativeBias(num_buckets=4, max_distance=9)
    query = QuerySpec(num_heads=64, head_size=4, scale=0.5, relative_bias=bias)
    layer = attrs.evolve(layer_of(num_kv_heads=64), query=query)
    steps = [metadata_of([Request(4000, 256)] * 4), metadata_of([Request(4000, 1)] * 100)]
    built = [TorchBackend([layer], CPU).make_builder().build(step) for step in steps]
    sizes = [[piece.num_tiles * piece.num_queries * piece.num_keys for piece in each.pieces] for each in built]
    assert [1024, 100] == [sum(piece.num_tiles * piece.num_queries for piece in each.pieces) for each in built]
    assert max(64 * size for each in sizes for size in each) <= 1 << 24
    assert {32} == {piece.num_queries for piece in built[0].pieces}
    # A piece has as many decodes as without a bias.
    without = attrs.evolve(layer, query=attrs.evolve(query, relative_bias=None))
    assert len(TorchBackend([without], CPU).make_builder().build(steps[1]).pieces) == len(sizes[1])


def test_a_decode_gathers_as_much_at_once_as_a_cache_holds() -> None:
    layer = attrs.evolve(
        layer_of(block_size=16, num_kv_heads=8, head_size=128),
        query=QuerySpec(num_heads=8, head_size=128, scale=0.1),
    )
    builder = TorchBackend([layer], CPU).make_builder()
    short = builder.build(metadata_of([Request(511, 1)] * 64, block_size=16))
    assert [(4, 512, ())] * 16 == [(piece.num_tiles, piece.num_keys, piece.parts) for piece in short.pieces]
    (long,) = builder.build(metadata_of([Request(9999, 1)], block_size=16)).pieces
    assert [(0, 128), (128, 256), (256, 384), (384, 512), (512, 625)] == [
        (part.first_page, part.stop_page) for part in long.parts
    ]


def test_what_no_query_sees_is_hidden_in_the_part_that_holds_it() -> None:
    with limits(True):
        common = metadata_of([Request(201, 1, num_hidden=98)], starts=True)
        (piece,) = TorchBackend([layer_of()], CPU).make_builder().build(common).pieces
    # 4 tokens to a page, 12 pages to a part; pages before the hidden tokens' last one are not read.
    assert [[0, 1], [], [10, 11]] == [part.hidden_slots.tolist() for part in piece.parts]


def test_tokens_of_requests_without_keys_are_not_computed() -> None:
    common = metadata_of([Request(0, 3, num_keys=9), Request(0, 200, num_keys=0), Request(0, 1, num_keys=2)])
    built = TorchBackend([layer_of(causal=False)], CPU).make_builder().build(common)
    assert 4 == sum(piece.num_tiles * piece.num_queries for piece in built.pieces)


@pytest.mark.parametrize("backend", [TorchBackend, TorchReferenceBackend])
def test_tokens_before_a_requests_start_are_not_seen(backend: type[AttentionBackend]) -> None:
    hidden = attend(backend, layer_of(), metadata_of([Request(5, 1, num_hidden=5)]))
    alone = attend(backend, layer_of(), metadata_of([Request(5, 1, num_hidden=0)]))
    assert not torch.equal(alone, hidden)
    assert bool((hidden[0, 0] == hidden[0, 1]).all())


def test_pages_before_a_requests_start_are_not_gathered() -> None:
    common = metadata_of([Request(20, 1, num_hidden=17)])
    built = TorchBackend([layer_of()], CPU).make_builder().build(common)
    assert [common.block_table[0, [4, 5]].tolist()] == [pages.tolist() for pages in built.pages]


@pytest.mark.parametrize("backend", [TorchBackend, TorchReferenceBackend])
def test_padded_tokens_get_zeros(backend: type[AttentionBackend]) -> None:
    output = attend(backend, layer_of(), metadata_of([Request(5, 2), Request(7, 0)], padding=3))
    assert [True, True, False, False, False] == [bool(row.any()) for row in output]


@pytest.mark.parametrize("backend", [TorchBackend, TorchReferenceBackend])
def test_a_step_without_a_token_for_any_request_gives_zeros(backend: type[AttentionBackend]) -> None:
    output = attend(backend, layer_of(), metadata_of([Request(5, 0), Request(7, 0)], padding=2))
    assert [False, False] == [bool(row.any()) for row in output]


# --- how tiles are made -----------------------------------------------------------------------------------------------


def rules(free_padding: int = 0) -> Rules:
    return Rules(
        causal=True,
        window=NO_LIMIT,
        num_sink_tokens=0,
        takes_causal=True,
        group_size=1,
        max_queries=256,
        free_padding=free_padding,
        biased_heads=0,
        max_distance=0,
        piece_keys=1 << 16,
    )


def cut(num_queries: IntArray, num_keys: IntArray, free_padding: int) -> tuple[IntArray | None, IntArray]:
    """Return how the tiles of one segment are made."""
    return cut_batches(np.zeros_like(num_keys), None, num_queries, num_keys, [rules(free_padding)])


@any_time
@given(
    tiles=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 9000)), min_size=1, max_size=40),
    free_padding=st.sampled_from([0, 10_000]),
)
def test_padding_is_less_than_half_of_a_batch_or_little(tiles: list[tuple[int, int]], free_padding: int) -> None:
    num_queries, num_keys = (np.array(column) for column in zip(*tiles, strict=True))
    order, bounds = cut(num_queries, num_keys, free_padding)
    order = np.arange(len(tiles)) if order is None else order
    assert list(range(len(tiles))) == sorted(order.tolist())
    waste = len(tiles) * num_keys.max() - num_keys.sum()
    for start, stop in itertools.pairwise(bounds.tolist()):
        queries, keys = num_queries[order[start:stop]], num_keys[order[start:stop]]
        assert stop == start + 1 or len(keys) * keys.max() <= 1 << 16
        little = num_queries.max() == 1 and (waste <= free_padding or 16 * waste <= num_keys.sum())
        assert little or (2 * keys.min() > keys.max() and 2 * queries.min() > queries.max())


def test_what_needs_little_padding_stays_in_order_in_any_number_of_batches() -> None:
    order, bounds = cut(np.ones(200, dtype=int), np.tile([610] * 19 + [250], 10), 0)
    assert (None, [0, 107, 200]) == (order, bounds.tolist())


def test_lengths_within_a_factor_of_two_are_one_batch() -> None:
    order, bounds = cut(np.array([1, 1, 1]), np.array([16, 31, 20]), 0)
    assert (None, [0, 3]) == (order, bounds.tolist())


def test_other_lengths_are_cut_from_the_longest_down() -> None:
    order, bounds = cut(np.array([1, 1, 1, 1]), np.array([100, 640, 700, 90]), 0)
    assert order is not None
    assert ([2, 1, 0, 3], [0, 2, 4]) == (order.tolist(), bounds.tolist())


def test_tiles_of_different_segments_are_not_mixed() -> None:
    segment, keys = np.array([0, 0, 2, 2, 2]), np.array([100, 90, 10, 95, 90])
    order, bounds = cut_batches(segment, None, np.ones_like(keys), keys, [rules()])
    assert order is not None
    assert ([0, 1, 3, 4, 2], [0, 2, 4, 5]) == (order.tolist(), bounds.tolist())


def test_ranges_follow_one_another() -> None:
    assert [5, 6, 9, 10, 11] == ranges(np.array([5, 7, 9]), np.array([2, 0, 3])).tolist()


def test_what_is_built_says_what_depends_on_the_block_table() -> None:
    assert {"pages"} == TorchBackend([layer_of()], CPU).make_builder().table_fields
    assert "pages" in {field.name for field in attrs.fields(TorchMetadata)}
