"""Runs a step's work items in threads: in torch's own if possible, so that no two thread pools share the cores.

torch's OpenMP threads spin for milliseconds after each operation, and would take the cores from other threads.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types

from kvframe_kernels.jit.loops import attend
from kvframe_kernels.jit.numbers import memory_at, take_next

SIZES = (
    "num_items",
    "num_reqs",
    "max_blocks",
    "num_tokens",
    "num_parts",
    "num_heads",
    "num_kv_heads",
    "head_size",
    "value_size",
    "num_biases",
    "num_sinks",
    "num_lse",
    "num_range_ends",
    "key_elements",
    "value_elements",
    "block_size",
    "causal",
    "window",
    "chunk",
)
ARRAYS = (
    "items",
    "query",
    "key",
    "value",
    "key_strides",
    "value_strides",
    "table",
    "bias",
    "range_ends",
    "sinks",
    "outputs",
    "part_outputs",
    "sums",
    "lse",
)
CALL = np.dtype(
    [("counter", np.int64), ("soft_cap", np.float64), *((name, np.int64) for name in (*SIZES, *ARRAYS))], align=True
)
"""The argument of the compiled function: numbers, the addresses of arrays, and the counter of started items."""

Entry = Any
"""A compiled function that each thread calls with the address of a ``CALL``; it returns when no item is left."""


@njit(nogil=True, error_model="numpy")
def _attend_to_items(call: Any, key: Any, value: Any, counter: Any) -> None:
    items = carray(memory_at(call.items), (call.num_items, 12), np.int64)
    query = carray(memory_at(call.query), (call.num_tokens, call.num_heads, call.head_size), np.float32)
    key_strides = carray(memory_at(call.key_strides), (3,), np.int64)
    value_strides = carray(memory_at(call.value_strides), (3,), np.int64)
    table = carray(memory_at(call.table), (call.num_reqs, call.max_blocks), np.int32)
    bias = carray(memory_at(call.bias), (call.num_heads, call.num_biases), np.float32)
    range_ends = carray(memory_at(call.range_ends), (call.num_range_ends,), np.int32)
    sinks = carray(memory_at(call.sinks), (call.num_sinks,), np.float32)
    outputs = carray(memory_at(call.outputs), (call.num_tokens, call.num_heads, call.value_size), np.float32)
    part_outputs = carray(memory_at(call.part_outputs), (call.num_parts, call.num_heads, call.value_size), np.float32)
    sums = carray(memory_at(call.sums), (call.num_parts, call.num_heads, 2), np.float32)
    lse = carray(memory_at(call.lse), (call.num_lse, call.num_heads), np.float32)
    item = take_next(counter)
    while item < call.num_items:
        attend(
            items,
            item,
            query,
            key,
            value,
            key_strides,
            value_strides,
            call.num_kv_heads,
            table,
            call.block_size,
            call.causal != 0,
            call.window,
            call.chunk,
            np.float32(call.soft_cap),
            bias,
            range_ends,
            sinks,
            outputs,
            part_outputs,
            sums,
            lse,
        )
        item = take_next(counter)


def _digest() -> str:
    """Return a digest of this folder's code."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@cache
def make_entry(dtype: np.dtype[Any]) -> Entry:
    """Return the entry for pages of float32, uint16 (bfloat16) or int16 (float16), compiled or from numba's cache.

    numba's cache depends on this file and on the variables that the function closes over. The function closes over a
    digest of the other files, so that a change of these is noticed.
    """
    sources = _digest()

    @cfunc(types.void(types.voidptr), cache=True)
    def entry(address: Any) -> None:
        assert sources, "closed over, for the cache"
        call = carray(address, 1, CALL)[0]
        key = carray(memory_at(call.key), (call.key_elements,), dtype)
        value = carray(memory_at(call.value), (call.value_elements,), dtype)
        _attend_to_items(call, key, value, address)

    return entry


@cache
def _start_in_torchs_threads() -> Any:
    """Return ``GOMP_parallel`` of the OpenMP library that torch has loaded; None if that is another library."""
    try:
        # torch's own copy has this name. As it is loaded already, it is returned.
        start = ctypes.CDLL("libgomp.so.1").GOMP_parallel
    except (OSError, AttributeError):
        return None
    start.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    start.restype = None
    return start


_pools: dict[int, ThreadPoolExecutor] = {}
# A forked process does not have its parent's threads.
os.register_at_fork(after_in_child=_pools.clear)


def run(
    dtype: np.dtype[Any], sizes: Mapping[str, int], arrays: Mapping[str, Any], soft_cap: float, threads: int
) -> None:
    """Compute all work items of a step.

    Args:
        dtype: The dtype of the pages, as the loops get it.
        sizes: ``SIZES``, by name.
        arrays: ``ARRAYS``, by name, each contiguous.
        soft_cap: The soft cap of scores; 0 for none.
        threads: The number of threads to use.
    """
    call = np.zeros(1, CALL)
    call["soft_cap"] = soft_cap
    for name, size in sizes.items():
        call[name] = size
    for name, array in arrays.items():
        call[name] = array.ctypes.data
    entry, address = make_entry(dtype), call.ctypes.data
    start = _start_in_torchs_threads()
    if threads == 1:
        entry.ctypes(address)
    elif start is not None:
        start(entry.address, address, threads, 0)
    else:
        pool = _pools.setdefault(threads, ThreadPoolExecutor(threads, thread_name_prefix="kvframe-attention"))
        for future in [pool.submit(entry.ctypes, address) for _ in range(threads)]:
            future.result()
