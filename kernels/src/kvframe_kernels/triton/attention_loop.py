"""The loop of paged attention over blocks of tokens: scores, masks, an online softmax, and sums of values.

It is the loop of FlashAttention-2 (arXiv 2307.08691) over pages; keys and values of every format are read as they are
stored.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,type-arg,misc"

from __future__ import annotations

import triton
import triton.language as tl

PLAIN = tl.constexpr(0)
"""Keys and values without a format."""
TENSOR_SCALED = tl.constexpr(1)
"""Codes with one scale for all: the caller multiplies ``score_scale`` and ``value_scale`` by it."""
HEAD_SCALED = tl.constexpr(2)
"""Codes with a scale for each token and head. The kinds from here on have such scales."""
NIBBLES = tl.constexpr(3)
"""Codes of four bits, two in a byte, one from each half of a head; with a scale and a minimum per token and head."""


@triton.jit
def attend_run(
    acc,
    acc_high,
    acc_min,
    weight,
    maximum,
    q,
    q_high,
    q_sum,
    lo,
    hi,
    positions,
    stops,
    is_row,
    low,
    stop,
    seq_start,
    num_sinks,
    key,
    value,
    key_scale,
    key_min,
    value_scales,
    value_min,
    bias_rows,
    block_table,
    score_scale,
    soft_cap,
    key_block_stride,
    key_stride,
    value_block_stride,
    value_stride,
    scale_block_stride,
    scale_stride,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FORMAT: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    MAX_DISTANCE: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    IS_ALIKE: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    MASKED: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Return the accumulators after the blocks of ``[lo, hi)``; ``MASKED`` if a row does not see all their tokens."""
    columns = tl.arange(0, BLOCK_D)
    columns_v = tl.arange(0, BLOCK_DV)
    STORED: tl.constexpr = HEAD_SIZE // 2 if FORMAT == NIBBLES else HEAD_SIZE
    STORED_V: tl.constexpr = HEAD_SIZE_V // 2 if FORMAT == NIBBLES else HEAD_SIZE_V
    # An iteration loads the block ids of the next one, so that its loads of keys and values need not wait for them.
    next_block = load_blocks(block_table, lo, hi, BLOCK_SIZE, BLOCK_N, BY_TOKEN)
    for start in tl.range(lo, hi, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        # Tokens that no row sees may hold anything, including NaN, and their page may be freed.
        live = tokens < stop
        if HAS_STARTS:
            live = live & (tokens >= seq_start)
        if CAUSAL and (WINDOW or CHUNK):
            live = live & ((tokens >= low) | (tokens < num_sinks))
        block = next_block.to(tl.int64)
        next_block = load_blocks(block_table, start + BLOCK_N, hi, BLOCK_SIZE, BLOCK_N, BY_TOKEN)
        if BY_TOKEN:
            live = live & (block >= 0)
            within = block % BLOCK_SIZE
            block = block // BLOCK_SIZE
        elif BLOCK_SIZE % BLOCK_N == 0:
            within = start % BLOCK_SIZE + tl.arange(0, BLOCK_N)
        elif BLOCK_N % BLOCK_SIZE == 0:
            within = tl.arange(0, BLOCK_N) % BLOCK_SIZE
        else:
            within = tokens % BLOCK_SIZE
        k_offsets = block * key_block_stride + within * key_stride
        v_offsets = k_offsets if IS_ALIKE else block * value_block_stride + within * value_stride
        k_rows = key + k_offsets
        v_rows = value + v_offsets
        k = _load_rows(k_rows, columns, live, BLOCK_D != STORED, STORED, MASKED)
        if FORMAT == NIBBLES:
            scores = tl.dot(q, tl.trans(_as_numbers(k & 0xF, DOT_DTYPE)), input_precision="ieee")
            scores = tl.dot(q_high, tl.trans(_as_numbers(k >> 4, DOT_DTYPE)), scores, input_precision="ieee")
        else:
            scores = tl.dot(q, tl.trans(k.to(DOT_DTYPE)), input_precision="ieee")
        if FORMAT >= HEAD_SCALED:
            scale_rows = block * scale_block_stride + within * scale_stride
            k_scale = _load_each(key_scale + scale_rows, live, MASKED)
            scores = scores * k_scale[None, :]
        if FORMAT == NIBBLES:
            k_min = _load_each(key_min + scale_rows, live, MASKED)
            scores = scores + q_sum[:, None] * k_min[None, :]

        # From here on, scaled scores are exponents of two.
        if HAS_SOFT_CAP:
            # tanh(x) = 2 / (1 + exp(-2 x)) - 1, and score_scale includes 2 log2(e) / soft_cap.
            scores = soft_cap * (2.0 / (1.0 + tl.exp2(-scores * score_scale)) - 1.0)
        elif MAX_DISTANCE or HAS_SLOPES:
            scores = scores * score_scale
        if MAX_DISTANCE:
            distance = tl.minimum(tl.maximum(tokens[None, :] - positions[:, None], -MAX_DISTANCE), MAX_DISTANCE)
            scores = scores + tl.load(bias_rows[:, None] + distance, mask=is_row[:, None], other=0.0)
        if HAS_SLOPES:
            distance = tl.abs(tokens[None, :] - positions[:, None]).to(tl.float32)
            scores = scores - bias_rows[:, None] * distance
        if MASKED:
            if CAUSAL:
                mask = tokens[None, :] < stops[:, None]
                if WINDOW:
                    mask = mask & ((tokens[None, :] > positions[:, None] - WINDOW) | (tokens < num_sinks)[None, :])
                if CHUNK:
                    mask = mask & (tokens[None, :] >= (positions - positions % CHUNK)[:, None])
                mask = mask & live[None, :]
            else:
                mask = live[None, :]
            scores = tl.where(mask, scores, float("-inf"))
        if HAS_SOFT_CAP or MAX_DISTANCE or HAS_SLOPES:
            peak = tl.maximum(maximum, tl.max(scores, 1))
        else:
            peak = tl.maximum(maximum, tl.max(scores, 1) * score_scale)
        # For a row that has seen no token yet, both are -inf.
        shift = tl.where(peak == float("-inf"), 0.0, peak) if MASKED else peak
        if HAS_SOFT_CAP or MAX_DISTANCE or HAS_SLOPES:
            p = tl.exp2(scores - shift[:, None])
        else:
            p = tl.exp2(scores * score_scale - shift[:, None])
        fade = tl.exp2(maximum - shift)
        weight = weight * fade + tl.sum(p, 1)
        acc = acc * fade[:, None]
        maximum = peak

        v = _load_rows(v_rows, columns_v, live, BLOCK_DV != STORED_V, STORED_V, MASKED)
        if FORMAT == NIBBLES:
            v_min = _load_each(value_min + scale_rows, live, MASKED)
            acc_min = acc_min * fade + tl.sum(p * v_min[None, :], 1)
            v_high = _as_numbers(v >> 4, DOT_DTYPE)
            v = _as_numbers(v & 0xF, DOT_DTYPE)
        else:
            v = v.to(DOT_DTYPE)
        if FORMAT >= HEAD_SCALED:
            v_scale = _load_each(value_scales + scale_rows, live, MASKED)
            if tl.float16 == DOT_DTYPE:
                # The products of weights and scales would be too small for DOT_DTYPE.
                v = (v.to(tl.float32) * v_scale[:, None]).to(DOT_DTYPE)
                if FORMAT == NIBBLES:
                    v_high = (v_high.to(tl.float32) * v_scale[:, None]).to(DOT_DTYPE)
            else:
                p = p * v_scale[None, :]
        if FORMAT == NIBBLES:
            acc_high = tl.dot(p.to(DOT_DTYPE), v_high, acc_high * fade[:, None], input_precision="ieee")
        acc = tl.dot(p.to(DOT_DTYPE), v, acc, input_precision="ieee")
    return acc, acc_high, acc_min, weight, maximum


@triton.jit
def load_blocks(block_table, start, hi, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BY_TOKEN: tl.constexpr):
    """Return the block ids of the tokens from ``start`` on: a single id if all tokens are in one block.

    If the table is ``BY_TOKEN``, it has a slot for each token, and the slots are returned.
    """
    if BY_TOKEN:
        tokens = start + tl.arange(0, BLOCK_N)
        blocks = tl.load(block_table + tokens, mask=tokens < hi, other=-1)
    elif BLOCK_SIZE % BLOCK_N == 0:
        blocks = tl.load(block_table + start // BLOCK_SIZE, mask=start < hi, other=0)
    else:
        tokens = start + tl.arange(0, BLOCK_N)
        blocks = tl.load(block_table + tokens // BLOCK_SIZE, mask=tokens < hi, other=0)
    return blocks


@triton.jit
def _as_numbers(nibbles, DOT_DTYPE: tl.constexpr):
    """Return numbers below 16 in a floating-point dtype."""
    # In the lowest mantissa bits of a power of two, a code is the excess over that power, so no conversion is needed.
    if tl.bfloat16 == DOT_DTYPE:
        numbers = (nibbles.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True) - 128.0
    elif tl.float16 == DOT_DTYPE:
        numbers = (nibbles.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1024.0
    else:
        numbers = nibbles.to(DOT_DTYPE)
    return numbers.to(DOT_DTYPE)


@triton.jit
def _load_rows(rows, columns, live, IS_PADDED: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Return the tokens' vectors; zeros in the padding, and for tokens that are not live if ``MASKED``."""
    places = rows[:, None] + columns[None, :]
    if MASKED and IS_PADDED:
        vectors = tl.load(places, mask=live[:, None] & (columns < SIZE)[None, :], other=0.0)
    elif MASKED:
        vectors = tl.load(places, mask=live[:, None], other=0.0)
    elif IS_PADDED:
        vectors = tl.load(places, mask=(columns < SIZE)[None, :], other=0.0)
    else:
        vectors = tl.load(places)
    return vectors


@triton.jit
def _load_each(places, live, MASKED: tl.constexpr):
    """Return one number for each token, as float32; zeros for tokens that are not live if ``MASKED``."""
    numbers = tl.load(places, mask=live, other=0.0) if MASKED else tl.load(places)
    return numbers.to(tl.float32)
