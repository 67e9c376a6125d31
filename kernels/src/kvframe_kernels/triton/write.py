"""Writes keys and values into pages, plain or in any format of the distribution kvframe-kv-formats.

One launch writes keys and values. The kernel encodes as the format's plain-torch write does, with the same divisions
and the same rounding, so that both write the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from kvframe_kernels.triton.launch import Launch

FORMATS: Mapping[str, int] = {
    "plain": 0,
    "fp8_tensor": 1,
    "fp8_token_head": 2,
    "int8_token_head": 3,
    "int4_token_head": 4,
}
"""The formats of keys and values that the kernel writes, with their numbers in it."""

_PLAIN, _FP8_TENSOR = tl.constexpr(0), tl.constexpr(1)
_FP8_HEAD, _INT8_HEAD, _INT4_HEAD = tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
_TILE = 4096
"""Elements that one program holds, in registers."""

KVCache = Mapping[str, torch.Tensor]
Slots = tuple[torch.Tensor, torch.Tensor]


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: KVCache,
    slots: Slots,
    format_name: str = "plain",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Store new tokens' keys and values.

    Args:
        key: ``[num_tokens, num_kv_heads, head_size], device``.
        value: ``[num_tokens, num_kv_heads, head_size_v], device``.
        kv_cache: The layer's state tensors, ``[num_block_ids, block_size, num_kv_heads, …], device``; written to.
        slots: Block id and offset of each token, ``[num_tokens], int64``, both on the device. If several tokens have
            one slot, as padded tokens do, any of them is stored.
        format_name: The format, of ``FORMATS``.
        k_scale: For ``fp8_tensor``, the factor by which stored keys are multiplied when they are read.
        v_scale: Likewise for values.
    """
    if key.shape[0]:
        write_launch(key, value, kv_cache, slots, format_name, k_scale, v_scale).run()


