"""The compiled kernels agree with their reference, for all sizes, strides, threads and parts."""

from __future__ import annotations

import ctypes
import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from kvframe_kernels.cpu import attention, build, reference
from kvframe_kernels.cpu.attention import NO_SCALES, Batch, Scales, Scoring, paged_attention

LENGTHS = ((0, 1), (40, 1), (0, 70), (300, 1), (13, 5), (129, 1), (90, 40))
"""The tokens before the step and in it, of each request."""


CPU_FLAGS = Path("/proc/cpuinfo").read_text(encoding="utf-8") if platform.system() == "Linux" else ""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def whole(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def draw(
    lengths: Sequence[tuple[int, int]] = LENGTHS,
    *,
    block_size: int = 16,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 32,
    head_size_v: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Batch]:
    """Return queries, keys and values in scattered pages among pages of NaN, and the batch."""
    generator = torch.Generator().manual_seed(seed)
    head_size_v = head_size if head_size_v is None else head_size_v
    lens = [before + new for before, new in lengths]
    blocks = [-(-length // block_size) for length in lens]
    ids = torch.randperm(sum(blocks), generator=generator) + 1
    # Pages of two layers are adjacent, each with keys, then values, and some padding between.
    sizes = block_size * num_kv_heads * head_size, block_size * num_kv_heads * head_size_v
    page = 2 * sum(sizes) + 24
    pool = torch.full((page * (sum(blocks) + 1),), float("nan"), dtype=dtype)

    def view(offset: int, size: int) -> torch.Tensor:
        shape = sum(blocks) + 1, block_size, num_kv_heads, size
        return pool.as_strided(shape, (page, num_kv_heads * size, size, 1), offset)

    key, value = view(sum(sizes), head_size), view(sum(sizes) + sizes[0], head_size_v)
    table = torch.zeros(len(lens), max(blocks), dtype=torch.int32)
    for row, (length, mine) in enumerate(zip(lens, ids.split(blocks), strict=True)):
        table[row, : len(mine)] = mine
        tokens = torch.arange(length)
        for state in (key, value):
            vectors = torch.randn(length, *state.shape[2:], generator=generator)
            state[mine[tokens // block_size], tokens % block_size] = vectors.to(dtype)
    starts = [0, *torch.tensor([new for _, new in lengths]).cumsum(0).tolist()]
    query = torch.randn(starts[-1], num_heads, head_size, generator=generator).to(dtype)
    return query, key, value, Batch(query_start_loc=whole(starts), seq_lens=whole(lens), block_table=table)


def expect(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, Batch],
    scoring: Scoring,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scales: Scales = NO_SCALES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the kernels' right output, in float64, and the allowed error.

    The bound is to first order, from the numbers only, with six roundings of half a unit: of the weighted values'
    magnitudes, and of the scores' times the values' deviation. Sums of ``n`` terms err by ``sqrt(n)`` units of float32
    (Higham and Mary, SIAM J. Sci. Comput. 41, 2019). No product is larger than the norms of its vectors.
    """
    query, key, value, batch = inputs
    query, dtype = query.double(), query.dtype
    key = reference.numbers(key, scales.key_scale, scales.key_min, torch.float64) * scoring.key_factor
    value = reference.numbers(value, scales.value_scale, scales.value_min, torch.float64) * scoring.value_factor
    # A decoded number is a difference from another one, so its error is in units of its vector's largest number.
    largest = value.abs().amax(-1, keepdim=True).expand_as(value) if scales.value_scale is not None else value.abs()
    plain = attrs.evolve(scoring, key_factor=1.0, value_factor=1.0)
    values = torch.cat([value, largest, value**2], dim=-1)
    outputs = reference.paged_attention(query, key, values, batch, plain, sinks, bias, dtype=torch.float64)
    exact, sizes, squares = outputs.chunk(3, dim=-1)
    deviation = (squares - exact**2).clamp(min=0).sqrt()
    reach = scoring.scale * query.norm(dim=-1, keepdim=True) * float(key.norm(dim=-1).nan_to_num().max())
    beside = sum(float(parameter.abs().max()) for parameter in (sinks, bias) if parameter is not None)
    num_tokens = int(batch.seq_lens.max())
    scores = 4 * reach + 3 * beside
    summed = (query.shape[-1] ** 0.5 + 2) * reach + 2 * beside + (scoring.soft_cap or 0) + math.log(num_tokens)
    units = torch.finfo(dtype).eps * (sizes + deviation * scores)
    units += torch.finfo(torch.float32).eps * (num_tokens**0.5 * sizes + deviation * summed)
    return exact, 3 * units


def check(inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, Batch], scoring: Scoring, **learned: Any) -> None:
    """Compare the kernels with the reference, within the bound."""
    exact, allowed = expect(inputs, scoring, **learned)
    output = paged_attention(*inputs, scoring, **learned)
    assert output.dtype == inputs[0].dtype
    assert torch.all((output - exact).abs() <= allowed)


MISTAKES = ({"window": 19}, {"window": 21}, {"num_sink_tokens": 4}, {"scale": 0.305}, {"soft_cap": 2.02}, {"chunk": 24})


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_what_is_computed_of_another_layer_is_far_beyond_the_bound(mistake: dict[str, Any]) -> None:
    inputs, scoring = draw(), Scoring(scale=0.3, soft_cap=2.0, window=20, num_sink_tokens=5)
    exact, allowed = expect(inputs, scoring)
    if "chunk" in mistake:
        mistake = {**mistake, "window": None, "num_sink_tokens": 0}
    output = paged_attention(*inputs, attrs.evolve(scoring, **mistake))
    assert ((output - exact).abs() / allowed).max() > 50


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MASKS: tuple[dict[str, Any], ...] = (
    {},
    {"window": 20},
    {"window": 1},
    {"window": 9, "num_sink_tokens": 4},
    {"window": 70, "num_sink_tokens": 90},
    {"chunk": 24},
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_masks(mask: dict[str, Any], dtype: torch.dtype) -> None:
    check(draw(dtype=dtype), Scoring(scale=0.3, **mask))


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_few_queries_of_a_request(mask: dict[str, Any]) -> None:
    lengths = [(300, 2), (40, 3), (0, 4), (129, 1), (17, 4)]
    learned = {"sinks": torch.ones(4), "bias": torch.randn(4, 41, generator=torch.Generator().manual_seed(1))}
    for dtype in DTYPES:
        check(draw(lengths, dtype=dtype), Scoring(scale=0.3, soft_cap=2.0, **mask), **learned)
    for heads, kv_heads in ((8, 8), (7, 1), (24, 3)):
        check(draw(lengths, num_heads=heads, num_kv_heads=kv_heads), Scoring(scale=0.3, **mask))
    for code_dtype in (torch.float8_e4m3fn, torch.int8, torch.uint8):
        inputs, scales = coded(code_dtype, 40, lengths=lengths)
        check(inputs, Scoring(scale=0.2, **mask), scales=scales)


def with_ends(batch: Batch, *ranges: tuple[int, int, int]) -> Batch:
    """Return a batch with ranges (request, start, stop) of new tokens."""
    ends = torch.zeros(int(batch.query_start_loc[-1]), dtype=torch.int32)
    for request, start, stop in ranges:
        first = int(batch.query_start_loc[request + 1] - batch.seq_lens[request])
        ends[first + start : first + stop] = stop
    return attrs.evolve(batch, range_ends=ends)


RANGES = ((2, 3, 40), (2, 40, 66), (4, 14, 18), (6, 91, 130))
"""Ranges of the requests of ``LENGTHS``: in tiles, from one tile to the next, and of few queries."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_ranges(mask: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for block_size, part_tokens in ((16, attention.PART_TOKENS), (3, 16)):
        monkeypatch.setattr(attention, "PART_TOKENS", part_tokens)
        query, key, value, batch = draw(dtype=dtype, block_size=block_size)
        check((query, key, value, with_ends(batch, *RANGES)), Scoring(scale=0.3, **mask))
    lengths = [(300, 2), (40, 3), (0, 4), (129, 1), (17, 4)]
    query, key, value, batch = draw(lengths, dtype=dtype, num_heads=7, num_kv_heads=1)
    ranged = with_ends(batch, (0, 300, 302), (2, 0, 2), (2, 2, 4), (4, 18, 21))
    check((query, key, value, ranged), Scoring(scale=0.3, **mask))


def test_without_ranges_the_result_is_far_beyond_the_bound() -> None:
    query, key, value, batch = draw()
    batch = with_ends(batch, *RANGES)
    exact, allowed = expect((query, key, value, batch), Scoring(scale=0.3, window=20))
    output = paged_attention(query, key, value, attrs.evolve(batch, range_ends=None), Scoring(scale=0.3, window=20))
    assert ((output - exact).abs() / allowed).max() > 50


def test_a_batch_that_is_not_causal_has_no_ranges() -> None:
    query, key, value, batch = draw()
    plain = attrs.evolve(batch, causal=False)
    expected = paged_attention(query, key, value, plain, Scoring(scale=0.3, window=20))
    output = paged_attention(query, key, value, with_ends(plain, *RANGES), Scoring(scale=0.3, window=20))
    assert torch.equal(expected, output)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [1, 8, 15, 17, 40, 64, 96, 128, 256])
def test_head_sizes(head_size: int, dtype: torch.dtype) -> None:
    check(draw(head_size=head_size, dtype=dtype), Scoring(scale=head_size**-0.5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size_v", [1, 16, 31, 80, 200])
def test_values_of_another_size(head_size_v: int, dtype: torch.dtype) -> None:
    check(draw(head_size_v=head_size_v, dtype=dtype), Scoring(scale=0.2))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(1, 1), (3, 3), (2, 1), (6, 2), (5, 1), (12, 2), (7, 1), (16, 2), (71, 1)]
)
def test_groups_of_heads(num_heads: int, num_kv_heads: int) -> None:
    check(draw(num_heads=num_heads, num_kv_heads=num_kv_heads), Scoring(scale=0.2))


def test_more_heads_than_a_tile_has_rows() -> None:
    check(draw([(20, 3), (7, 1)], num_heads=300, num_kv_heads=1, head_size=8), Scoring(scale=0.2))


@pytest.mark.parametrize("block_size", [1, 3, 16, 17, 128])
def test_block_sizes(block_size: int) -> None:
    check(draw(block_size=block_size), Scoring(scale=0.3, window=33, num_sink_tokens=5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", [{}, {"window": 9, "num_sink_tokens": 4}], ids=str)
def test_what_is_learned(mask: dict[str, Any], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    learned = {"sinks": torch.randn(4, generator=generator), "bias": torch.randn(4, 2 * 20 + 1, generator=generator)}
    for names in (("sinks",), ("bias",), ("sinks", "bias")):
        parameters = {name: learned[name].to(dtype) for name in names}
        check(draw(dtype=dtype), Scoring(scale=0.3, soft_cap=2.0, **mask), **parameters)


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_may_be_of_another_dtype_than_the_cache(dtype: torch.dtype) -> None:
    query, key, value, batch = draw(dtype=dtype)
    for other in DTYPES:
        check((query.to(other), key, value, batch), Scoring(scale=0.3))


@pytest.mark.parametrize("hidden", [0, 3, 13])
def test_hidden_tokens_are_not_seen(hidden: int) -> None:
    query, key, value, batch = draw([(13, 5), (40, 1), (13, 80)])
    starts = whole([hidden, hidden, 0])
    hiding = Batch(
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        block_table=batch.block_table,
        seq_starts=starts,
    )
    key[batch.block_table[0, 0], :hidden] = float("nan")
    value[batch.block_table[0, 0], :hidden] = float("nan")
    check((query, key, value, hiding), Scoring(scale=0.3, window=15, num_sink_tokens=5))


def over_other_keys(*lengths: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Batch]:
    """Return queries and keys of another sequence, with these numbers of each for the requests."""
    _, key, value, batch = draw([(num_keys, 0) for _, num_keys in lengths])
    starts = [0, *torch.tensor([num for num, _ in lengths]).cumsum(0).tolist()]
    query = torch.randn(starts[-1], 4, 32, generator=torch.Generator().manual_seed(2))
    over = Batch(query_start_loc=whole(starts), seq_lens=batch.seq_lens, block_table=batch.block_table, causal=False)
    return query, key, value, over


def test_keys_of_another_sequence() -> None:
    inputs = over_other_keys((1, 40), (19, 3), (140, 70), (1, 300), (2, 1))
    check(inputs, Scoring(scale=0.3))
    # The mask of a layer does not apply there.
    check(inputs, Scoring(scale=0.3, window=3, num_sink_tokens=1))


def test_queries_without_a_key_and_padding_get_zeros() -> None:
    query, key, value, batch = over_other_keys((1, 0), (5, 0), (2, 9))
    query = torch.cat([query, torch.full((3, 4, 32), float("nan"))])
    output = paged_attention(query, key, value, batch, Scoring(scale=0.3), sinks=torch.ones(4))
    assert not output[:6].any()
    assert not output[8:].any()
    assert output[6:8].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_threads", "part_tokens"), [(1, 1), (2, 16), (3, 100)])
def test_parts_and_threads_change_nothing(
    num_threads: int, part_tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "PART_TOKENS", part_tokens)
    torch.set_num_threads(num_threads)
    check(draw(dtype=dtype), Scoring(scale=0.3, window=150, num_sink_tokens=20), sinks=torch.ones(4))
    torch.set_num_threads(1)


def test_one_long_request_is_cut() -> None:
    torch.set_num_threads(2)
    check(draw([(3000, 1)]), Scoring(scale=0.3))
    check(draw([(3000, 2)]), Scoring(scale=0.3))
    torch.set_num_threads(1)


def scattered(values: torch.Tensor) -> torch.Tensor:
    """Return values with unusual strides, between numbers of other tensors."""
    pool = torch.full((len(values), 3, *values.shape[1:]), 77, dtype=torch.float32).to(values.dtype)
    pool[:, 1] = values
    return pool[:, 1]


def coded(code_dtype: torch.dtype, head_size: int, **options: Any) -> tuple[Any, Scales]:
    """Return queries and a batch like ``draw``, with random codes in pages, and random scales for them."""
    query, key, _, batch = draw(head_size=head_size, **options)
    generator = torch.Generator().manual_seed(3)
    shape = key.shape[:3]

    def scale(dtype: torch.dtype) -> torch.Tensor:
        return scattered((torch.rand(shape, generator=generator) * 0.02 + 0.01).to(dtype))

    if code_dtype == torch.uint8:
        codes = [torch.randint(0, 256, (*shape, head_size // 2), generator=generator).to(code_dtype) for _ in range(2)]
        half = torch.float16
        lows = [scattered(torch.randn(shape, generator=generator).to(half)) for _ in range(2)]
        scales = Scales(key_scale=scale(half), value_scale=scale(half), key_min=lows[0], value_min=lows[1])
    else:
        numbers = [torch.randn(*shape, head_size, generator=generator) * 40 for _ in range(2)]
        codes = [vectors.clamp(-127, 127).to(code_dtype) for vectors in numbers]
        scales = Scales(key_scale=scale(torch.float32), value_scale=scale(torch.float32))
    return (query, codes[0], codes[1], batch), scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_size", [8, 30, 64, 128])
@pytest.mark.parametrize("code_dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_codes_with_scales(code_dtype: torch.dtype, head_size: int, dtype: torch.dtype) -> None:
    inputs, scales = coded(code_dtype, head_size, dtype=dtype)
    for mask in ({}, {"window": 9, "num_sink_tokens": 4}):
        check(inputs, Scoring(scale=head_size**-0.5, soft_cap=5.0, **mask), scales=scales, sinks=torch.ones(4))


def test_codes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "PART_TOKENS", 16)
    torch.set_num_threads(2)
    for code_dtype in (torch.float8_e4m3fn, torch.int8, torch.uint8):
        inputs, scales = coded(code_dtype, 32, num_heads=7, num_kv_heads=1)
        check(inputs, Scoring(scale=0.2), scales=scales)
    torch.set_num_threads(1)


def test_every_eight_bit_float_is_read_as_torch_reads_it() -> None:
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    key = torch.zeros(257, 1, 1, 1, dtype=torch.float8_e4m3fn)
    value = key.clone()
    value[1:, 0, 0, 0] = codes
    # One request for each code, and one more query for each so that both kernels are used.
    for num_queries in (1, 2):
        batch = Batch(
            query_start_loc=whole(range(0, 256 * num_queries + 1, num_queries)),
            seq_lens=whole([1] * 256),
            block_table=torch.arange(1, 257, dtype=torch.int32)[:, None],
            causal=False,
        )
        output = paged_attention(torch.ones(256 * num_queries, 1, 1), key, value, batch, Scoring(scale=1.0))
        torch.testing.assert_close(output.flatten()[::num_queries], codes.float(), rtol=0, atol=0, equal_nan=True)


def test_one_factor_for_all() -> None:
    inputs, _ = coded(torch.float8_e4m3fn, 32)
    check(inputs, Scoring(scale=0.01, key_factor=0.5, value_factor=3.0), sinks=torch.ones(4))


def test_large_scores_do_not_overflow() -> None:
    query, key, value, batch = draw()
    check((30 * query, 30 * key, value, batch), Scoring(scale=1.0))


def test_nan_in_a_token_that_is_seen_is_not_hidden() -> None:
    query, key, value, batch = draw([(40, 1), (40, 4)])
    key[batch.block_table[:, 1].long(), 3] = float("nan")
    assert paged_attention(query, key, value, batch, Scoring(scale=0.3)).isnan().all()


def test_strides_of_queries_are_free() -> None:
    query, key, value, batch = draw()
    fused = torch.cat([query, torch.full_like(query, float("nan"))], dim=1)
    check((fused[:, :4], key, value, batch), Scoring(scale=0.3))
    check((query.transpose(0, 1).contiguous().transpose(0, 1), key, value, batch), Scoring(scale=0.3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimization", ["-O0", pytest.param("-O3", marks=pytest.mark.whole)])
@pytest.mark.parametrize(("machine", "num_lanes"), [("-march=x86-64-v3", 8), ("-march=x86-64", 4)])
def test_older_machines(
    machine: str, num_lanes: int, optimization: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "x86" not in platform.machine():
        pytest.skip("these variants are for x86")
    # Compiling a variant as users have it takes ten times as long.
    library = ctypes.CDLL(str(build.build([machine, optimization])))
    assert num_lanes == library.kvframe_lanes()
    monkeypatch.setattr(attention, "load_library", lambda: library)
    for mask in MASKS:
        check(draw(dtype=dtype, head_size=40), Scoring(scale=0.3, **mask))
    check(draw(dtype=dtype), Scoring(scale=0.3, soft_cap=2.0), sinks=torch.ones(4), bias=torch.randn(4, 41))
    for code_dtype in (torch.float8_e4m3fn, torch.int8, torch.uint8):
        inputs, scales = coded(code_dtype, 40, dtype=dtype)
        check(inputs, Scoring(scale=0.2), scales=scales)


def test_the_matrix_unit_is_used_if_the_processor_has_one() -> None:
    assert ("amx_bf16" in CPU_FLAGS) == bool(build.load_library().kvframe_matrix_unit())


@pytest.mark.skipif("amx_bf16" not in CPU_FLAGS, reason="is another machine's usual library")
def test_vectors_are_used_without_a_matrix_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ctypes.CDLL(str(build.build(["-march=native", "-mno-amx-bf16", "-O1"])))
    assert not library.kvframe_matrix_unit()
    monkeypatch.setattr(attention, "load_library", lambda: library)
    for mask in MASKS:
        check(draw(dtype=torch.bfloat16, head_size=40), Scoring(scale=0.3, **mask))


@pytest.mark.parametrize("num_new", [6, 17, 33, 64, 65])
@pytest.mark.parametrize("head_size", [24, 40, 64, 96])
def test_tiles_that_are_not_full(num_new: int, head_size: int) -> None:
    """Of rows, of keys and of elements; another library's shapes of the registers do not matter."""
    lengths = (num_new, num_new), (40 + num_new, num_new)
    check(draw(lengths, dtype=torch.bfloat16, head_size=head_size), Scoring(scale=0.3))
    torch.randn(64, 64, dtype=torch.bfloat16) @ torch.randn(64, 64, dtype=torch.bfloat16)


def test_what_cannot_be_read_is_refused() -> None:
    query, key, value, batch = draw()
    scoring = Scoring(scale=1.0)
    with pytest.raises(ValueError, match=r"query is torch\.float64; the kernels read torch\.float32"):
        paged_attention(query.double(), key, value, batch, scoring)
    with pytest.raises(ValueError, match=r"keys are torch\.float32 and values are torch\.float16"):
        paged_attention(query, key, value.half(), batch, scoring)
    wrong = Batch(query_start_loc=batch.query_start_loc, seq_lens=batch.seq_lens.long(), block_table=batch.block_table)
    with pytest.raises(ValueError, match=r"seq_lens must be int32, not torch\.int64"):
        paged_attention(query, key, value, wrong, scoring)
    for num_kv_heads in (0, 3):
        few = key[:, :, :1].expand(-1, -1, 3, -1)[:, :, :num_kv_heads]
        with pytest.raises(ValueError, match=f"4 query heads cannot share {num_kv_heads} KV heads equally"):
            paged_attention(query, few, few, batch, scoring)


@pytest.mark.parametrize("length", [1, 20])
def test_a_query_that_sees_nothing_gets_zeros_whatever_its_sinks(length: int) -> None:
    query, key, value, batch = draw([(0, length)])
    batch = attrs.evolve(batch, seq_starts=whole([length]))
    for sink in (0.5, float("-inf")):
        output = paged_attention(query, key, value, batch, Scoring(scale=0.2), torch.full((4,), sink))
        assert torch.equal(torch.zeros_like(output), output)


@pytest.mark.parametrize(
    "scoring", [{"window": 2**32 + 5}, {"window": 5, "num_sink_tokens": 2**32}, {"chunk": 2**32 + 5}]
)
def test_masks_that_are_longer_than_any_sequence_hide_nothing(scoring: dict[str, int]) -> None:
    query, key, value, batch = draw()
    expected = paged_attention(query, key, value, batch, Scoring(scale=0.2))
    torch.testing.assert_close(paged_attention(query, key, value, batch, Scoring(scale=0.2, **scoring)), expected)
