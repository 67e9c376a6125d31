"""Each token of a random batch sees its chunk through its virtual request, by a naive reading."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvframe_chunked_local import ChunkedLocalSpec
from kvframe_chunked_local.wrapper import ChunkedLocal

from kvframe import load_plugins
from kvframe.contract import (
    NUM_PROMPT_TOKENS,
    RANGE_ENDS,
    SEQ_STARTS,
    Axis,
    CommonAttentionMetadata,
    Extension,
    LayerSpec,
    QuerySpec,
)
from kvframe.testing.framework import apply_chain, apply_wrapper, bind_chain
from kvframe.testing.reference import dense_attention, visible_tokens

MakeBatch = Callable[..., CommonAttentionMetadata]
Token = tuple[int, int]
"""A position in a request."""


@attrs.frozen
class Sizes:
    """The sizes that the shapes of a static batch may depend on, beside the wrapper's chunk."""

    block_size: int
    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_blocks: int


@st.composite
def all_sizes(draw: st.DrawFn) -> Sizes:
    block_size, max_blocks = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    num_tokens = draw(st.integers(1, 40))
    max_query_len = draw(st.integers(1, min(14, num_tokens, block_size * max_blocks)))
    return Sizes(block_size, draw(st.integers(1, 5)), num_tokens, max_query_len, max_blocks)


@st.composite
def requests_of(draw: st.DrawFn, sizes: Sizes) -> tuple[list[int], list[int]]:
    """Return query lengths, some of them 0, and sequence lengths."""
    query_lens, seq_lens = [], []
    for _ in range(sizes.num_reqs):
        room = min(sizes.max_query_len, sizes.num_tokens - sum(query_lens))
        query_lens.append(draw(st.integers(0, room)))
        seq_lens.append(query_lens[-1] + draw(st.integers(0, sizes.block_size * sizes.max_blocks - query_lens[-1])))
    return query_lens, seq_lens


@st.composite
def range_ends_of(draw: st.DrawFn, num_tokens: int, query_lens: list[int], seq_lens: list[int]) -> Extension:
    """Return where the range of each token ends; ranges lie within the new tokens of a request."""
    ends = []
    for num_new, seq_len in zip(query_lens, seq_lens, strict=True):
        edges = sorted(draw(st.sets(st.integers(seq_len - num_new, seq_len), max_size=4)))
        of_request = [0] * num_new
        for start, stop in itertools.pairwise(edges):
            if draw(st.booleans()):
                of_request[start - seq_len + num_new : stop - seq_len + num_new] = [stop] * (stop - start)
        ends += of_request
    host = torch.tensor(ends + [0] * (num_tokens - len(ends)), dtype=torch.int32)
    return Extension(host.clone(), Axis.TOKEN, host)


@st.composite
def batches(
    draw: st.DrawFn, make_batch: MakeBatch, sizes: Sizes, is_static: bool, has_ranges: bool = False
) -> CommonAttentionMetadata:
    query_lens, seq_lens = draw(requests_of(sizes))
    batch = make_batch(
        query_lens,
        seq_lens,
        sizes.block_size,
        max_blocks=sizes.max_blocks,
        num_padding=sizes.num_tokens - sum(query_lens),
        static_query_len=sizes.max_query_len if is_static else None,
    )
    table = batch.block_table
    layouts = [table, torch.cat([table, -table], 1)[:, : sizes.max_blocks], table.t().contiguous().t()]
    # A static batch may state a longer longest request than it has; shapes must not depend on the lengths.
    longest = draw(st.integers(max(seq_lens), sizes.block_size * sizes.max_blocks)) if is_static else max(seq_lens)
    extensions = {RANGE_ENDS: draw(range_ends_of(sizes.num_tokens, query_lens, seq_lens))} if has_ranges else {}
    return attrs.evolve(batch, block_table=draw(st.sampled_from(layouts)), max_seq_len=longest, extensions=extensions)


