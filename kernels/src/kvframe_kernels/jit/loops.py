"""The compiled loops of paged attention over a range of a step's work items, with the interpreter's lock released.

Tokens are taken a block at a time with an online softmax (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention,
arXiv 2205.14135). The query heads of a KV head, and a tile's queries, are rows that share each key and value; a few of
them are computed together. Long single queries are split over their tokens (Flash-Decoding, PyTorch's blog, 2023).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from kvframe_kernels.jit.numbers import FAST, exponential, load

TOKENS = 32
"""Tokens of a block."""

HIDDEN = np.float32(-1e30)
"""A score that hides a token: finite, so that a row which sees nothing of a block stays a number."""


@njit(inline="always", fastmath=FAST, error_model="numpy")
def _multiply_keys(scores: Any, t: int, queries: Any, first: int, stop: int, k: Any) -> None:
    """Set the products of a key with some rows, four at a time: ``scores[first:stop, t]``."""
    row = first
    while row + 4 <= stop:
        q0, q1, q2, q3 = queries[row], queries[row + 1], queries[row + 2], queries[row + 3]
        s0 = s1 = s2 = s3 = np.float32(0)
        for d in range(k.shape[0]):
            x = load(k[d])
            s0 += x * q0[d]
            s1 += x * q1[d]
            s2 += x * q2[d]
            s3 += x * q3[d]
        scores[row, t], scores[row + 1, t], scores[row + 2, t], scores[row + 3, t] = s0, s1, s2, s3
        row += 4
    while row < stop:
        q0 = queries[row]
        s0 = np.float32(0)
        for d in range(k.shape[0]):
            s0 += load(k[d]) * q0[d]
        scores[row, t] = s0
        row += 1


@njit(inline="always", fastmath=FAST, error_model="numpy")
def _add_values(totals: Any, scores: Any, t: int, first: int, stop: int, v0: Any, v1: Any, v2: Any, v3: Any) -> None:
    """Add four tokens' values, each times its weight in ``scores[:, t : t + 4]``, to ``totals[first:stop]``."""
    row = first
    while row + 2 <= stop:
        a, b = totals[row], totals[row + 1]
        a0, a1, a2, a3 = scores[row, t], scores[row, t + 1], scores[row, t + 2], scores[row, t + 3]
        b0, b1, b2, b3 = scores[row + 1, t], scores[row + 1, t + 1], scores[row + 1, t + 2], scores[row + 1, t + 3]
        for d in range(v0.shape[0]):
            x0, x1, x2, x3 = load(v0[d]), load(v1[d]), load(v2[d]), load(v3[d])
            a[d] += a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
            b[d] += b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3
        row += 2
    if row < stop:
        a = totals[row]
        a0, a1, a2, a3 = scores[row, t], scores[row, t + 1], scores[row, t + 2], scores[row, t + 3]
        for d in range(v0.shape[0]):
            a[d] += a0 * load(v0[d]) + a1 * load(v1[d]) + a2 * load(v2[d]) + a3 * load(v3[d])


@njit(inline="always", fastmath=FAST, error_model="numpy")
def _weigh(line: Any, count: int, largest: Any) -> Any:
    """Turn a row's scores of a block into weights, zeros behind them; return the largest yet and the weights' sum."""
    most = largest
    for t in range(count):
        most = max(most, line[t])
    added = np.float32(0)
    for t in range(TOKENS):
        weight = np.float32(0)
        if t < count and line[t] > HIDDEN:
            weight = exponential(line[t] - most)
        line[t] = weight
        added += weight
    return most, added


