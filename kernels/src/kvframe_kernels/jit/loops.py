"""The compiled loops of paged attention over a range of a step's work items, with the interpreter's lock released.

Tokens are read in blocks, with an online softmax (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, arXiv
2205.14135). The query heads of a KV head, and a tile's queries, are rows that share each key and value; several rows
are computed together. Long single queries are split over their tokens (Flash-Decoding, PyTorch's blog, 2023).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from kvframe_kernels.jit.numbers import FAST, exponential, tangent
from kvframe_kernels.jit.products import (
    KEY_PART,
    KEYS,
    ROWS,
    VALUE_PART,
    VALUES,
    ZERO,
    add_values,
    fetch_row,
    multiply_keys,
    padded,
)
from kvframe_kernels.jit.vectors import LANES, larger, load, load_stored, spread, store, zero_where_at_most

TOKENS = 32
"""Tokens of a block."""

AHEAD_BYTES = 1 << 15
"""The distance of prefetches ahead of the computation, in bytes: processors prefetch within a page at best."""

LINE_BYTES = 64
"""The size of a processor's cache line."""

HIDDEN = np.float32(-1e30)
"""The score of a hidden token: finite, so that a row that sees no token of a block does not become NaN."""


class Rows(NamedTuple):
    """The rows of a work item, sorted by KV head, then query, then query head. Unused rows fill up each KV head's rows.

    Attributes:
        first_query: The query of the first rows.
        first_head: The KV head of the first rows.
        num_kv_heads: KV heads.
        group: Query heads of a KV head.
        num_used: Rows of a KV head, without unused ones.
        per_head: Rows of a KV head, with unused ones: a multiple of ``ROWS``.
        total: All rows, padded to a multiple of ``LANES``.
    """

    first_query: int
    first_head: int
    num_kv_heads: int
    group: int
    num_used: int
    per_head: int
    total: int


@njit(forceinline=True)
def _query_head(rows: Any, head: int, row: int) -> Any:
    """Return the query head of a KV head's row."""
    return (rows.first_head + head) * rows.group + row % rows.group


@njit(error_model="numpy")
def _read_queries(query: Any, rows: Any) -> Any:
    """Return the rows' queries one after the other, each padded with zeros; unused rows are zeros."""
    num_heads, head_size = query.shape[1:]
    numbers, width = query.reshape(query.size), padded(head_size, KEY_PART)
    queries = np.zeros(rows.total * width, np.float32)
    for head in range(rows.num_kv_heads):
        for row in range(rows.num_used):
            token, query_head = rows.first_query + row // rows.group, _query_head(rows, head, row)
            start, at = (head * rows.per_head + row) * width, (token * num_heads + query_head) * head_size
            for d in range(0, head_size, LANES):
                store(queries, start + d, load_stored(numbers, at + d, head_size - d))
    return queries


@njit(error_model="numpy")
def _find_tokens(starts: Any, strides: Any, pages: Any, block_size: int, token: int, stop: int) -> None:
    """Set the offsets of tokens from ``token`` on; after the last token they repeat it, and it gets no weight."""
    page, offset = token // block_size, token % block_size
    for t in range(len(starts)):
        starts[t] = np.int64(pages[page]) * strides[0] + offset * strides[1]
        if token + t + 1 < stop:
            offset += 1
            if offset == block_size:
                page, offset = page + 1, 0


@njit(forceinline=True, error_model="numpy")
def _first_seen(at: int, window: int, chunk: int) -> int:
    """Return the first token, sink tokens aside, that a causal query at a position sees."""
    low = 0 if window == 0 else at + 1 - window
    return low if chunk == 0 else max(low, at - at % chunk)


@njit(forceinline=True, error_model="numpy")
def _stop_seen(at: int, query: int, range_ends: Any) -> int:
    """Return the token after the last one that a causal query at a position sees."""
    return max(at + 1, range_ends[query]) if len(range_ends) else at + 1


@njit(error_model="numpy")
def _hide(
    scores: Any,
    rows: Any,
    token: int,
    count: int,
    position: int,
    window: int,
    num_sink_tokens: int,
    chunk: int,
    range_ends: Any,
) -> None:
    """Hide the tokens of a block that causal queries do not see; the first query is at ``position``."""
    last = position + (rows.num_used - 1) // rows.group
    first_stop = _stop_seen(position, rows.first_query, range_ends)
    if token + count <= first_stop and token >= _first_seen(last, window, chunk):
        return
    for row in range(rows.num_used):
        query = row // rows.group
        low = _first_seen(position + query, window, chunk)
        stop = _stop_seen(position + query, rows.first_query + query, range_ends)
        for t in range(count):
            if token + t >= stop or (token + t < low and token + t >= num_sink_tokens):
                for head in range(rows.num_kv_heads):
                    scores[t * rows.total + head * rows.per_head + row] = HIDDEN


