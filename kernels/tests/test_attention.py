"""Paged attention against its reference: tiles, parts of tiles, formats, in poisoned pages with strides of any kind."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from kvframe_kernels.attention_reference import attention, read_tokens, visible_tokens
from kvframe_kernels.testing import poisoned
from kvframe_kernels.triton.attention import LOG2_E, PagedAttention
from kvframe_kernels.triton.attention_plan import Batch, Tiling
from triton import knobs

from tests.covering import cover_values

DEVICE = "cpu" if knobs.runtime.interpret else "cuda"
pytestmark = [] if knobs.runtime.interpret else [pytest.mark.gpu]

SMALL = Tiling(block_m=16, block_n=16, num_warps=4, num_stages=2, programs_per_core=1, min_split=16, mask_all=True)
LARGE = Tiling(block_m=32, block_n=16, num_warps=4, num_stages=2, programs_per_core=1, min_split=64, mask_all=False)

STORED = {
    "plain": torch.float32,
    "fp8_tensor": torch.float8_e4m3fn,
    "fp8_token_head": torch.float8_e4m3fn,
    "int8_token_head": torch.int8,
    "int4_token_head": torch.uint8,
}


@dataclass(frozen=True)
class Step:
    """A batch: new tokens and all tokens of each request."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    seq_starts: tuple[int, ...] | None = None
    ranges: tuple[tuple[int, int, int], ...] = ()  # the request, the first position, and the one after the last

    @property
    def range_ends(self) -> torch.Tensor | None:
        ends = torch.zeros(sum(self.query_lens), dtype=torch.int32)
        for request, start, stop in self.ranges:
            first = sum(self.query_lens[: request + 1]) - self.seq_lens[request]
            ends[first + start : first + stop] = stop
        return ends if self.ranges else None

    def batch(self, *, causal: bool = True, padding: int = 0, static: bool = False) -> Batch:
        starts = np.array([0, *itertools.accumulate(self.query_lens)], dtype=np.int32)
        return Batch(
            query_start_loc=starts,
            seq_lens=np.array(self.seq_lens, dtype=np.int32),
            seq_starts=None if self.seq_starts is None else np.array(self.seq_starts, dtype=np.int32),
            num_tokens=int(starts[-1]) + padding,
            causal=causal,
            max_query_len=max(self.query_lens),
            static=static,
            range_ends=None if self.range_ends is None else np.pad(self.range_ends.numpy(), (0, padding)),
        )


DECODES = Step((1, 1, 1), (5, 33, 100))
MIXED = Step((1, 20, 1, 40), (50, 20, 3, 70))


def paged_attention(**options: Any) -> PagedAttention:
    sizes: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "head_size_v": 16, "block_size": 16}
    defaults = {**sizes, "scale": 0.3, "num_cores": 16, "tilings": (SMALL, LARGE)}
    return PagedAttention(**{**defaults, **options})