@njit(nogil=True, fastmath=FAST, error_model="numpy", cache=True)
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
    num_sink_tokens: int,
    chunk: int,
    soft_cap: float,
    bias: Any,
    outputs: Any,
    sums: Any,
) -> None:
    """Attend to the pages of one work item.

    Args:
        items: ``[num_items, 11], int64``: see ``plan.Work``.
        item: Which of them.
        query: ``[num_tokens, num_heads, head_size], float32``: scaled.
        key: The memory that the pages' keys lie in, from the null page's first element on: ``[num_elements]``, float32,
            uint16 for bfloat16 or int16 for float16.
        value: Likewise.
        key_strides: From page to page, token to token and head to head: ``[3], int64``, in elements.
        value_strides: Likewise.
        num_kv_heads: Key and value heads.
        table: ``[num_reqs, max_blocks], int32``.
        block_size: Tokens per page.
        causal: Whether queries see only their own and earlier positions.
        window: How many of these; 0 for all.
        num_sink_tokens: Tokens at the start that are seen whatever the window.
        chunk: Tokens of a chunk that queries stay within; 0 for none.
        soft_cap: Of scores; 0 for none.
        bias: ``[num_heads, 2 * max_distance + 1], float32``: added by distance; ``[num_heads, 0]`` for none.
        outputs: ``[num_rows, num_heads, value_size], float32``: written: each row's sum of weighted values.
        sums: ``[num_rows, num_heads, 2], float32``: written: its largest score, and its sum of weights.
    """
    num_heads, head_size, value_size = query.shape[1], query.shape[2], outputs.shape[2]
    group = num_heads // num_kv_heads
    max_distance = bias.shape[1] // 2
    request, first_query, num_queries = items[item, 0], items[item, 1], items[item, 2]
    position, first_head, stop_head, first_row = items[item, 7], items[item, 8], items[item, 9], items[item, 10]
    rows = num_queries * group
    num_rows = rows * (stop_head - first_head)
    scores = np.empty((num_rows, TOKENS), np.float32)
    queries = np.empty((num_rows, head_size), np.float32)
    totals = np.zeros((num_rows, value_size), np.float32)
    largest = np.full(num_rows, HIDDEN)
    weights = np.zeros(num_rows, np.float32)
    key_at = np.empty(TOKENS, np.int64)
    value_at = np.empty(TOKENS, np.int64)
    # Rows go by KV head, then query, then head of the group.
    for row in range(num_rows):
        head = (first_head + row // rows) * group + row % group
        queries[row] = query[first_query + row % rows // group, head]
    for part in range(2):
        token, stop_token = items[item, 3 + 2 * part], items[item, 4 + 2 * part]
        while token < stop_token:
            count = min(TOKENS, stop_token - token)
            for t in range(TOKENS):
                # Behind the last token that one is read again, with no weight.
                place = token + min(t, count - 1)
                page, offset = np.int64(table[request, place // block_size]), place % block_size
                key_at[t] = page * key_strides[0] + offset * key_strides[1]
                value_at[t] = page * value_strides[0] + offset * value_strides[1]
            for t in range(count):
                for head in range(first_head, stop_head):
                    start = key_at[t] + head * key_strides[2]
                    first = (head - first_head) * rows
                    _multiply_keys(scores, t, queries, first, first + rows, key[start : start + head_size])
            for row in range(num_rows):
                at, line = position + row % rows // group, scores[row]
                if soft_cap > 0:
                    for t in range(count):
                        line[t] = soft_cap * math.tanh(line[t] / soft_cap)
                if max_distance > 0:
                    head = (first_head + row // rows) * group + row % group
                    for t in range(count):
                        distance = min(max(token + t - at, -max_distance), max_distance)
                        line[t] += bias[head, max_distance + distance]
                if causal and num_queries > 1:
                    low = 0 if window == 0 else at + 1 - window
                    if chunk > 0:
                        low = max(low, at - at % chunk)
                    for t in range(count):
                        place = token + t
                        if place > at or (place < low and place >= num_sink_tokens):
                            line[t] = HIDDEN
                most, added = _weigh(line, count, largest[row])
                if most > largest[row]:
                    share = exponential(largest[row] - most)
                    weights[row] *= share
                    totals[row] *= share
                    largest[row] = most
                weights[row] += added
            for t in range(0, count, 4):
                for head in range(first_head, stop_head):
                    shift, first = head * value_strides[2], (head - first_head) * rows
                    at0, at1 = value_at[t] + shift, value_at[t + 1] + shift
                    at2, at3 = value_at[t + 2] + shift, value_at[t + 3] + shift
                    v0, v1 = value[at0 : at0 + value_size], value[at1 : at1 + value_size]
                    v2, v3 = value[at2 : at2 + value_size], value[at3 : at3 + value_size]
                    _add_values(totals, scores, t, first, first + rows, v0, v1, v2, v3)
            token += count
    for row in range(num_rows):
        head, place = (first_head + row // rows) * group + row % group, first_row + row % rows // group
        outputs[place, head] = totals[row]
        sums[place, head, 0] = largest[row]
        sums[place, head, 1] = weights[row]


@njit(nogil=True, fastmath=FAST, error_model="numpy", cache=True)
def finish(outputs: Any, sums: Any, num_tokens: int, first_part: Any, sinks: Any) -> None:
    """Add up the parts of split queries, and divide by the sums of weights; zeros where a query sees nothing.

    Args:
        outputs: ``[num_rows, num_heads, value_size], float32``: what ``attend`` wrote; the first ``num_tokens``
            rows are written.
        sums: ``[num_rows, num_heads, 2], float32``: likewise.
        num_tokens: Rows of the query.
        first_part: ``[num_tokens + 1], int64``: where each query's parts start among the rows behind these; none where
            it was not split.
        sinks: ``[num_heads], float32``: learned sink logits, or ``[0]`` for none.
    """
    for row in range(num_tokens):
        for head in range(outputs.shape[1]):
            total = outputs[row, head]
            if first_part[row] < first_part[row + 1]:
                total[:] = 0
                most, weight = HIDDEN, np.float32(0)
                for part in range(num_tokens + first_part[row], num_tokens + first_part[row + 1]):
                    most = max(most, sums[part, head, 0])
                for part in range(num_tokens + first_part[row], num_tokens + first_part[row + 1]):
                    share = exponential(sums[part, head, 0] - most)
                    weight += share * sums[part, head, 1]
                    other = outputs[part, head]
                    for d in range(len(total)):
                        total[d] += share * other[d]
            else:
                most, weight = sums[row, head, 0], sums[row, head, 1]
            if weight == 0:
                total[:] = 0
                continue
            if len(sinks):
                # One more logit in the denominator (GPT-OSS, arXiv 2508.10925).
                weight += math.exp(min(sinks[head] - most, np.float32(80)))
            total *= np.float32(1) / weight