@njit(error_model="numpy")
def _add_bias(scores: Any, rows: Any, token: int, count: int, position: int, bias: Any) -> None:
    """Add the bias by distance; distances beyond the table use its nearest entry. A single entry is a slope."""
    max_distance = bias.shape[1] // 2
    for head in range(rows.num_kv_heads):
        for row in range(rows.num_used):
            at, query_head = position + row // rows.group, _query_head(rows, head, row)
            if max_distance == 0:
                slope = bias[query_head, 0]
                for t in range(count):
                    distance = np.float32(abs(token + t - at))
                    scores[t * rows.total + head * rows.per_head + row] -= slope * distance
                continue
            for t in range(count):
                distance = min(max(token + t - at, -max_distance), max_distance)
                scores[t * rows.total + head * rows.per_head + row] += bias[query_head, max_distance + distance]


@njit(fastmath=FAST, error_model="numpy")
def _cap(scores: Any, num_scores: int, soft_cap: Any) -> None:
    """Keep scores within the soft cap (Gemma 2, arXiv 2408.00118)."""
    for at in range(0, num_scores, LANES):
        store(scores, at, tangent(load(scores, at) * (np.float32(1) / soft_cap)) * soft_cap)


@njit(fastmath=FAST, error_model="numpy")
def _weigh(scores: Any, count: int, largest: Any, weights: Any, shares: Any) -> None:
    """Turn a block's scores into weights; the weights after the block's tokens are zero.

    Args:
        scores: ``[TOKENS * num_rows], float32``: token by token.
        count: Tokens of the block.
        largest: ``[num_rows], float32``: the rows' largest scores so far.
        weights: ``[num_rows], float32``: their sums of weights so far.
        shares: ``[num_rows], float32``: written: the factor by which earlier sums must be multiplied.
    """
    num_rows = len(largest)
    for row in range(0, num_rows, LANES):
        before = load(largest, row)
        maximum, added = before, spread(ZERO)
        for t in range(count):
            maximum = larger(maximum, load(scores, t * num_rows + row))
        for t in range(count):
            score = load(scores, t * num_rows + row)
            weight = zero_where_at_most(HIDDEN, score, exponential(score - maximum))
            store(scores, t * num_rows + row, weight)
            added = added + weight
        for t in range(count, padded(count, VALUES)):
            store(scores, t * num_rows + row, spread(ZERO))
        share = exponential(before - maximum)
        store(largest, row, maximum)
        store(weights, row, load(weights, row) * share + added)
        store(shares, row, share)


@njit(fastmath=FAST, error_model="numpy")
def _shrink(totals: Any, shares: Any) -> None:
    """Multiply each row's totals by its share."""
    width = len(totals) // len(shares)
    for row in range(len(shares)):
        if shares[row] != 1:
            for at in range(row * width, (row + 1) * width, LANES):
                store(totals, at, load(totals, at) * shares[row])


@njit(error_model="numpy")
def _write(
    outputs: Any,
    part_outputs: Any,
    sums: Any,
    lse: Any,
    first_row: int,
    rows: Any,
    totals: Any,
    largest: Any,
    weights: Any,
    sinks: Any,
) -> None:
    """Write the result of the rows: an output for a whole query, sums to merge for a part of one."""
    num_tokens, width = len(outputs), len(totals) // rows.total
    for head in range(rows.num_kv_heads):
        for index in range(rows.num_used):
            place, query_head = first_row + index // rows.group, _query_head(rows, head, index)
            row = head * rows.per_head + index
            factor, weight = np.float32(1), weights[row]
            if place >= num_tokens:
                sums[place - num_tokens, query_head, 0] = largest[row]
                sums[place - num_tokens, query_head, 1] = weight
                output = part_outputs[place - num_tokens, query_head]
            else:
                output = outputs[place, query_head]
                if weight != 0:
                    if len(lse):
                        lse[place, query_head] = largest[row] + math.log(weight)
                    if len(sinks):
                        # The sink is one more logit in the denominator (GPT-OSS, arXiv 2508.10925).
                        weight += math.exp(min(sinks[query_head] - largest[row], np.float32(80)))
                    factor /= weight
            total = totals[row * width : (row + 1) * width]
            for d in range(len(output)):
                output[d] = total[d] * factor


