"""The device side of latent attention: all query heads share one vector per token, whose first part is the value too.

It is the absorbed form of DeepSeek-V2 (arXiv 2405.04434, 2.1). A tile of latents is loaded once and multiplied twice,
as in FlashMLA (github.com/deepseek-ai/FlashMLA). The loop is that of ``attention_loop``, the work items are those of
``attention_kernel``.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from kvframe_kernels.triton.attention_kernel import NUM_ITEM_FIELDS, log_of, part_of
from kvframe_kernels.triton.attention_loop import load_blocks


@triton.jit
def attend_latents(
    absorbed,
    rotated,
    latent,
    output,
    lse,
    part_output,
    part_weight,
    numbers,
    first_item,
    block_table,
    range_ends,
    score_scale,
    table_stride,
    table_width,
    absorbed_stride,
    absorbed_head_stride,
    rotated_stride,
    rotated_head_stride,
    block_stride,
    token_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE_V: tl.constexpr,
    ROPE_SIZE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_RANGES: tl.constexpr,
    HAS_LSE: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Compute one work item for ``HEADS`` query heads, which count as those of one KV head."""
    slot = tl.program_id(0)
    item = numbers + first_item + slot * NUM_ITEM_FIELDS
    num_queries = tl.load(item + 2)
    if num_queries == 0:
        return
    table_row = tl.load(item)
    first_query = tl.load(item + 1)
    position = tl.load(item + 3)
    stop = tl.load(item + 4)
    seq_start = tl.load(item + 5)
    part_blocks = tl.load(item + 7)
    if BY_TOKEN:
        stop = tl.minimum(stop, table_width)
    lo, hi = part_of(seq_start, stop, tl.load(item + 6), part_blocks, BLOCK_N)

    head_program = tl.program_id(1)
    rows = tl.arange(0, BLOCK_M)
    query_in_tile = rows // HEADS
    heads = head_program * GROUP + rows % HEADS
    is_row = query_in_tile < num_queries
    # The tokens after the last ones that the queries see.
    stops = position + query_in_tile + 1
    if HAS_RANGES:
        stops = tl.maximum(stops, tl.load(range_ends + first_query + query_in_tile, mask=is_row, other=0))
    columns = tl.arange(0, BLOCK_L)
    columns_r = tl.arange(0, BLOCK_R)
    in_l = columns < HEAD_SIZE_V
    in_r = columns_r < ROPE_SIZE
    packed = (first_query + query_in_tile).to(tl.int64)
    q_rows = absorbed + packed * absorbed_stride + heads * absorbed_head_stride
    q = tl.load(q_rows[:, None] + columns[None, :], mask=is_row[:, None] & in_l[None, :], other=0.0).to(DOT_DTYPE)
    q_rows = rotated + packed * rotated_stride + heads * rotated_head_stride
    q_r = tl.load(q_rows[:, None] + columns_r[None, :], mask=is_row[:, None] & in_r[None, :], other=0.0).to(DOT_DTYPE)

    acc = tl.zeros([BLOCK_M, BLOCK_L], dtype=tl.float32)
    weight = tl.zeros([BLOCK_M], dtype=tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    block_table += table_row.to(tl.int64) * table_stride
    # An iteration loads the block ids of the next one, so that its loads of latents need not wait for them.
    next_block = load_blocks(block_table, lo, hi, BLOCK_SIZE, BLOCK_N, BY_TOKEN)
    for start in tl.range(lo, hi, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        # Tokens that no row sees may hold anything, including NaN, and their page may be freed. Masks cost little
        # beside the products here, and a second loop without masks would need more registers than there are.
        live = tokens < stop
        if HAS_STARTS:
            live = live & (tokens >= seq_start)
        block = next_block.to(tl.int64)
        next_block = load_blocks(block_table, start + BLOCK_N, hi, BLOCK_SIZE, BLOCK_N, BY_TOKEN)
        if BY_TOKEN:
            live = live & (block >= 0)
            within = block % BLOCK_SIZE
            block = block // BLOCK_SIZE
        elif BLOCK_SIZE % BLOCK_N == 0:
            within = start % BLOCK_SIZE + tl.arange(0, BLOCK_N)
        else:
            within = tokens % BLOCK_SIZE
        vectors = latent + block * block_stride + within * token_stride
        c = tl.load(vectors[:, None] + columns[None, :], mask=live[:, None] & in_l[None, :], other=0.0)
        vectors += HEAD_SIZE_V
        r = tl.load(vectors[:, None] + columns_r[None, :], mask=live[:, None] & in_r[None, :], other=0.0)
        c = c.to(DOT_DTYPE)
        scores = tl.dot(q_r, tl.trans(r.to(DOT_DTYPE)), input_precision="ieee")
        # From here on, scores are exponents of two.
        scores = tl.dot(q, tl.trans(c), scores, input_precision="ieee") * score_scale
        mask = live[None, :]
        if CAUSAL:
            mask = mask & (tokens[None, :] < stops[:, None])
        scores = tl.where(mask, scores, float("-inf"))
        peak = tl.maximum(maximum, tl.max(scores, 1))
        # For a row that has seen no token yet, both are -inf.
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        p = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(maximum - shift)
        weight = weight * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(DOT_DTYPE), c, acc * fade[:, None], input_precision="ieee")
        maximum = peak

    # A query that sees nothing gets zeros.
    acc = acc / tl.where(weight == 0.0, 1.0, weight)[:, None]
    is_stored = is_row[:, None] & in_l[None, :]
    if part_blocks == 0:
        out_rows = output + (packed * (NUM_KV_HEADS * GROUP) + heads) * HEAD_SIZE_V
        tl.store(out_rows[:, None] + columns[None, :], acc.to(output.dtype.element_ty), mask=is_stored)
        if HAS_LSE:
            log_sum = log_of(weight, maximum) * 0.6931471805599453
            tl.store(lse + packed * (NUM_KV_HEADS * GROUP) + heads, log_sum, mask=is_row)
    else:
        part_rows = (slot * NUM_KV_HEADS + head_program).to(tl.int64) * BLOCK_M + rows
        tl.store((part_output + part_rows * HEAD_SIZE_V)[:, None] + columns[None, :], acc, mask=is_stored)
        tl.store(part_weight + part_rows, log_of(weight, maximum), mask=is_row)
