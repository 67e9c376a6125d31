"""The two products of attention, each with a key or value for four rows at once, so that all stay in registers.

Rows are padded with zeros to whole vectors; keys and values are read as they are stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from kvframe_kernels.jit.numbers import FAST
from kvframe_kernels.jit.vectors import LANES, fetch, load, load_spread, load_stored, spread, store, store_sums

ROWS = 4
"""Rows that are computed together."""

KEYS = 2
"""Keys that are multiplied together."""

VALUES = 4
"""Values that are added together."""

KEY_PART, VALUE_PART = LANES, 2 * LANES
"""The rows of queries and of totals are padded to a multiple of this."""

ZERO = np.float32(0)


@njit(forceinline=True)
def padded(size: int, part: int) -> int:
    """Return ``size`` rounded up to a multiple of ``part``."""
    return (size + part - 1) // part * part


@njit(forceinline=True)
def fetch_row(array: Any, start: int, size: int, line: int) -> None:
    """Prefetch a key or value, in steps of ``line`` numbers."""
    # A while loop, because range() divides by its step.
    place = start
    while place < start + size:
        fetch(array, place)
        place += line


@njit(forceinline=True, fastmath=FAST)
def multiply_keys(
    scores: Any, place: int, step: int, queries: Any, row: int, key: Any, at_a: int, at_b: int, head_size: int
) -> None:
    """Set the scores of four rows for two keys.

    Args:
        scores: ``[num_scores], float32``: written: four from ``place`` on for key a, and ``step`` later for key b.
        place: The first score.
        step: The distance from a token's scores to the next token's.
        queries: ``[num_numbers], float32``: rows of ``padded(head_size, KEY_PART)``.
        row: The first of them.
        key: ``[num_elements]``: the memory of keys.
        at_a: The offset of key a.
        at_b: The offset of key b.
        head_size: Numbers of a key.
    """
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = spread(ZERO)
    width = padded(head_size, KEY_PART)
    for d in range(0, head_size, LANES):
        left, at = head_size - d, row * width + d
        a, b = load_stored(key, at_a + d, left), load_stored(key, at_b + d, left)
        q0, q1 = load(queries, at), load(queries, at + width)
        q2, q3 = load(queries, at + 2 * width), load(queries, at + 3 * width)
        a0, b0 = a0 + q0 * a, b0 + q0 * b
        a1, b1 = a1 + q1 * a, b1 + q1 * b
        a2, b2 = a2 + q2 * a, b2 + q2 * b
        a3, b3 = a3 + q3 * a, b3 + q3 * b
    store_sums(scores, place, a0, a1, a2, a3)
    store_sums(scores, place + step, b0, b1, b2, b3)


@njit(forceinline=True, fastmath=FAST)
def add_values(
    totals: Any,
    row: int,
    weights: Any,
    place: int,
    step: int,
    value: Any,
    starts: Any,
    t: int,
    shift: int,
    value_size: int,
) -> None:
    """Add four tokens' weighted values to the totals of four rows.

    Args:
        totals: ``[num_numbers], float32``: added to: rows of ``padded(value_size, VALUE_PART)``.
        row: The first of them.
        weights: ``[num_weights], float32``: four from ``place`` on for the first token, ``step`` later for the next.
        place: The first weight.
        step: The distance from a token's weights to the next token's.
        value: ``[num_elements]``: the memory of values.
        starts: ``[num_tokens], int64``: the offsets of tokens' values.
        t: The first token.
        shift: The offset of the head's value after that.
        value_size: Numbers of a value.
    """
    width = padded(value_size, VALUE_PART)
    for d in range(0, value_size, VALUE_PART):
        left = value_size - d
        at0 = row * width + d
        at1, at2, at3 = at0 + width, at0 + 2 * width, at0 + 3 * width
        a0, b0 = load(totals, at0), load(totals, at0 + LANES)
        a1, b1 = load(totals, at1), load(totals, at1 + LANES)
        a2, b2 = load(totals, at2), load(totals, at2 + LANES)
        a3, b3 = load(totals, at3), load(totals, at3 + LANES)
        for i in range(VALUES):
            start, w = starts[t + i] + shift + d, place + i * step
            a, b = load_stored(value, start, left), load_stored(value, start + LANES, left - LANES)
            w0, w1 = load_spread(weights, w), load_spread(weights, w + 1)
            w2, w3 = load_spread(weights, w + 2), load_spread(weights, w + 3)
            a0, b0 = a0 + w0 * a, b0 + w0 * b
            a1, b1 = a1 + w1 * a, b1 + w1 * b
            a2, b2 = a2 + w2 * a, b2 + w2 * b
            a3, b3 = a3 + w3 * a, b3 + w3 * b
        store(totals, at0, a0)
        store(totals, at0 + LANES, b0)
        store(totals, at1, a1)
        store(totals, at1 + LANES, b1)
        store(totals, at2, a2)
        store(totals, at2 + LANES, b2)
        store(totals, at3, a3)
        store(totals, at3 + LANES, b3)