def visible(metadata: CommonAttentionMetadata) -> list[set[Token]]:
    """Return the tokens that each packed token sees by causal attention and its range, from ``make_batch``'s ids."""
    starts, size = metadata.query_start_loc_cpu.tolist(), metadata.block_size
    hidden, ends, seen = metadata.extensions.get(SEQ_STARTS), range_ends(metadata), []
    for request, seq_len in enumerate(metadata.seq_lens_cpu.tolist()):
        first = 0 if hidden is None else int(hidden.values[request])
        num_new = starts[request + 1] - starts[request]
        for position in range(seq_len - num_new, seq_len):
            stop = max(position + 1, ends[len(seen)])
            assert stop <= seq_len
            ids = [(int(metadata.block_table[request, at // size]), at % size) for at in range(first, stop)]
            seen.append({(block // 100 - 1, block % 100 * size + offset) for block, offset in ids})
    return seen


def range_ends(metadata: CommonAttentionMetadata) -> list[int]:
    """Return where the range of each packed token ends, 0 for none."""
    found = metadata.extensions.get(RANGE_ENDS)
    if found is None:
        return [0] * len(metadata.slot_mapping)
    assert found.values_cpu is not None
    assert torch.equal(found.values, found.values_cpu)
    assert len(metadata.slot_mapping) == len(found.values)
    return [int(end) for end in found.values]


def within_chunks(metadata: CommonAttentionMetadata, chunk: int) -> list[set[Token]]:
    """Return the tokens that each packed token sees by the definition of the mask, and the later ones of its range."""
    num_new = metadata.query_start_loc_cpu.diff().tolist()
    positions = [
        (request, position)
        for request, seq_len in enumerate(metadata.seq_lens_cpu.tolist())
        for position in range(seq_len - num_new[request], seq_len)
    ]
    return [
        {(request, at) for at in range(n - n % chunk, max(n + 1, end))}
        for (request, n), end in zip(positions, range_ends(metadata), strict=False)
    ]


def copied(metadata: CommonAttentionMetadata) -> list[torch.Tensor]:
    values = attrs.asdict(metadata, recurse=False).values()
    return [value.clone() for value in values if isinstance(value, torch.Tensor)]


@given(data=st.data(), sizes=all_sizes(), chunk=st.integers(1, 20), is_static=st.booleans(), has_ranges=st.booleans())
def test_a_token_sees_its_chunk_and_its_range_and_nothing_is_written(
    make_batch: MakeBatch, data: st.DataObject, sizes: Sizes, chunk: int, is_static: bool, has_ranges: bool
) -> None:
    batch = data.draw(batches(make_batch, sizes, is_static, has_ranges))
    before = copied(batch)
    virtual = apply_wrapper(ChunkedLocal(chunk=chunk), batch)
    assert within_chunks(batch, chunk) == visible(virtual)
    assert batch.slot_mapping is virtual.slot_mapping
    assert batch.num_actual_tokens == virtual.num_actual_tokens == int(virtual.query_start_loc_cpu[-1])
    assert all(map(torch.equal, before, copied(batch)))


@given(data=st.data(), sizes=all_sizes(), chunk=st.integers(1, 20), is_static=st.booleans(), has_ranges=st.booleans())
def test_the_limits_hold_and_host_and_device_agree(
    make_batch: MakeBatch, data: st.DataObject, sizes: Sizes, chunk: int, is_static: bool, has_ranges: bool
) -> None:
    virtual = apply_wrapper(ChunkedLocal(chunk=chunk), data.draw(batches(make_batch, sizes, is_static, has_ranges)))
    query_lens, seq_lens = virtual.query_start_loc_cpu.diff(), virtual.seq_lens_cpu
    assert virtual.num_reqs == len(query_lens) == len(seq_lens) == len(virtual.block_table)
    assert torch.equal(virtual.query_start_loc_cpu, virtual.query_start_loc)
    assert torch.equal(virtual.seq_lens_cpu, virtual.seq_lens)
    assert int(query_lens.min()) >= 0
    assert int(query_lens.max()) <= virtual.max_query_len
    assert int(seq_lens.max()) <= virtual.max_seq_len
    if not is_static:
        assert (int(query_lens.max()), int(seq_lens.max())) == (virtual.max_query_len, virtual.max_seq_len)


@given(data=st.data(), sizes=all_sizes(), chunk=st.integers(1, 20), has_ranges=st.booleans())
def test_static_batches_of_equal_sizes_have_equal_shapes(
    make_batch: MakeBatch, data: st.DataObject, sizes: Sizes, chunk: int, has_ranges: bool
) -> None:
    steps = (data.draw(batches(make_batch, sizes, is_static=True, has_ranges=has_ranges)) for _ in range(2))
    one, other = (apply_wrapper(ChunkedLocal(chunk=chunk), step) for step in steps)
    assert [tensor.shape for tensor in copied(one)] == [tensor.shape for tensor in copied(other)]
    assert (one.num_reqs, one.max_query_len, set(one.extensions)) == (
        other.num_reqs,
        other.max_query_len,
        set(other.extensions),
    )


@given(data=st.data(), sizes=all_sizes(), chunk=st.integers(1, 20), is_static=st.booleans())
def test_a_virtual_request_is_told_what_its_request_is_told(
    make_batch: MakeBatch, data: st.DataObject, sizes: Sizes, chunk: int, is_static: bool
) -> None:
    batch = data.draw(batches(make_batch, sizes, is_static))
    told = Extension(torch.arange(sizes.num_reqs, dtype=torch.int32), Axis.REQUEST)
    virtual = apply_wrapper(ChunkedLocal(chunk=chunk), attrs.evolve(batch, extensions={NUM_PROMPT_TOKENS: told}))
    per_token = [
        metadata.extensions[NUM_PROMPT_TOKENS].values.repeat_interleave(metadata.query_start_loc_cpu.diff()).tolist()
        for metadata in (attrs.evolve(batch, extensions={NUM_PROMPT_TOKENS: told}), virtual)
    ]
    assert per_token[0] == per_token[1]


# --- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("chunk", [4, 8, 6])
@pytest.mark.parametrize("backend", ["torch_reference", "torch"])
def test_attention_of_virtual_requests_is_attention_within_chunks(
    make_batch: MakeBatch, backend: str, chunk: int, is_static: bool
) -> None:
    spec = ChunkedLocalSpec(block_size=4, num_kv_heads=2, head_size=8, chunk=chunk, dtype="float64")
    layer = LayerSpec(name="local", spec=spec, query=QuerySpec(num_heads=4, head_size=8, scale=0.5))
    chain, wrapped, required = bind_chain([ChunkedLocal()], layer)
    backend_class = load_plugins().registry.backends.load(backend)
    assert required <= backend_class.capabilities.extensions
    query_lens, seq_lens = [1, 10, 5, 1, 19], [7, 17, 9, 8, 19]
    batch = make_batch(query_lens, seq_lens, 4, num_padding=3 * is_static, static_query_len=19 if is_static else None)
    random = torch.Generator().manual_seed(0)
    cache = {name: torch.randn(600, 4, 2, 8, generator=random, dtype=torch.float64) for name in ("k", "v")}
    query = torch.randn(len(batch.slot_mapping), 4, 8, generator=random, dtype=torch.float64)

    made = backend_class([wrapped], torch.device("cpu"))
    builder = made.make_builder()
    built = builder.finish(builder.build(apply_chain(chain, batch)))
    output = made.forward(wrapped, query, cache, built, None)

    expected = []
    for row, (num_new, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        first = int(batch.query_start_loc_cpu[row])
        key, value = (cache[name][batch.block_table[row].long()].flatten(0, 1)[:seq_len] for name in ("k", "v"))
        seen = visible_tokens(spec, seq_len - num_new, seq_len)
        assert layer.query is not None
        expected.append(dense_attention(layer.query, query[first : first + num_new], key, value, seen))
    torch.testing.assert_close(output[: batch.num_actual_tokens], torch.cat(expected), rtol=1e-12, atol=1e-12)