def strided(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return poison of this shape, with the last axis contiguous, and the others in any order and with gaps."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(3, generator=generator).tolist()
    gaps = torch.randint(0, 3, (4,), generator=generator).tolist()
    room = poisoned([*(shape[axis] + gaps[axis] for axis in order), *(size + gaps[3] for size in shape[3:])], dtype)
    places = [order.index(axis) for axis in range(3)]
    return room.permute(*places, *range(3, len(shape)))[tuple(slice(size) for size in shape)]


def make_cache(served: PagedAttention, num_pages: int, places: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    """Return a cache with numbers at ``places``, and poison elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    base, halves = (num_pages, served.block_size, served.num_kv_heads), 2 if "int4" in served.format else 1
    dtype = STORED[served.format]
    cache: dict[str, torch.Tensor] = {}
    for name, size in (("k", served.head_size), ("v", served.head_size_v)):
        values = 1.5 * torch.randn(places.shape[1], served.num_kv_heads, size // halves, generator=generator)
        if not dtype.is_floating_point:
            values = (40 * values).clamp(-127, 127) + (128 if halves == 2 else 0)
        cache[name] = strided((*base, size // halves), dtype, seed + len(cache))
        cache[name][places[0], places[1]] = values.to(dtype)
        for suffix in ("_scale", "_min")[:halves] if served.format.endswith("token_head") else ():
            # All of these have the same strides.
            cache[name + suffix] = strided(base, torch.float16 if halves == 2 else torch.float32, seed)
            numbers = 0.02 + 0.02 * torch.rand(places.shape[1], served.num_kv_heads, generator=generator)
            cache[name + suffix][places[0], places[1]] = numbers.to(cache[name + suffix].dtype)
    return cache


def check(
    step: Step,
    served: PagedAttention,
    *,
    padding: int = 0,
    static: bool = False,
    has_sinks: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[int]:
    """Compare a step with the reference; return the number of parts that each shape of programs computed."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-length // served.block_size) for length in step.seq_lens]
    pages = (torch.randperm(sum(num_blocks), generator=generator) + 1).split(num_blocks)
    table = torch.nn.utils.rnn.pad_sequence(list(pages), batch_first=True).to(torch.int32)
    tokens = [torch.arange(length) for length in step.seq_lens]
    starts = step.seq_starts or (0,) * len(tokens)
    where = [
        torch.stack([page[token // served.block_size], token % served.block_size])
        for page, token in zip(pages, tokens, strict=True)
    ]
    live = torch.cat([slots[:, start:] for slots, start in zip(where, starts, strict=True)], dim=1)
    cache = make_cache(served, sum(num_blocks) + 1, live, seed)
    query = 1.5 * torch.randn(sum(step.query_lens) + padding, served.num_heads, served.head_size, generator=generator)
    query = query.to(dtype)
    sinks = torch.randn(served.num_heads, generator=generator) if has_sinks else None
    bias: torch.Tensor | None = None
    if served.has_slopes:
        bias = torch.rand(served.num_heads, generator=generator)
    elif served.max_distance:
        bias = torch.randn(served.num_heads, 2 * served.max_distance + 1, generator=generator)

    ends = step.range_ends
    work = served.plan(step.batch(causal=served.causal, padding=padding, static=static), dtype)
    output = poisoned((*query.shape[:2], served.head_size_v), dtype).to(DEVICE)
    for launch in served.launches(
        query.to(DEVICE),
        {name: tensor.to(DEVICE) for name, tensor in cache.items()},
        table.to(DEVICE),
        work.tensor.to(DEVICE),
        work.programs,
        output,
        causal=served.causal,
        has_starts=step.seq_starts is not None,
        sinks=None if sinks is None else sinks.to(DEVICE),
        bias=None if bias is None else (bias * LOG2_E).to(DEVICE),
        range_ends=None if ends is None else torch.nn.functional.pad(ends, (0, padding)).to(DEVICE),
    ):
        launch.run()

    expected = []
    first = 0
    for num_queries, length, start, places in zip(step.query_lens, step.seq_lens, starts, where, strict=True):
        positions = torch.arange(length - num_queries, length)
        mask = visible_tokens(
            positions,
            length,
            causal=served.causal,
            window=served.window,
            num_sink_tokens=served.num_sink_tokens,
            chunk=served.chunk,
            seq_start=start,
            range_ends=None if ends is None else ends[first : first + num_queries],
        )
        scales = (served.k_scale, served.v_scale) if served.format == "fp8_tensor" else (1, 1)
        key, value = (
            read_tokens(cache, served.format, name, places).double() * scale
            for name, scale in zip(("k", "v"), scales, strict=True)
        )
        distance = torch.arange(length)[None] - positions[:, None]
        added = None
        if bias is not None and served.has_slopes:
            added = -bias[:, None, None].double() * distance.abs()
        elif bias is not None:
            far = served.max_distance
            added = bias[:, distance.clamp(-far, far) + far].double()
        expected.append(
            attention(
                query[first : first + num_queries],
                key.masked_fill(torch.arange(length)[:, None, None] < start, 0),
                value.masked_fill(torch.arange(length)[:, None, None] < start, 0),
                mask,
                scale=served.scale,
                soft_cap=served.soft_cap,
                sinks=sinks,
                bias=added,
            )
        )
        first += num_queries
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(output.cpu()[:first].double(), torch.cat(expected), rtol=tolerance, atol=tolerance)
    assert 0 == output.cpu()[first:].abs().sum()
    return [shape_programs.num_slots for shape_programs in work.programs]


def test_short_requests_are_computed_whole_and_long_ones_in_parts() -> None:
    assert [0] == check(Step((1, 1), (5, 16)), paged_attention())
    # Blocks of 16: one, three in two parts, seven in four.
    assert [2 + 4] == check(DECODES, paged_attention())


@pytest.mark.parametrize(("seed", "step"), cover_values(range(3), [DECODES, MIXED]))
def test_pages_may_be_strided_in_any_way(step: Step, seed: int) -> None:
    check(step, paged_attention(), seed=seed)


@pytest.mark.parametrize(("kv_format", "step"), cover_values(STORED, [DECODES, MIXED]))
def test_every_format_is_read_as_it_is_stored(step: Step, kv_format: str) -> None:
    check(step, paged_attention(format=kv_format, k_scale=0.5, v_scale=2.0))


@pytest.mark.parametrize("kv_format", ["fp8_token_head", "int4_token_head"])
def test_scales_are_not_too_small_for_float16(kv_format: str) -> None:
    check(MIXED, paged_attention(format=kv_format), dtype=torch.float16)


MASKS: dict[str, dict[str, Any]] = {
    "window": {"window": 9},
    "window and sink tokens": {"window": 9, "num_sink_tokens": 18},
    "chunks": {"chunk": 18},
    "bidirectional": {"causal": False},
    "soft cap": {"soft_cap": 2.0},
    "negative scale": {"scale": -0.3},
    "bias": {"max_distance": 6},
    "bias and soft cap": {"max_distance": 6, "soft_cap": 2.0},
    "slopes": {"has_slopes": True},
    "slopes and sink tokens": {"has_slopes": True, "window": 9, "num_sink_tokens": 18},
    "slopes, both ways": {"has_slopes": True, "causal": False},
    "slopes and soft cap": {"has_slopes": True, "soft_cap": 2.0},
    "value size": {"head_size_v": 40},
    "three heads in a group": {"num_heads": 6},
    "blocks of 3": {"block_size": 3},
    "blocks of 32": {"block_size": 32},
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_and_features_on_tiles_and_parts_of_tiles(name: str) -> None:
    check(MIXED, paged_attention(**MASKS[name]), has_sinks="sink" in name)


@pytest.mark.parametrize("has_sinks", [False, True])
def test_hidden_starts(has_sinks: bool) -> None:
    step = Step(MIXED.query_lens, MIXED.seq_lens, (17, 0, 2, 30))
    check(step, paged_attention(), has_sinks=has_sinks)


RANGED = Step((1, 20, 3, 70), (50, 20, 90, 100), None, ((1, 2, 19), (2, 87, 90), (3, 31, 95)))
"""With ranges in one tile and through several."""


@pytest.mark.parametrize(
    ("mask", "static"), cover_values([{}, {"window": 9, "num_sink_tokens": 3}, {"chunk": 18}], [False, True])
)
def test_queries_see_to_the_ends_of_their_ranges(mask: dict[str, int], static: bool) -> None:
    check(RANGED, paged_attention(**mask), padding=2, static=static)


def test_more_query_heads_than_a_program_has_rows() -> None:
    rows = Tiling(block_m=64, block_n=16, num_warps=4, num_stages=2, programs_per_core=1, min_split=16, mask_all=True)
    check(Step((1, 3), (40, 9)), paged_attention(num_heads=140, tilings=(rows,), num_cores=4))


@pytest.mark.parametrize("static", [False, True])
def test_padding_gets_zeros(static: bool) -> None:
    check(DECODES, paged_attention(), padding=21, static=static)
    check(MIXED, paged_attention(), padding=3, static=static)
