"""The shapes of programs for each head size.

They fit the resources of a Hopper multiprocessor (65,536 registers, 227 KiB of shared memory) without a spilled
register, as ``ahead_of_time`` reports them. Among those that fit, they were chosen by what they take on an H200, for
heads of 64, 128 and 256 (``benchmarks/gpu/notes.md``):

- Decodes wait for memory. Two to four programs run on a multiprocessor, each with the loads of two iterations in
  flight. If numbers have to be converted, fewer warps convert more of them each.
- Prompts wait for the tensor cores. With 256 rows, a key is used for twice as many products as with 128 per element
  that is read from the L2 cache. A step of few tokens has too few tiles of that size, and gets smaller ones.
"""

from __future__ import annotations

from functools import cache

from kvframe_kernels.triton.attention_plan import Tiling

_DECODE_PART, _PROMPT_PART = 256, 1024
"""The fewest tokens of a part: the merge of a part costs as much as a few dozen tokens."""


@cache
def suitable_tilings(head_size: int, item_bytes: int, kv_format: str, *, has_bias: bool = False) -> tuple[Tiling, ...]:
    """Return shapes of programs, by ascending rows, as ``StepPlanner`` takes them.

    Args:
        head_size: The larger of the head sizes of keys and values.
        item_bytes: Bytes of an element of the queries.
        kv_format: The format of keys and values.
        has_bias: Whether scores have a bias by distance, which takes registers too.
    """
    if item_bytes == 4:
        # Tensor cores do not multiply float32, so a program's operands are in registers.
        tokens = 32 if head_size <= 128 else 16
        return _masked(16, tokens, warps=8), _masked(32, 16, warps=8, programs=1)
    if head_size > 512:
        return (_masked(16, 16, warps=8, stages=2, programs=1),)
    if head_size > 256:
        return _masked(16, 16), _masked(64, 16, warps=8, programs=1)
    is_nibbles = kv_format == "int4_token_head"
    is_scaled = kv_format.endswith("token_head")
    if head_size > 128:
        if kv_format == "plain":
            return _masked(16, 32, warps=8, programs=2), _masked(64, 32, programs=1), _open(128, 32)
        if is_nibbles:
            return _masked(16, 32), _masked(64, 32, warps=8, programs=1)
        return _masked(16, 32, programs=2), _masked(32, 32, warps=8, programs=1), _open(64, 32)
    decodes = _masked(16, 64, warps=2, programs=4) if is_scaled and not has_bias else _masked(16, 64)
    if is_nibbles:
        return decodes, _masked(32, 32), _masked(64, 32), _open(64, 32, warps=4)
    small = _masked(32, 64, programs=2), _masked(64, 64, programs=2)
    if head_size <= 64 or has_bias:
        return decodes, *small, _open(128, 64)
    if kv_format == "plain":
        return (
            _masked(16, 32, programs=4),
            *small,
            _open(64, 64, warps=4, programs=3),
            _open(256, 32, warps=16),
        )
    return decodes, *small, _open(128, 64), _open(256, 32, warps=16)


def _masked(rows: int, tokens: int, *, warps: int = 4, stages: int = 3, programs: int = 3) -> Tiling:
    """Return a shape in which every block is masked, for few queries."""
    return Tiling(
        block_m=rows,
        block_n=tokens,
        num_warps=warps,
        num_stages=stages,
        programs_per_core=programs,
        min_split=_DECODE_PART,
        mask_all=True,
    )


def _open(rows: int, tokens: int, *, warps: int = 8, programs: int = 1) -> Tiling:
    """Return a shape in which only the blocks at the ends are masked, for many queries."""
    return Tiling(
        block_m=rows,
        block_n=tokens,
        num_warps=warps,
        num_stages=3,
        programs_per_core=programs,
        min_split=_PROMPT_PART,
        mask_all=False,
    )
