"""Vectors in loops that numba compiles give NumPy's results, on this processor and on the simplest one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kvframe_kernels.jit.numbers import exponential, tangent
from kvframe_kernels.jit.vectors import LANES, larger, load, load_stored, store, store_sums
from numba import njit


def apply(function: Callable[[Any], Any], numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Return the results of a function of vectors."""

    @njit
    def run(numbers: Any, results: Any) -> None:
        for at in range(0, len(numbers), LANES):
            store(results, at, function(load(numbers, at)))

    results = np.empty_like(numbers)
    run(numbers, results)
    return results.astype(np.float64)


def test_the_exponential_is_as_exact_as_it_says() -> None:
    x = np.linspace(-87, 0, 1 << 18, dtype=np.float32)
    errors = apply(exponential, x) / np.exp(x.astype(np.float64)) - 1
    assert np.abs(errors).max() < 1.2e-7


def test_the_hyperbolic_tangent_is_as_exact_as_it_says() -> None:
    x = np.concatenate([np.linspace(-30, 30, 1 << 18), np.linspace(-0.1, 0.1, 1 << 16)]).astype(np.float32)
    errors = apply(tangent, x) - np.tanh(x.astype(np.float64))
    assert np.abs(errors).max() < 1.2e-7


def test_what_is_no_number_stays_none() -> None:
    x = np.full(LANES, np.nan, np.float32)
    assert np.isnan(apply(exponential, x)).all()
    assert np.isnan(apply(tangent, x)).all()


@njit
def _load_stored(elements: Any, start: int, count: int, results: Any) -> None:
    store(results, 0, load_stored(elements, start, count))


HALVES = np.arange(1 << 16, dtype=np.uint16)


@pytest.mark.parametrize(
    ("elements", "numbers"),
    [
        (np.linspace(-3, 3, 1 << 10, dtype=np.float32), np.linspace(-3, 3, 1 << 10, dtype=np.float32)),
        (HALVES, (HALVES.astype(np.uint32) << 16).view(np.float32)),
        (HALVES.view(np.int16), HALVES.view(np.float16).astype(np.float32)),
    ],
    ids=["float32", "bfloat16", "float16"],
)
def test_every_stored_number_is_read_as_what_it_is(elements: Any, numbers: npt.NDArray[np.float32]) -> None:
    results = np.empty(LANES, np.float32)
    for start in range(0, len(elements), LANES):
        _load_stored(elements, start, LANES, results)
        np.testing.assert_array_equal(results, numbers[start : start + LANES])
    _load_stored(elements, 1, 3, results)
    np.testing.assert_array_equal(results, [*numbers[1:4], *[0] * (LANES - 3)])


def test_sums_of_lanes_are_written_one_beside_the_other() -> None:
    @njit
    def run(numbers: Any, sums: Any) -> None:
        store_sums(sums, 1, load(numbers, 0), load(numbers, LANES), load(numbers, 2 * LANES), load(numbers, 3 * LANES))

    numbers, sums = np.arange(4 * LANES, dtype=np.float32), np.zeros(6, np.float32)
    run(numbers, sums)
    assert [0, *numbers.reshape(4, LANES).sum(1).tolist(), 0] == sums.tolist()


def test_the_larger_of_nothing_and_a_number_is_nothing() -> None:
    x = np.where(np.arange(LANES) % 2, np.nan, -1).astype(np.float32)
    results = apply(njit(lambda value: larger(value, np.float32(2))), x)
    np.testing.assert_array_equal(results, np.where(np.isnan(x), np.nan, 2))


def test_any_processor_computes_the_same() -> None:
    if os.environ.get("NUMBA_CPU_NAME"):
        pytest.skip("runs for one processor already")
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    subprocess.run(command, env=environment, check=True, capture_output=True)
