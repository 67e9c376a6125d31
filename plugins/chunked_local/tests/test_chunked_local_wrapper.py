"""Chunks as virtual requests: the reference values, and the fields that are carried, padded and refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import attrs
import pytest
import torch
from kvframe_chunked_local import ChunkedLocalSpec
from kvframe_chunked_local.virtual_requests import most_virtual_requests
from kvframe_chunked_local.wrapper import ChunkedLocal
from kvframe_testing.framework import apply_wrapper, bind_chain, check_order, pad_metadata
from kvframe_testing.metadata import on_device
from kvframe_testing.suites import WrapperTests
from torch.utils._python_dispatch import TorchDispatchMode

from kvframe import FullAttentionSpec
from kvframe.contract import (
    RANGE_ENDS,
    SEQ_STARTS,
    Axis,
    CommonAttentionMetadata,
    Extension,
    LayerSpec,
    QuerySpec,
    RelativeBias,
    WrapperError,
)

MakeBatch = Callable[..., CommonAttentionMetadata]


def layer(chunk: int, block_size: int = 2) -> LayerSpec:
    spec = ChunkedLocalSpec(block_size=block_size, num_kv_heads=1, head_size=8, chunk=chunk)
    return LayerSpec(name="local", spec=spec, query=QuerySpec(num_heads=2, head_size=8, scale=1.0))


def query_lens(metadata: CommonAttentionMetadata) -> list[int]:
    assert torch.equal(metadata.query_start_loc_cpu, metadata.query_start_loc)
    return metadata.query_start_loc_cpu.diff().tolist()


def seq_lens(metadata: CommonAttentionMetadata) -> list[int]:
    assert torch.equal(metadata.seq_lens_cpu, metadata.seq_lens)
    return metadata.seq_lens_cpu.tolist()


def blocks(metadata: CommonAttentionMetadata) -> list[list[int]]:
    """Return each row's block ids, those of its tokens only."""
    counts = [-(-length // metadata.block_size) for length in seq_lens(metadata)]
    return [row[:count] for row, count in zip(metadata.block_table.tolist(), counts, strict=True)]


@pytest.fixture
def reference(make_batch: MakeBatch) -> CommonAttentionMetadata:
    return make_batch([4, 10, 5], [6, 17, 9], block_size=2)


# --- virtual requests -------------------------------------------------------------------------------------------------


def test_each_chunk_of_a_request_is_a_virtual_request(reference: CommonAttentionMetadata) -> None:
    virtual = apply_wrapper(ChunkedLocal(chunk=4), reference)
    assert [2, 2, 1, 4, 4, 1, 4, 1] == query_lens(virtual)
    assert [4, 2, 4, 4, 4, 1, 4, 1] == seq_lens(virtual)
    assert (8, 4, 4) == (virtual.num_reqs, virtual.max_query_len, virtual.max_seq_len)


def test_a_virtual_request_has_the_blocks_of_its_chunk(reference: CommonAttentionMetadata) -> None:
    virtual = apply_wrapper(ChunkedLocal(chunk=4), reference)
    expected = [[100, 101], [102], [202, 203], [204, 205], [206, 207], [208], [302, 303], [304]]
    assert expected == blocks(virtual)
    assert (8, 2) == virtual.block_table.shape


def test_what_a_chunk_does_not_change_is_handed_on(reference: CommonAttentionMetadata) -> None:
    virtual = apply_wrapper(ChunkedLocal(chunk=4), reference)
    assert reference.slot_mapping is virtual.slot_mapping
    assert reference.generating_indices is virtual.generating_indices
    assert (19, 2, {}) == (virtual.num_actual_tokens, virtual.block_size, dict(virtual.extensions))


def test_tokens_before_a_chunk_in_its_first_block_are_hidden(make_batch: MakeBatch) -> None:
    virtual = apply_wrapper(ChunkedLocal(chunk=3), make_batch([5, 1], [8, 5], block_size=2))
    assert [3, 2, 1] == query_lens(virtual)
    assert [[101, 102], [103], [201, 202]] == blocks(virtual)
    assert [4, 2, 3] == seq_lens(virtual)
    starts = virtual.extensions[SEQ_STARTS]
    assert starts.values_cpu is not None
    assert [1, 0, 1] == starts.values.tolist() == starts.values_cpu.tolist()


def test_a_step_within_the_first_chunk_comes_back_as_it_is(make_batch: MakeBatch) -> None:
    batch = make_batch([4, 1], [4, 8])
    assert batch is apply_wrapper(ChunkedLocal(chunk=8), batch)


def test_decodes_stay_one_row_each_and_keep_their_places(make_batch: MakeBatch) -> None:
    batch = make_batch([1, 1], [9, 16])
    virtual = apply_wrapper(ChunkedLocal(chunk=8), batch)
    assert [1, 8] == seq_lens(virtual)
    assert batch.query_start_loc is virtual.query_start_loc


def test_a_request_without_a_new_token_makes_no_virtual_one(make_batch: MakeBatch) -> None:
    virtual = apply_wrapper(ChunkedLocal(chunk=4), make_batch([0, 2, 0], [7, 9, 0]))
    assert [1, 1] == query_lens(virtual)
    assert [[202, 203], [204]] == blocks(virtual)


def test_a_batch_without_tokens_makes_one_virtual_request_without_tokens(make_batch: MakeBatch) -> None:
    virtual = apply_wrapper(ChunkedLocal(chunk=4), make_batch([0, 0], [7, 9], num_padding=1))
    assert ([0], [0], (1, 1)) == (query_lens(virtual), seq_lens(virtual), virtual.block_table.shape)


def with_ranges(batch: CommonAttentionMetadata, ends: list[int]) -> CommonAttentionMetadata:
    host = torch.tensor(ends, dtype=torch.int32)
    return attrs.evolve(batch, extensions={RANGE_ENDS: Extension(host.clone(), Axis.TOKEN, host)})


def test_tokens_whose_range_goes_on_in_the_next_chunk_are_a_virtual_request(make_batch: MakeBatch) -> None:
    # The range is tokens 2 to 5, and the chunks begin at 0, 4 and 8.
    virtual = apply_wrapper(ChunkedLocal(chunk=4), with_ranges(make_batch([9], [9]), [0, 0, 6, 6, 6, 6, 0, 0, 0]))
    assert [2, 2, 4, 1] == query_lens(virtual)
    # Tokens 2 and 3 read up to the range's end; counted from their chunk, tokens 4 and 5 have an end at 2.
    assert [2, 6, 4, 1] == seq_lens(virtual)
    assert [[100], [100, 101, 102], [102, 103], [104]] == blocks(virtual)
    assert [0, 0, 6, 6, 2, 2, 0, 0, 0] == virtual.extensions[RANGE_ENDS].values.tolist()


def test_ranges_within_their_chunks_split_nothing(make_batch: MakeBatch) -> None:
    virtual = apply_wrapper(ChunkedLocal(chunk=4), with_ranges(make_batch([8], [8]), [0, 4, 4, 4, 8, 8, 8, 8]))
    assert [4, 4] == query_lens(virtual) == seq_lens(virtual)
    assert [0, 4, 4, 4, 4, 4, 4, 4] == virtual.extensions[RANGE_ENDS].values.tolist()


def test_ranges_are_refused_if_scores_depend_on_distances(make_batch: MakeBatch) -> None:
    bias = RelativeBias(num_buckets=8, max_distance=16)
    query = QuerySpec(num_heads=2, head_size=8, scale=1.0, relative_bias=bias)
    biased = ChunkedLocal().for_layer(attrs.evolve(layer(4), query=query))
    assert [4, 4] == query_lens(apply_wrapper(biased, make_batch([8], [8])))
    with pytest.raises(WrapperError) as caught:
        apply_wrapper(biased, with_ranges(make_batch([8], [8]), [0, 4, 4, 4, 0, 0, 0, 0]))
    assert "rejected_extension" == caught.value.code


# --- static shapes ----------------------------------------------------------------------------------------------------


def test_a_static_batch_is_padded_with_rows_without_tokens(make_batch: MakeBatch) -> None:
    batch = make_batch([3, 1, 0], [6, 9, 0], max_blocks=8, num_padding=4, static_query_len=3)
    virtual = apply_wrapper(ChunkedLocal(chunk=4), batch)
    assert [1, 2, 1, 0, 0, 0] == query_lens(virtual)
    assert [4, 2, 1, 0, 0, 0] == seq_lens(virtual)
    assert (6, 3, 4, True) == (virtual.num_reqs, virtual.max_query_len, virtual.max_seq_len, virtual.static_shapes)


def test_a_static_batch_of_decodes_has_as_many_rows_as_before() -> None:
    assert 256 == most_virtual_requests(num_reqs=256, num_tokens=256, max_query_len=1, chunk=8192)


def test_a_static_batch_has_rows_and_blocks_for_ranges_that_go_on(make_batch: MakeBatch) -> None:
    batch = make_batch([8], [8], max_blocks=8, static_query_len=8)
    # There are two chunks. Each may be split once, and a range may end anywhere in the table.
    virtual = apply_wrapper(ChunkedLocal(chunk=4), with_ranges(batch, [0, 0, 8, 8, 8, 8, 8, 8]))
    assert [2, 2, 4, *[0] * 3] == query_lens(virtual)
    assert [2, 8, 4, *[0] * 3] == seq_lens(virtual)
    assert [[100], [100, 101, 102, 103], [102, 103], [], [], []] == blocks(virtual)


def test_which_tensors_a_static_batch_makes_does_not_depend_on_its_requests(make_batch: MakeBatch) -> None:
    for query_lens_, seq_lens_ in (([1, 1], [6, 9]), ([1, 0], [6, 0])):
        batch = make_batch(query_lens_, seq_lens_, max_blocks=8, static_query_len=1)
        virtual = apply_wrapper(ChunkedLocal(chunk=4), batch)
        assert virtual.query_start_loc is not batch.query_start_loc


def virtual_request_counts(num_reqs: int, num_tokens: int, chunk: int) -> Iterator[int]:
    """Yield the number of chunks that each batch of these sizes touches, for all positions of its requests."""
    max_chunks = {0: 0} | {
        length: max((first + length - 1) // chunk + 1 for first in range(chunk)) for length in range(1, num_tokens + 1)
    }
    for lengths in itertools.product(range(num_tokens + 1), repeat=num_reqs):
        if sum(lengths) <= num_tokens:
            yield sum(max_chunks[length] for length in lengths)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
@pytest.mark.parametrize(("num_reqs", "num_tokens"), [(1, 1), (1, 7), (2, 3), (3, 2), (3, 5), (3, 6), (3, 9)])
def test_the_static_bound_is_what_some_batch_reaches_and_none_exceeds(
    num_reqs: int, num_tokens: int, chunk: int
) -> None:
    assert max(virtual_request_counts(num_reqs, num_tokens, chunk)) == most_virtual_requests(
        num_reqs, num_tokens, num_tokens, chunk
    )


@pytest.mark.parametrize(("max_query_len", "expected"), [(1, 10), (2, 20), (5, 20), (6, 30), (10, 40), (1000, 260)])
def test_the_static_bound_grows_with_the_longest_query(max_query_len: int, expected: int) -> None:
    assert expected == most_virtual_requests(num_reqs=10, num_tokens=980, max_query_len=max_query_len, chunk=4)


# --- host and device --------------------------------------------------------------------------------------------------


class CopiesToDevice(TorchDispatchMode):
    """Records the bytes of each copy to another device."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("device", args[0].device) != args[0].device:
            self.num_bytes.append(args[0].nbytes)
        return func(*args, **kwargs)


@pytest.mark.parametrize("chunk", [512, 500])
@pytest.mark.parametrize("seq_lens", [range(600, 856), range(856, 600, -1)])
def test_256_decodes_are_one_copy_of_at_most_4_kb(make_batch: MakeBatch, seq_lens: range, chunk: int) -> None:
    batch = on_device(make_batch([1] * 256, list(seq_lens), block_size=16))
    with CopiesToDevice() as copies:
        virtual = apply_wrapper(ChunkedLocal(chunk=chunk), batch)
    assert 1 == len(copies.num_bytes)
    assert 4096 >= copies.num_bytes[0]
    assert "meta" == virtual.block_table.device.type == virtual.seq_lens.device.type


def test_256_requests_with_prompts_at_a_graphs_sizes_are_one_copy_of_at_most_4_kb(make_batch: MakeBatch) -> None:
    num_new = [1] * 224 + [8] * 32
    sizes = {"num_reqs": 256, "num_tokens": 512, "num_generating": 256, "max_query_len": 64}
    batch = on_device(pad_metadata(make_batch(num_new, list(range(600, 856)), block_size=16), **sizes))
    with CopiesToDevice() as copies:
        virtual = apply_wrapper(ChunkedLocal(chunk=512), batch)
    assert most_virtual_requests(256, 512, 64, 512) == virtual.num_reqs == virtual.block_table.shape[0]
    assert 1 == len(copies.num_bytes)
    assert 4096 >= copies.num_bytes[0]


def test_runs_past_the_end_of_the_table_need_nothing_of_the_device(make_batch: MakeBatch) -> None:
    batch = on_device(make_batch([4, 10, 5], [6, 12, 13]))
    with CopiesToDevice() as copies:
        apply_wrapper(ChunkedLocal(chunk=4), batch)
    assert 1 == len(copies.num_bytes)


class TestChunkedLocal(WrapperTests):
    wrapper = "chunked_local"
    layers = MappingProxyType(
        {f"{chunk=}-{block_size=}": layer(chunk, block_size) for chunk in (1, 3, 4, 8, 100) for block_size in (2, 3, 4)}
    )


# --- extensions and fields --------------------------------------------------------------------------------------------


def test_a_bidirectional_step_is_refused(reference: CommonAttentionMetadata) -> None:
    with pytest.raises(WrapperError) as caught:
        apply_wrapper(ChunkedLocal(chunk=4), attrs.evolve(reference, causal=False))
    assert "rejected_field" == caught.value.code


def test_a_step_that_hides_tokens_already_is_refused(reference: CommonAttentionMetadata) -> None:
    hidden = Extension(torch.zeros(3, dtype=torch.int32), Axis.REQUEST)
    with pytest.raises(WrapperError) as caught:
        apply_wrapper(ChunkedLocal(chunk=4), attrs.evolve(reference, extensions={SEQ_STARTS: hidden}))
    assert "rejected_extension" == caught.value.code


def test_it_says_what_it_does_with_every_field() -> None:
    assert {field.name for field in attrs.fields(CommonAttentionMetadata)} - {"extensions"} == set(ChunkedLocal.fields)


# --- layers -----------------------------------------------------------------------------------------------------------


def test_a_backend_behind_it_sees_full_attention_over_the_same_state() -> None:
    chain, wrapped, required = bind_chain([ChunkedLocal()], layer(chunk=4))
    assert (ChunkedLocal(chunk=4),) == chain
    assert FullAttentionSpec(block_size=2, num_kv_heads=1, head_size=8) == wrapped.spec
    assert frozenset() == required


def test_a_backend_has_to_hide_tokens_where_chunks_begin_inside_of_blocks() -> None:
    assert frozenset({SEQ_STARTS}) == bind_chain([ChunkedLocal()], layer(chunk=5))[2]


class NeverFull(ChunkedLocalSpec):
    def retain_all(self) -> ChunkedLocalSpec:  # type: ignore[override]
        return self


@pytest.mark.parametrize(
    ("wrapper", "spec", "code"),
    [
        (ChunkedLocal(), FullAttentionSpec(block_size=2, num_kv_heads=1, head_size=8), "no_chunk"),
        (ChunkedLocal(), None, "no_chunk"),
        (ChunkedLocal(chunk=8), layer(chunk=4).spec, "other_chunk"),
        (ChunkedLocal(), NeverFull(block_size=2, num_kv_heads=1, head_size=8, chunk=4), "no_full_form"),
    ],
)
def test_a_layer_that_it_cannot_serve_is_refused(
    wrapper: ChunkedLocal, spec: ChunkedLocalSpec | None, code: str
) -> None:
    with pytest.raises(WrapperError) as caught:
        wrapper.for_layer(attrs.evolve(layer(chunk=4), spec=spec))
    assert code == caught.value.code


def test_chunks_are_not_split_twice() -> None:
    with pytest.raises(WrapperError, match="cannot be combined in any order"):
        check_order([ChunkedLocal, ChunkedLocal])
