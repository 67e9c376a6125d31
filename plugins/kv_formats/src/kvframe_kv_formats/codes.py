"""The arithmetic of the formats in plain torch: the reference for kernels.

Everything is computed in float32. Divisions and products are those of IEEE 754, rounded to the nearest, ties to even.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache

import torch

FP8_MAX = 448.0
"""The largest ``float8_e4m3fn``."""

FP16_MAX = 65504.0

MAX_NIBBLE = 15

CHUNK_ELEMENTS = 1 << 17
"""Elements that are read at once on a CPU: as float32 they stay in a core's cache until they are written."""


def put(state: torch.Tensor, slots: tuple[torch.Tensor, torch.Tensor], part: torch.Tensor) -> None:
    """Store one part of each token.

    Args:
        state: ``[num_block_ids, block_size, num_kv_heads, …], device``; written to.
        slots: Block id and offset of each token, ``[num_tokens], int64``, both on the device.
        part: ``[num_tokens, num_kv_heads, …], device``, of the same dtype.
    """
    if state.dtype == torch.float8_e4m3fn:
        state, part = state.view(torch.uint8), part.view(torch.uint8)
    state.index_put_(slots, part)


def read_pages(
    parts: Mapping[str, torch.Tensor],
    block_ids: torch.Tensor,
    out: torch.Tensor,
    decode: Callable[[str, Mapping[str, torch.Tensor], torch.Tensor], None],
    side: str,
) -> None:
    """Copy whole pages of keys, or of values.

    Args:
        parts: The parts' state tensors by name, ``[num_block_ids, block_size, num_kv_heads, …], device``.
        block_ids: ``[num_pages], int32 or int64, device``.
        out: ``[num_pages, block_size, num_kv_heads, size], device``; written to.
        decode: Turns parts into vectors, in float32.
        side: ``"k"`` or ``"v"``, which is passed to ``decode``.
    """
    num_pages = block_ids.shape[0]
    step = max(1, CHUNK_ELEMENTS // max(1, math.prod(out.shape[1:]))) if out.device.type == "cpu" else num_pages
    direct = out.dtype == torch.float32
    buffer = None if direct else out.new_empty(min(step, num_pages), *out.shape[1:], dtype=torch.float32)
    for start in range(0, num_pages, max(1, step)):
        ids, target = block_ids[start : start + step], out[start : start + step]
        taken = {name: _take(state, ids) for name, state in parts.items()}
        if buffer is None:
            decode(side, taken, target)
        else:
            values = buffer[: len(ids)]
            decode(side, taken, values)
            target.copy_(values)


def widen_fp8(codes: torch.Tensor, out: torch.Tensor) -> None:
    """Write floats of eight bits as float32.

    Args:
        codes: ``[…], float8_e4m3fn, device``.
        out: Of the same shape, ``float32, device``; written to.
    """
    if codes.device.type == "cpu" and codes.is_contiguous() and out.is_contiguous():
        # On a CPU, a look-up in all 256 values is several times as fast as converting each.
        index = codes.view(torch.uint8).flatten().int()
        torch.index_select(_fp8_values(), 0, index, out=out.view(-1))
    else:
        out.copy_(codes)


@cache
def _fp8_values() -> torch.Tensor:
    """Return the value of every code, ``[256], float32, host``."""
    with torch.inference_mode(False):
        return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()


def _take(state: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    if state.dtype == torch.float8_e4m3fn:
        return state.view(torch.uint8).index_select(0, ids).view(state.dtype)
    return state.index_select(0, ids)


def to_fp8(values: torch.Tensor) -> torch.Tensor:
    """Return float32 values as ``float8_e4m3fn``; too large values saturate, NaN stays NaN."""
    return values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def absmax_scale(values: torch.Tensor, largest: float) -> torch.Tensor:
    """Return the scale that maps ``largest`` to the largest element of each vector, ``[…], float32``.

    It is NaN if an element is not finite, and 0 for a vector of zeros.
    """
    absmax = values.abs().amax(-1)
    return torch.where(absmax < math.inf, absmax / largest, math.nan)


def to_codes(values: torch.Tensor, scale: torch.Tensor, dtype: str, largest: float) -> torch.Tensor:
    """Return ``values / scale`` as codes; 0 where the scale is 0 or NaN."""
    scale = scale.unsqueeze(-1)
    # Elements without a valid scale are 0 / 1, because platforms convert NaN to different codes.
    codes = torch.where(scale > 0, values, 0) / torch.where(scale > 0, scale, 1)
    codes = codes.clamp_(-largest, largest)
    if dtype == "int8":
        codes.round_()
    return codes.to(getattr(torch, dtype))


def range_scale(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and the smallest element of each vector, both ``[…], float16``.

    Both are NaN if an element is not finite. The scale is 0 if all elements are equal in float16.
    """
    low, high = values.aminmax(dim=-1)
    is_finite = (low > -math.inf) & (high < math.inf)
    low = torch.where(is_finite, low.clamp(-FP16_MAX, FP16_MAX), math.nan).to(torch.float16)
    scale = (high.clamp(-FP16_MAX, FP16_MAX) - low.float()) / MAX_NIBBLE
    return scale.clamp_min_(0).to(torch.float16), low


def to_nibbles(values: torch.Tensor, scale: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return ``(values - low) / scale`` in four bits, two to a byte, ``[…, size / 2], uint8``."""
    scale, low = scale.float().unsqueeze(-1), low.float().unsqueeze(-1)
    # False if either is NaN.
    is_usable = scale > 0
    codes = torch.where(is_usable, values - low, 0) / torch.where(is_usable, scale, 1)
    first, second = codes.clamp_(0, MAX_NIBBLE).round_().to(torch.uint8).chunk(2, -1)
    return first | (second << 4)


def from_nibbles(codes: torch.Tensor, scale: torch.Tensor, low: torch.Tensor, out: torch.Tensor) -> None:
    """Write ``code * scale + low`` of each element to ``out``, ``[…, size], float32``."""
    scale, low = scale.float().unsqueeze(-1), low.float().unsqueeze(-1)
    first, second = out.chunk(2, -1)
    first.copy_(codes & MAX_NIBBLE)
    second.copy_(codes >> 4)
    out.mul_(scale).add_(low)
