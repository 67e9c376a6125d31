"""Attention over paged latents: tiles, parts, sizes and layouts; the backend's tests cover steps of an engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from kvframe_kernels.testing import paged, scattered
from kvframe_kernels.triton.attention_plan import Batch, Tiling
from kvframe_kernels.triton.mla import LatentAttention, attend_latents_reference, heads_per_program
from triton import knobs

DEVICE = "cpu" if knobs.runtime.interpret else "cuda"
pytestmark = [] if knobs.runtime.interpret else [pytest.mark.gpu]

SMALL = Tiling(block_m=16, block_n=16, num_warps=4, num_stages=1, programs_per_core=1, min_split=16, mask_all=True)


def run(
    requests: list[tuple[int, int]],
    num_heads: int = 4,
    latent_size: int = 16,
    rope_size: int = 8,
    block_size: int = 16,
    hidden: list[int] | None = None,
    ranges: Sequence[tuple[int, int, int]] = (),
    num_padding: int = 0,
    **options: object,
) -> int:
    """Compute requests of ``(num_computed, num_new)`` tokens; return the number of parts.

    ``ranges`` are a request, the first position and the one after the last one each.
    """
    generator = torch.Generator().manual_seed(len(requests))
    dtype = options.pop("dtype", torch.float32)
    assert isinstance(dtype, torch.dtype)
    seq_lens = np.array([computed + new for computed, new in requests], dtype=np.int32)
    starts = np.cumsum([0, *(new for _, new in requests)], dtype=np.int32)
    num_tokens = int(starts[-1]) + num_padding
    num_blocks = -(-seq_lens // block_size)
    ids = torch.randperm(int(num_blocks.sum()), generator=generator) + 1
    table = torch.zeros(len(requests), int(num_blocks.max()) + 1, dtype=torch.int32)
    _, latent = paged(
        len(ids) + 1, block_size * (latent_size + rope_size) + 7, (block_size, latent_size + rope_size), dtype, DEVICE
    )
    for row, mine in enumerate(ids.split(num_blocks.tolist())):
        table[row, : len(mine)] = mine
        for index, page in enumerate(mine.tolist()):
            live = slice(0, min(block_size, int(seq_lens[row]) - index * block_size))
            latent[page, live] = torch.randn(latent[page, live].shape, generator=generator).to(latent)
    queries = torch.randn(num_tokens, num_heads, latent_size + rope_size, generator=generator).to(DEVICE, dtype)
    absorbed = scattered(queries[..., :latent_size].transpose(-1, 0), generator).transpose(-1, 0).contiguous()
    rotated = queries[..., latent_size:]
    range_ends = np.zeros(num_tokens, dtype=np.int32)
    for row, first, stop in ranges:
        skipped = int(starts[row]) - requests[row][0]
        range_ends[skipped + first : skipped + stop] = stop
    batch = Batch(
        query_start_loc=starts,
        seq_lens=seq_lens,
        seq_starts=None if hidden is None else np.array(hidden, dtype=np.int32),
        num_tokens=num_tokens,
        causal=bool(options.pop("causal", True)),
        max_query_len=max(new for _, new in requests),
        static=bool(options.pop("static", False)),
        range_ends=range_ends if ranges else None,
    )
    attention = LatentAttention(
        num_heads=num_heads,
        latent_size=latent_size,
        rope_size=rope_size,
        block_size=block_size,
        scale=0.3,
        num_cores=4,
        tilings=(SMALL,),
    )
    work = attention.plan(batch, dtype)
    numbers = work.tensor.to(DEVICE)
    table = table.to(DEVICE)
    output = torch.full((num_tokens, num_heads, latent_size), float("nan"), dtype=dtype, device=DEVICE)
    lse = torch.full((num_tokens, num_heads), float("nan"), device=DEVICE)
    for launch in attention.launches(
        absorbed,
        rotated,
        latent,
        table,
        numbers,
        work.programs,
        output,
        causal=batch.causal,
        has_starts=hidden is not None,
        range_ends=torch.from_numpy(range_ends).to(DEVICE) if ranges else None,
        lse=lse,
    ):
        launch.run()
    expected, expected_lse = attend_latents_reference(absorbed, rotated, latent, table, batch, 0.3)
    # Eight times the largest difference that was measured.
    tolerance = 5e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, expected_lse, rtol=tolerance, atol=tolerance)
    return sum(shape_programs.num_slots for shape_programs in work.programs)


@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
def test_decodes_and_prompts_of_any_block_size(block_size: int) -> None:
    run([(0, 1), (15, 1), (30, 4), (0, 17)], block_size=block_size)


def test_a_long_request_is_computed_in_parts() -> None:
    assert 0 == run([(20, 1)] * 4)
    assert 1 < run([(70, 1), (3, 1)])
    assert 1 < run([(70, 3)])


@pytest.mark.parametrize(("num_heads", "latent_size", "rope_size"), [(1, 2, 7), (3, 20, 4), (20, 16, 16), (32, 40, 8)])
def test_any_number_of_heads_and_any_sizes(num_heads: int, latent_size: int, rope_size: int) -> None:
    run([(18, 1), (0, 5)], num_heads, latent_size, rope_size)


def test_hidden_tokens_padding_and_static_shapes() -> None:
    run([(40, 1), (9, 3)], hidden=[37, 0], num_padding=2)
    run([(40, 1), (9, 1)], hidden=[17, 8], num_padding=2, static=True)


def test_queries_may_see_tokens_after_them() -> None:
    run([(10, 9), (0, 4)], causal=False)


@pytest.mark.parametrize("static", [False, True])
def test_queries_see_to_the_ends_of_their_ranges(static: bool) -> None:
    # In one tile, through several, and in a request that is computed in parts.
    run([(20, 1), (0, 7), (3, 9)], ranges=[(1, 2, 6), (2, 3, 8), (2, 8, 12)], num_padding=2, static=static)
    run([(70, 7), (0, 1)], ranges=[(0, 72, 77)], hidden=[9, 0], static=static)
    # Not in a batch in which queries see all tokens anyway.
    run([(10, 9)], ranges=[(0, 12, 15)], causal=False, static=static)


def test_half_precision_is_added_up_in_float32() -> None:
    run([(33, 1), (0, 6)], dtype=torch.float16)


def test_heads_are_shared_out_evenly() -> None:
    assert [1, 3, 16, 40, 48, 64, 64] == [heads_per_program(heads, 64) for heads in (1, 3, 16, 40, 96, 64, 128)]
    assert [16, 10, 1] == [heads_per_program(heads, 16) for heads in (128, 40, 37)]
