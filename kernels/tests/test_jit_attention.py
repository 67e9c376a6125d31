"""The loops that numba compiles agree with the reference, for any division of the work and any threads."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from kvframe_kernels.attention_reference import attention, read_tokens, visible_tokens
from kvframe_kernels.jit import plan as planning
from kvframe_kernels.jit import threads
from kvframe_kernels.jit.attention import Batch, paged_attention
from kvframe_kernels.jit.plan import Mask, Work, plan

HEADS, KV_HEADS, SIZE, BLOCK = 6, 2, 24, 5
CAUSAL = Mask(causal=True, window=0, num_sink_tokens=0, chunk=0)
REQUESTS = ((70, 1), (3, 9), (0, 1), (40, 3), (60, 33))
RANGES = ((1, 4, 9), (1, 10, 12), (3, 40, 43), (4, 61, 90))
"""The request, the first position, and the one after the last."""


def run(
    dtype: torch.dtype, mask: Mask, num_threads: int = 2, *, with_ends: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the loops and the reference compute on pages among NaN; ``with_ends``: with ranges."""
    generator = torch.Generator().manual_seed(5)
    starts, lens = np.cumsum([0, *(new for _, new in REQUESTS)]), np.array([old + new for old, new in REQUESTS])
    num_blocks = -(-lens // BLOCK)
    table = torch.zeros(len(lens), int(num_blocks.max()), dtype=torch.int32)
    ids = (torch.randperm(int(num_blocks.sum()), generator=generator) + 1).int().split(num_blocks.tolist())
    pool = torch.full((int(num_blocks.sum()) + 1, 2, BLOCK, KV_HEADS, SIZE + 1), math.nan).to(dtype)
    query = torch.randn(int(starts[-1]), HEADS, SIZE, generator=generator).to(dtype)
    key, value = pool[:, 0, ..., :SIZE], pool[:, 1, ..., :SIZE]
    places = []
    for row, part in enumerate(ids):
        table[row, : len(part)] = part
        tokens = torch.arange(int(lens[row]))
        places.append(torch.stack([part.long()[tokens // BLOCK], tokens % BLOCK]))
        for state in (key, value):
            state[tuple(places[-1])] = torch.randn(len(tokens), KV_HEADS, SIZE, generator=generator).to(dtype)
    ends = np.zeros(len(query), np.int32)
    for row, start, stop in RANGES:
        first = starts[row] - REQUESTS[row][0]
        ends[first + start : first + stop] = stop
    work = plan(starts, lens, None, len(query), mask, HEADS, KV_HEADS, num_threads, ends if with_ends else None)
    range_ends = torch.from_numpy(ends) if with_ends else None
    batch = Batch(work=work, block_table=table, mask=mask, range_ends=range_ends)
    output = paged_attention(query, key, value, batch, scale=0.3)
    expected = []
    for row, (old, new) in enumerate(REQUESTS):
        k, v = (read_tokens({"k": key, "v": value}, "plain", name, places[row]) for name in "kv")
        visible = visible_tokens(
            torch.arange(old, old + new),
            old + new,
            causal=mask.causal,
            window=mask.window,
            num_sink_tokens=mask.num_sink_tokens,
            chunk=mask.chunk,
            seq_start=0,
            range_ends=None if range_ends is None else range_ends[starts[row] : starts[row + 1]],
        )
        expected.append(attention(query[starts[row] : starts[row + 1]].float(), k, v, visible, scale=0.3))
    return output, torch.cat(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "mask",
    [
        CAUSAL,
        Mask(causal=True, window=7, num_sink_tokens=3, chunk=0),
        Mask(causal=True, window=0, num_sink_tokens=0, chunk=16),
        Mask(causal=False, window=0, num_sink_tokens=0, chunk=0),
    ],
    ids=str,
)
def test_the_loops_compute_what_the_reference_does(dtype: torch.dtype, mask: Mask) -> None:
    output, expected = run(dtype, mask)
    assert dtype == output.dtype
    # The loops sum in float32 for every dtype, so only the rounding of the result differs.
    # Ten times the largest difference that was measured; in 16 bits that is half a unit on any machine.
    tolerance = {torch.float32: 4e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(output.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "mask",
    [
        CAUSAL,
        Mask(causal=True, window=7, num_sink_tokens=3, chunk=0),
        Mask(causal=True, window=0, num_sink_tokens=0, chunk=16),
        Mask(causal=False, window=0, num_sink_tokens=0, chunk=0),
    ],
    ids=str,
)
def test_ranges(mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    output, expected = run(torch.float32, mask, with_ends=True)
    torch.testing.assert_close(output, expected, rtol=4e-6, atol=4e-6)
    monkeypatch.setattr(planning, "MIN_PART_TOKENS", 6)
    torch.testing.assert_close(run(torch.float32, mask, 3, with_ends=True)[0], expected, rtol=4e-6, atol=4e-6)


@pytest.mark.parametrize("pool", ["torch's", "python's"])
def test_any_cut_and_any_threads_give_the_same(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one_thread_output, _ = run(torch.float32, CAUSAL, num_threads=1)
    monkeypatch.setattr(planning, "SMALL", 0)
    monkeypatch.setattr(planning, "MIN_PART_TOKENS", 6)
    if pool == "python's":
        monkeypatch.setattr(threads, "_start_in_torchs_threads", lambda: None)
    torch.testing.assert_close(run(torch.float32, CAUSAL, num_threads=3)[0], one_thread_output, rtol=2e-6, atol=2e-6)


def work_of(requests: list[tuple[int, int]], mask: Mask = CAUSAL, num_threads: int = 2) -> Work:
    starts = np.cumsum([0, *(new for _, new in requests)])
    lens = np.array([old + new for old, new in requests])
    return plan(starts, lens, None, int(starts[-1]), mask, 8, 2, num_threads)


def test_one_long_query_is_cut_into_parts_for_all_threads() -> None:
    work = work_of([(8191, 1)], num_threads=2)
    assert [[1024 * part, 1024 * (part + 1)] for part in range(8)] == work.items[:, 3:5].tolist()
    assert [1, 2, 3, 4, 5, 6, 7, 8] == work.items[:, 11].tolist()
    assert [0, 8] == work.first_part.tolist()


def test_decodes_as_many_as_there_are_threads_or_more_are_not_cut() -> None:
    work = work_of([(2047, 1)] * 16)
    assert 16 == len(work.items)
    assert [0] * 17 == work.first_part.tolist()


def test_several_queries_are_tiles_of_one_kv_head_each() -> None:
    work = work_of([(5, 20)])
    # 8 queries of 4 heads are 32 rows.
    assert [[0, 8], [0, 8], [8, 8], [8, 8], [16, 4], [16, 4]] == work.items[:, 1:3].tolist()
    assert [[0, 1], [1, 2]] * 3 == work.items[:, 9:11].tolist()


def test_a_window_starts_where_the_first_query_of_a_tile_sees() -> None:
    mask = Mask(causal=True, window=10, num_sink_tokens=4, chunk=0)
    (item,) = work_of([(99, 1)], mask).items
    assert [90, 100, 0, 4] == item[3:7].tolist()


def test_little_work_wakes_no_thread() -> None:
    assert 1 == work_of([(3, 1)], num_threads=4).num_threads
    assert 4 == work_of([(2047, 1)] * 16, num_threads=4).num_threads