def write_launch(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: KVCache,
    slots: Slots,
    format_name: str = "plain",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Launch:
    """Return the launch of ``write_kv``."""
    num_tokens, num_heads, _ = key.shape
    arguments: dict[str, Any] = {"blocks": slots[0], "offsets": slots[1], "num_rows": num_tokens * num_heads}
    arguments |= {"num_heads": num_heads, "FORMAT": FORMATS[format_name]}
    for side, source, scale in (("k", key, k_scale), ("v", value, v_scale)):
        pages = kv_cache[side]
        scales, mins = kv_cache.get(f"{side}_scale"), kv_cache.get(f"{side}_min")
        strides = (0, 0, 0) if scales is None else scales.stride()
        arguments |= {
            side: source,
            # The kernel computes codes as whole numbers, because platforms convert floats differently.
            f"{side}_stored": pages.view(torch.uint8) if pages.dtype == torch.float8_e4m3fn else pages,
            f"{side}_scales": scales,
            f"{side}_mins": mins,
            f"{side}_scale": float(scale),
            f"{side}_token": source.stride(0),
            f"{side}_head": source.stride(1),
            f"{side}_element": source.stride(2),
            f"{side}_page": pages.stride(0),
            f"{side}_slot": pages.stride(1),
            f"{side}_stored_head": pages.stride(2),
            f"{side}_stored_element": pages.stride(3),
            f"{side}_scale_page": strides[0],
            f"{side}_scale_slot": strides[1],
            f"{side}_scale_head": strides[2],
            f"SIZE_{side.upper()}": source.shape[-1],
            f"BLOCK_{side.upper()}": triton.next_power_of_2(max(1, source.shape[-1])),
        }
    rows = max(1, _TILE // max(arguments["BLOCK_K"], arguments["BLOCK_V"]))
    rows = min(rows, triton.next_power_of_2(num_tokens * num_heads))
    return Launch(_write, (triton.cdiv(num_tokens * num_heads, rows), 2), arguments | {"ROWS": rows})


def write_kv_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: KVCache,
    slots: Slots,
    format_name: str = "plain",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Compute ``write_kv`` in plain torch."""
    for side, source, scale in (("k", key, k_scale), ("v", value, v_scale)):
        for name, part in _encode(source, side, kv_cache[side].dtype, format_name, scale).items():
            pages = kv_cache[name]
            if part.dtype == torch.float8_e4m3fn:
                pages, part = pages.view(torch.uint8), part.view(torch.uint8)
            pages.index_put_(slots, part)


def _encode(
    source: torch.Tensor, side: str, dtype: torch.dtype, format_name: str, scale: float
) -> dict[str, torch.Tensor]:
    values = source.float()
    if format_name == "plain":
        return {side: source.to(dtype)}
    if format_name == "fp8_tensor":
        return {side: (values / scale).clamp(-448, 448).to(dtype)}
    low, high = values.aminmax(dim=-1, keepdim=True)
    is_finite = (low > -math.inf) & (high < math.inf)
    if format_name == "int4_token_head":
        low = torch.where(is_finite, low.clamp(-65504, 65504), math.nan).half()
        scales = ((high.clamp(-65504, 65504) - low.float()) / 15).clamp_min(0).half()
        largest, above = 15.0, values - low.float()
    else:
        largest = 448.0 if format_name == "fp8_token_head" else 127.0
        scales = torch.where(is_finite, torch.maximum(-low, high) / largest, math.nan)
        above = values
    usable = scales.float() > 0
    codes = torch.where(usable, above, 0) / torch.where(usable, scales.float(), 1)
    if format_name == "int4_token_head":
        first, second = codes.clamp(0, largest).round().to(torch.uint8).chunk(2, -1)
        return {side: first | (second << 4), f"{side}_scale": scales[..., 0], f"{side}_min": low[..., 0]}
    codes = codes.clamp(-largest, largest)
    codes = (codes.round() if dtype == torch.int8 else codes).to(dtype)
    return {side: codes, f"{side}_scale": scales[..., 0]}


@triton.jit
def _nearest(x):  # type: ignore[no-untyped-def]
    """Round to whole numbers, ties to even; ``|x| < 2**22``."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _fp8(x):  # type: ignore[no-untyped-def]
    """Return the bits of ``float8_e4m3fn``: rounded to the nearest, ties to even; saturated; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.where(x == x, tl.abs(x), 0.0), 448.0)
    size_bits = size.to(tl.int32, bitcast=True)
    # Three of 23 bits after the point remain, and the exponent's bias is 7 instead of 127.
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 the numbers are multiples of 2**-9, which is the unit of a float32 at 2**14.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _write_side(  # type: ignore[no-untyped-def]
    source, pages, scales, mins, scale, blocks, offsets, num_rows, num_heads,
    token_stride, head_stride, element_stride, page_stride, slot_stride, stored_head_stride, stored_element_stride,
    scale_page_stride, scale_slot_stride, scale_head_stride,
    FORMAT: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_row = row < num_rows
    token, head = row // num_heads, row % num_heads
    # Distances between pages, and between tokens, may need more than 32 bits.
    block = tl.load(blocks + token, mask=in_row, other=0).to(tl.int64)
    offset = tl.load(offsets + token, mask=in_row, other=0).to(tl.int64)
    source += token.to(tl.int64)[:, None] * token_stride + head[:, None] * head_stride
    pages += (block * page_stride + offset * slot_stride + head * stored_head_stride)[:, None]
    scale_at = block * scale_page_stride + offset * scale_slot_stride + head * scale_head_stride
    e = tl.arange(0, BLOCK)
    inside = in_row[:, None] & (e < SIZE)[None, :]
    if FORMAT == _INT4_HEAD:
        half = tl.arange(0, BLOCK // 2)
        in_half = in_row[:, None] & (half < SIZE // 2)[None, :]
        first = tl.load(source + half[None, :] * element_stride, mask=in_half, other=0.0).to(tl.float32)
        second = tl.load(source + (half + SIZE // 2)[None, :] * element_stride, mask=in_half, other=0.0).to(tl.float32)
        finite = (tl.abs(first) < float("inf")) & (tl.abs(second) < float("inf"))
        is_finite = tl.min(finite.to(tl.int32), axis=1) > 0
        first, second = tl.where(is_finite[:, None], first, 0.0), tl.where(is_finite[:, None], second, 0.0)
        high = tl.max(tl.where(in_half, tl.maximum(first, second), float("-inf")), axis=1)
        low = tl.min(tl.where(in_half, tl.minimum(first, second), float("inf")), axis=1)
        high = tl.minimum(tl.maximum(high, -65504.0), 65504.0)
        low_stored = tl.minimum(tl.maximum(low, -65504.0), 65504.0).to(tl.float16)
        low = low_stored.to(tl.float32)
        step_stored = tl.maximum(tl.div_rn(high - low, 15.0), 0.0).to(tl.float16)
        step = step_stored.to(tl.float32)
        usable = (step > 0)[:, None]
        divisor = tl.where(step > 0, step, 1.0)[:, None]
        first = tl.div_rn(tl.where(usable, first - low[:, None], 0.0), divisor)
        second = tl.div_rn(tl.where(usable, second - low[:, None], 0.0), divisor)
        first = _nearest(tl.minimum(tl.maximum(first, 0.0), 15.0)).to(tl.int32)
        second = _nearest(tl.minimum(tl.maximum(second, 0.0), 15.0)).to(tl.int32)
        codes = (first | (second << 4)).to(tl.uint8)
        tl.store(pages + half[None, :] * stored_element_stride, codes, mask=in_half)
        nothing = tl.full([ROWS], float("nan"), tl.float16)
        tl.store(scales + scale_at, tl.where(is_finite, step_stored, nothing), mask=in_row)
        tl.store(mins + scale_at, tl.where(is_finite, low_stored, nothing), mask=in_row)
    else:
        values = tl.load(source + e[None, :] * element_stride, mask=inside, other=0.0)
        if FORMAT == _PLAIN:
            codes = values.to(pages.dtype.element_ty)
        elif FORMAT == _FP8_TENSOR:
            codes = _fp8(tl.div_rn(values.to(tl.float32), tl.zeros([ROWS, BLOCK], tl.float32) + scale))
        else:
            x = values.to(tl.float32)
            is_finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), axis=1) > 0
            x = tl.where(is_finite[:, None], x, 0.0)
            LARGEST: tl.constexpr = 127.0 if FORMAT == _INT8_HEAD else 448.0
            step = tl.div_rn(tl.max(tl.abs(x), axis=1), LARGEST)
            x = tl.div_rn(tl.where((step > 0)[:, None], x, 0.0), tl.where(step > 0, step, 1.0)[:, None])
            x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
            codes = _nearest(x).to(tl.int8) if FORMAT == _INT8_HEAD else _fp8(x)
            tl.store(scales + scale_at, tl.where(is_finite, step, float("nan")), mask=in_row)
        tl.store(pages + e[None, :] * stored_element_stride, codes, mask=inside)


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    blocks, offsets, num_rows, num_heads,
    k, k_stored, k_scales, k_mins, k_scale, k_token, k_head, k_element, k_page, k_slot, k_stored_head,
    k_stored_element, k_scale_page, k_scale_slot, k_scale_head,
    v, v_stored, v_scales, v_mins, v_scale, v_token, v_head, v_element, v_page, v_slot, v_stored_head,
    v_stored_element, v_scale_page, v_scale_slot, v_scale_head,
    FORMAT: tl.constexpr, SIZE_K: tl.constexpr, BLOCK_K: tl.constexpr, SIZE_V: tl.constexpr, BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    if tl.program_id(1) == 0:
        _write_side(
            k, k_stored, k_scales, k_mins, k_scale, blocks, offsets, num_rows, num_heads, k_token, k_head, k_element,
            k_page, k_slot, k_stored_head, k_stored_element, k_scale_page, k_scale_slot, k_scale_head,
            FORMAT, SIZE_K, BLOCK_K, ROWS,
        )  # fmt: skip
    else:
        _write_side(
            v, v_stored, v_scales, v_mins, v_scale, blocks, offsets, num_rows, num_heads, v_token, v_head, v_element,
            v_page, v_slot, v_stored_head, v_stored_element, v_scale_page, v_scale_slot, v_scale_head,
            FORMAT, SIZE_V, BLOCK_V, ROWS,
        )  # fmt: skip
