"""The device side of paged attention: one kernel for prefill, extend and decode, and one that merges split tiles.

Each program computes one tile over one range of the request's tokens. A tile's rows are a few consecutive queries of
one request, each with the query heads of one KV head. The loop, in ``attention_loop``, masks only the blocks at the
ends of the tokens that a tile sees. Long requests are split over programs as in Flash-Decoding
(https://crfm.stanford.edu/2023/10/12/flashdecoding.html). ``attention`` describes the arguments.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,type-arg,misc"

from __future__ import annotations

import triton
import triton.language as tl

from kvframe_kernels.triton.attention_loop import HEAD_SCALED, NIBBLES, TENSOR_SCALED, attend_run

NUM_ITEM_FIELDS = tl.constexpr(8)
"""Numbers of a work item: row of the block table, first packed query, queries, position of the first query, token after
the last seen one, first token that is not hidden, index of the part of a tile, blocks of ``BLOCK_N`` tokens of a part
(0 for a whole tile). A part's index among the items is also the slot of its result."""
NUM_SPLIT_FIELDS = tl.constexpr(4)
"""Numbers of a split tile: first packed query, queries, slot of the first part, parts."""


@triton.jit
def attend(
    query,
    key,
    value,
    key_scale,
    key_min,
    value_scales,
    value_min,
    sinks,
    bias,
    output,
    lse,
    part_output,
    part_weight,
    numbers,
    first_item,
    block_table,
    range_ends,
    score_scale,
    value_scale,
    soft_cap,
    table_stride,
    chooser_stride,
    table_width,
    query_stride,
    query_head_stride,
    key_block_stride,
    key_stride,
    key_head_stride,
    value_block_stride,
    value_stride,
    value_head_stride,
    scale_block_stride,
    scale_stride,
    scale_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FORMAT: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_SINK_TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_RANGES: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    MAX_DISTANCE: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    IS_ALIKE: tl.constexpr,
    NUM_CHOOSERS: tl.constexpr,
    MASK_ALL: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Compute one work item for up to ``HEADS`` query heads of one KV head."""
    # Programs with consecutive numbers run at the same time. In decodes, these are the heads of one request, which read
    # the same pages. In a prompt, these are tiles of one head, whose keys and values stay in the cache.
    slot = tl.program_id(1 if MASK_ALL else 0)
    item = numbers + first_item + slot * NUM_ITEM_FIELDS
    num_queries = tl.load(item + 2)
    if num_queries == 0:
        return
    table_row = tl.load(item)
    first_query = tl.load(item + 1)
    position = tl.load(item + 3)
    stop = tl.load(item + 4)
    seq_start = tl.load(item + 5)
    part = tl.load(item + 6)
    part_blocks = tl.load(item + 7)

    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    head_program = tl.program_id(0 if MASK_ALL else 1)
    kv_head = head_program // HEAD_TILES
    rows = tl.arange(0, BLOCK_M)
    query_in_tile = rows // HEADS
    head_in_group = head_program % HEAD_TILES * HEADS + rows % HEADS
    is_row = (query_in_tile < num_queries) & (head_in_group < GROUP)
    heads = kv_head * GROUP + head_in_group
    positions = position + query_in_tile

    columns = tl.arange(0, BLOCK_D)
    query_rows = query + (first_query + query_in_tile).to(tl.int64) * query_stride + heads * query_head_stride
    if FORMAT == NIBBLES:
        HALF: tl.constexpr = HEAD_SIZE // 2
        is_column = columns < HALF
        q = tl.load(query_rows[:, None] + columns[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0)
        q_high = tl.load(
            query_rows[:, None] + HALF + columns[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0
        )
        q_sum = tl.sum(q.to(tl.float32), 1) + tl.sum(q_high.to(tl.float32), 1)
        q_high = q_high.to(DOT_DTYPE)
        acc_high = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
        acc_min = tl.zeros([BLOCK_M], dtype=tl.float32)
    else:
        is_column = columns < HEAD_SIZE
        q = tl.load(query_rows[:, None] + columns[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0)
        # Placeholders: only codes of four bits have these three.
        q_high = 0
        q_sum = 0
        acc_high = 0
        acc_min = 0
    q = q.to(DOT_DTYPE)

    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    weight = tl.zeros([BLOCK_M], dtype=tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    if HAS_SINKS:
        # The sink is one more logit in the denominator, once per request.
        sink = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634
        maximum = tl.where(part == 0, sink, maximum)
        weight = tl.where(part == 0, 1.0, weight)

    # The first token that the tile's first query sees, and the one that its last query sees, sink tokens aside.
    low = seq_start
    last_low = seq_start
    last_position = position + num_queries - 1
    if CAUSAL and WINDOW:
        low = tl.maximum(low, position + 1 - WINDOW)
        last_low = tl.maximum(last_low, last_position + 1 - WINDOW)
    if CAUSAL and CHUNK:
        low = tl.maximum(low, position - position % CHUNK)
        last_low = tl.maximum(last_low, last_position - last_position % CHUNK)
    if NUM_CHOOSERS:
        stop = tl.minimum(stop, table_width)
    num_sinks = NUM_SINK_TOKENS
    # The tokens after the last ones that the queries see.
    first_stop = position + 1
    stops = positions + 1
    if HAS_RANGES:
        first_stop = tl.maximum(first_stop, tl.load(range_ends + first_query))
        ends = tl.load(range_ends + first_query + query_in_tile, mask=query_in_tile < num_queries, other=0)
        stops = tl.maximum(stops, ends)
    lo, hi = part_of(low, stop, part, part_blocks, BLOCK_N)

    key += kv_head * key_head_stride
    value += kv_head * value_head_stride
    if FORMAT >= HEAD_SCALED:
        key_scale += kv_head * scale_head_stride
        value_scales += kv_head * scale_head_stride
    if FORMAT == NIBBLES:
        key_min += kv_head * scale_head_stride
        value_min += kv_head * scale_head_stride
    block_table += table_row.to(tl.int64) * table_stride
    if NUM_CHOOSERS:
        block_table += kv_head // (NUM_KV_HEADS // NUM_CHOOSERS) * chooser_stride
    bias_rows = bias
    if MAX_DISTANCE:
        bias_rows = bias + heads * (2 * MAX_DISTANCE + 1) + MAX_DISTANCE
    if HAS_SLOPES:
        bias_rows = tl.load(bias + heads, mask=is_row, other=0.0)

    # Up to four runs of blocks: sink tokens, blocks seen in part, blocks that all queries see, blocks seen in part.
    if CAUSAL and WINDOW and NUM_SINK_TOKENS:
        sink_lo = seq_start // BLOCK_N * BLOCK_N
        sink_hi = tl.minimum((num_sinks + BLOCK_N - 1) // BLOCK_N * BLOCK_N, tl.maximum(low, 0) // BLOCK_N * BLOCK_N)
        sink_hi = tl.where(part == 0, sink_hi, sink_lo)
    if MASK_ALL or NUM_CHOOSERS != 0:
        full_lo = hi
        full_hi = hi
    else:
        full_lo = lo
        if (CAUSAL and (WINDOW or CHUNK)) or HAS_STARTS:
            full_lo = tl.minimum(tl.maximum((last_low + BLOCK_N - 1) // BLOCK_N * BLOCK_N, lo), hi)
        if CAUSAL:
            full_hi = tl.minimum(first_stop // BLOCK_N * BLOCK_N, hi // BLOCK_N * BLOCK_N)
        else:
            full_hi = hi // BLOCK_N * BLOCK_N
        full_hi = tl.maximum(full_hi, full_lo)
    for run in tl.static_range(4):
        if (
            (run == 0 and CAUSAL and WINDOW != 0 and NUM_SINK_TOKENS != 0)
            or (run == 1 and (MASK_ALL or NUM_CHOOSERS != 0 or (CAUSAL and (WINDOW != 0 or CHUNK != 0)) or HAS_STARTS))
            or (run >= 2 and not (MASK_ALL or NUM_CHOOSERS != 0))
        ):
            if run == 0:
                run_lo, run_hi = sink_lo, sink_hi
            elif run == 1:
                run_lo, run_hi = lo, full_lo
            elif run == 2:
                run_lo, run_hi = full_lo, full_hi
            else:
                run_lo, run_hi = full_hi, hi
            acc, acc_high, acc_min, weight, maximum = attend_run(
                acc,
                acc_high,
                acc_min,
                weight,
                maximum,
                q,
                q_high,
                q_sum,
                run_lo,
                run_hi,
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
                HEAD_SIZE,
                HEAD_SIZE_V,
                BLOCK_D,
                BLOCK_DV,
                BLOCK_SIZE,
                BLOCK_N,
                FORMAT,
                CAUSAL,
                WINDOW,
                CHUNK,
                HAS_STARTS,
                HAS_SOFT_CAP,
                MAX_DISTANCE,
                HAS_SLOPES,
                IS_ALIKE,
                NUM_CHOOSERS != 0,
                run != 2,
                DOT_DTYPE,
            )

    # A query that sees nothing gets zeros.
    share = 1.0 / tl.where(weight == 0.0, 1.0, weight)
    if FORMAT == TENSOR_SCALED:
        share = share * value_scale
    acc = acc * share[:, None]
    columns_v = tl.arange(0, BLOCK_DV)
    if FORMAT == NIBBLES:
        acc = acc + (acc_min * share)[:, None]
        acc_high = acc_high * share[:, None] + (acc_min * share)[:, None]
    SIZE: tl.constexpr = HEAD_SIZE_V // 2 if FORMAT == NIBBLES else HEAD_SIZE_V
    is_stored = is_row[:, None] & (columns_v < SIZE)[None, :]
    if part_blocks == 0:
        out_rows = output + (first_query + query_in_tile).to(tl.int64) * (NUM_KV_HEADS * GROUP * HEAD_SIZE_V)
        out_places = (out_rows + heads * HEAD_SIZE_V)[:, None] + columns_v[None, :]
        tl.store(out_places, acc.to(output.dtype.element_ty), mask=is_stored)
        if FORMAT == NIBBLES:
            tl.store(out_places + SIZE, acc_high.to(output.dtype.element_ty), mask=is_stored)
        if HAS_LSE:
            log_sum = log_of(weight, maximum) * 0.6931471805599453
            tl.store(lse + (first_query + query_in_tile).to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads, log_sum, is_row)
    else:
        part_rows = (slot * (NUM_KV_HEADS * HEAD_TILES) + head_program).to(tl.int64) * BLOCK_M + rows
        part_places = (part_output + part_rows * HEAD_SIZE_V)[:, None] + columns_v[None, :]
        tl.store(part_places, acc, mask=is_stored)
        if FORMAT == NIBBLES:
            tl.store(part_places + SIZE, acc_high, mask=is_stored)
        tl.store(part_weight + part_rows, log_of(weight, maximum), mask=is_row)


@triton.jit
def log_of(weight, maximum):
    """Return the logarithm to base 2 of a denominator, the sum of weights relative to a maximum; -inf for none."""
    return tl.where(weight == 0.0, float("-inf"), maximum + tl.log2(tl.where(weight == 0.0, 1.0, weight)))


@triton.jit
def part_of(low, stop, part, part_blocks, BLOCK_N: tl.constexpr):
    """Return the range of tokens, in whole blocks, of one part of a tile that sees ``[low, stop)``."""
    lo = (low // BLOCK_N + part * part_blocks) * BLOCK_N
    hi = tl.where(part_blocks == 0, stop, tl.minimum(stop, lo + part_blocks * BLOCK_N))
    return lo, hi


@triton.jit
def join_parts(
    output,
    lse,
    part_output,
    part_weight,
    numbers,
    first_split,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Merge the results of a tile's parts for one query and head, weighted by their shares of the denominator."""
    split = numbers + first_split + tl.program_id(0) * NUM_SPLIT_FIELDS
    query_in_tile = tl.program_id(1)
    if query_in_tile >= tl.load(split + 1):
        return
    row = tl.load(split) + query_in_tile
    first_slot = tl.load(split + 2)
    num_parts = tl.load(split + 3)
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    head = tl.program_id(2)
    head_in_group = head % GROUP
    head_program = head // GROUP * HEAD_TILES + head_in_group // HEADS
    row_in_tile = query_in_tile * HEADS + head_in_group % HEADS
    columns = tl.arange(0, BLOCK_DV)
    is_column = columns < HEAD_SIZE_V
    acc = tl.zeros([BLOCK_DV], dtype=tl.float32)
    weight = 0.0
    maximum = float("-inf")
    for start in tl.range(0, num_parts, BLOCK_PARTS):
        index = start + tl.arange(0, BLOCK_PARTS)
        is_part = index < num_parts
        slots = ((first_slot + index) * (NUM_KV_HEADS * HEAD_TILES) + head_program).to(tl.int64) * BLOCK_M + row_in_tile
        logs = tl.load(part_weight + slots, mask=is_part, other=float("-inf"))
        vectors = tl.load(
            part_output + slots[:, None] * HEAD_SIZE_V + columns[None, :],
            mask=is_part[:, None] & is_column[None, :],
            other=0.0,
        )
        peak = tl.maximum(maximum, tl.max(logs, 0))
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        shares = tl.exp2(logs - shift)
        fade = tl.exp2(maximum - shift)
        weight = weight * fade + tl.sum(shares, 0)
        acc = acc * fade + tl.sum(vectors * shares[:, None], 0)
        maximum = peak
    if HAS_LSE:
        log_sum = log_of(weight, maximum) * 0.6931471805599453
        tl.store(lse + row.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head, log_sum)
    acc = acc / tl.where(weight == 0.0, 1.0, weight)
    place = output + (row.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head) * HEAD_SIZE_V + columns
    tl.store(place, acc.to(output.dtype.element_ty), mask=is_column)
