"""Attention over the latents of DeepSeek-V3, and over those of few heads; decodes and extends."""

from __future__ import annotations

import numpy as np
import torch
from kvframe_kernels.triton.attention_plan import Batch
from kvframe_kernels.triton.launch import Launch
from kvframe_kernels.triton.mla import LatentAttention

NUM_PAGES, NUM_REQS = 4096, 4


def launches() -> dict[str, Launch]:
    """Return the launches by name."""
    return {
        f"{str(dtype)[6:]}-heads={num_heads}-page={block_size}-new={num_new}{kind}-{index}": launch
        for dtype, num_heads, block_size, num_new, kind in (
            (torch.bfloat16, 128, 64, 1, ""),
            (torch.bfloat16, 128, 16, 1, ""),
            (torch.bfloat16, 16, 64, 1, ""),
            (torch.bfloat16, 16, 16, 9, ""),
            (torch.bfloat16, 16, 64, 9, ""),
            (torch.bfloat16, 128, 64, 9, "-ranges"),
            (torch.float16, 128, 1, 1, ""),
            (torch.bfloat16, 128, 64, 1, "-chosen"),
            (torch.bfloat16, 16, 16, 9, "-chosen"),
            (torch.float32, 128, 64, 1, ""),
        )
        for index, launch in enumerate(_launches(dtype, num_heads, block_size, num_new, kind))
    }


def _launches(dtype: torch.dtype, num_heads: int, block_size: int, num_new: int, kind: str) -> list[Launch]:
    def tensor(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    has_ranges, by_token = kind == "-ranges", kind == "-chosen"
    attention = LatentAttention(
        num_heads=num_heads, latent_size=512, rope_size=64, block_size=block_size, scale=0.1, by_token=by_token
    )
    num_tokens = NUM_REQS * num_new
    batch = Batch(
        query_start_loc=np.arange(0, num_tokens + 1, num_new, dtype=np.int32),
        seq_lens=np.full(NUM_REQS, 8192, dtype=np.int32),
        seq_starts=None,
        num_tokens=num_tokens,
        causal=not by_token,
        max_query_len=num_new,
    )
    work = attention.plan(batch, dtype)
    numbers = tensor(*work.numbers.shape, of=torch.int32)
    query = tensor(num_tokens, num_heads, 192)
    latents = tensor(num_tokens, num_heads, 512)
    pages = tensor(NUM_PAGES, block_size, 576)
    table = tensor(*((num_tokens, 2048) if by_token else (NUM_REQS, 8192 // block_size)), of=torch.int32)
    range_ends = tensor(num_tokens, of=torch.int32) if has_ranges else None
    arguments = latents, query[..., 128:], pages, table, numbers, work.programs, latents
    return [*attention.launches(*arguments, causal=batch.causal, range_ends=range_ends)]
