"""Shapes of programs for the sizes of heads, chosen from what they take of a Hopper multiprocessor."""

from __future__ import annotations

from functools import cache

from kvframe_kernels.triton.attention_plan import Tiling


@cache
def suitable_tilings(head_size: int, item_bytes: int, kv_format: str) -> tuple[Tiling, ...]:
    """Return shapes of programs, by ascending rows.

    Args:
        head_size: The larger of those of keys and values.
        item_bytes: Bytes of an element of the queries.
        kv_format: How keys and values are stored.
    """
    # Nibbles have two accumulators.
    rows = 64 if kv_format == "int4_token_head" else 128
    small = Tiling(block_m=16, block_n=64, num_warps=4, num_stages=3, programs_per_core=4, min_split=256, mask_all=True)
    large = Tiling(
        block_m=rows,
        block_n=64,
        num_warps=rows // 16,
        num_stages=3,
        programs_per_core=1,
        min_split=1024,
        mask_all=False,
    )
    return small, large