@njit(nogil=True, error_model="numpy")
def attend(
    items: Any,
    item: int,
    query: Any,
    key: Any,
    value: Any,
    key_strides: Any,
    value_strides: Any,
    num_kv_heads: int,
    table: Any,
    block_size: int,
    causal: bool,
    window: int,
    chunk: int,
    soft_cap: float,
    bias: Any,
    range_ends: Any,
    sinks: Any,
    outputs: Any,
    part_outputs: Any,
    sums: Any,
    lse: Any,
) -> None:
    """Compute the attention of one work item.

    Args:
        items: ``[num_items, 12], int64``: see ``plan.Work``.
        item: The index of the item.
        query: ``[num_tokens, num_heads, head_size], float32``: scaled.
        key: The memory of the pages' keys, from the null page's first element on: ``[num_elements]``, float32, uint16
            for bfloat16 or int16 for float16.
        value: Likewise.
        key_strides: The strides of pages, tokens and heads: ``[3], int64``, in elements.
        value_strides: Likewise.
        num_kv_heads: Key and value heads.
        table: ``[num_reqs, max_blocks], int32``.
        block_size: Tokens per page.
        causal: Whether queries see only their own and earlier positions.
        window: The number of positions that a query sees, counted back from its own; 0 for all.
        chunk: Tokens of a chunk that queries stay within; 0 for none.
        soft_cap: The soft cap of scores; 0 for none.
        bias: ``[num_heads, 2 * max_distance + 1], float32``: added by distance; ``[num_heads, 1]``: slopes;
            ``[num_heads, 0]`` for none.
        range_ends: ``[num_tokens], int32``: each causal query also sees the later tokens before this one; ``[0]`` if no
            query does.
        sinks: ``[num_heads], float32``: learned sink logits; ``[0]`` for none.
        outputs: ``[num_tokens, num_heads, value_size], float32``: written: the output of each query that is not split,
            zeros if it sees no token.
        part_outputs: ``[num_parts, num_heads, value_size], float32``: written: each part's sum of weighted values.
        sums: ``[num_parts, num_heads, 2], float32``: written: each part's largest score, and its sum of weights.
        lse: ``[num_tokens, num_heads], float32``: written: the logarithm of each query's sum, without sinks, if it is
            not split and sees a token; ``[0, num_heads]`` if it is not wanted.
    """
    head_size, value_size = query.shape[2], outputs.shape[2]
    request, first_query, num_queries = items[item, 0], items[item, 1], items[item, 2]
    position, num_sink_tokens = items[item, 7], items[item, 8]
    first_head, stop_head, first_row = items[item, 9], items[item, 10], items[item, 11]
    heads, group = stop_head - first_head, query.shape[1] // num_kv_heads
    per_head = padded(num_queries * group, ROWS)
    rows = Rows(first_query, first_head, heads, group, num_queries * group, per_head, padded(heads * per_head, LANES))
    queries = _read_queries(query, rows)
    totals = np.zeros(rows.total * padded(value_size, VALUE_PART), np.float32)
    scores = np.zeros(TOKENS * rows.total, np.float32)
    largest = np.full(rows.total, HIDDEN)
    weights = np.zeros(rows.total, np.float32)
    shares = np.empty(rows.total, np.float32)
    line = LINE_BYTES // key.itemsize
    ahead = min(max(AHEAD_BYTES // (heads * head_size * key.itemsize), VALUES), TOKENS)
    key_starts, value_starts = np.empty(TOKENS + ahead, np.int64), np.empty(TOKENS + ahead, np.int64)
    for part in range(2):
        token, stop_token = items[item, 3 + 2 * part], items[item, 4 + 2 * part]
        while token < stop_token:
            count = min(TOKENS, stop_token - token)
            _find_tokens(key_starts, key_strides, table[request], block_size, token, stop_token)
            _find_tokens(value_starts, value_strides, table[request], block_size, token, stop_token)
            for t in range(0, count, KEYS):
                for head in range(heads):
                    shift = (first_head + head) * key_strides[2]
                    for i in range(t, t + KEYS):
                        fetch_row(key, key_starts[i + ahead] + shift, head_size, line)
                    a, b = key_starts[t] + shift, key_starts[t + 1] + shift
                    for row in range(head * per_head, (head + 1) * per_head, ROWS):
                        place = t * rows.total + row
                        multiply_keys(scores, place, rows.total, queries, row, key, a, b, head_size)
            if soft_cap > 0:
                _cap(scores, count * rows.total, soft_cap)
            if bias.shape[1] > 0:
                _add_bias(scores, rows, token, count, position, bias)
            if causal and num_queries > 1:
                _hide(scores, rows, token, count, position, window, num_sink_tokens, chunk, range_ends)
            _weigh(scores, count, largest, weights, shares)
            _shrink(totals, shares)
            for t in range(0, count, VALUES):
                for head in range(heads):
                    shift = (first_head + head) * value_strides[2]
                    for i in range(t, t + VALUES):
                        fetch_row(value, value_starts[i + ahead] + shift, value_size, line)
                    for row in range(head * per_head, (head + 1) * per_head, ROWS):
                        place = t * rows.total + row
                        add_values(totals, row, scores, place, rows.total, value, value_starts, t, shift, value_size)
            token += count
    _write(outputs, part_outputs, sums, lse, first_row, rows, totals, largest, weights, sinks)
