"""Functions for the compiled loops: an exponential and a hyperbolic tangent of vectors, and access to addresses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from kvframe_kernels.jit.vectors import larger, power_of_two, with_sign

FAST = {"contract"}
"""Fast-math flags: products may be added without rounding, in any order; NaN and infinity keep their meaning."""

LOG2_E = np.float32(math.log2(math.e))
LOG_2_HIGH, LOG_2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
"""The logarithm of 2 as the sum of two numbers. The first has so few bits that small multiples of it are exact."""

LOWEST = np.float32(-87.0)
"""An argument for which the exponential, in float32, is nearly zero."""

ROUNDING = np.float32(1.5 * 2**23)
"""A number so large that adding it rounds a small number to a whole number."""


@njit(forceinline=True, fastmath=FAST)
def exponential(x: Any) -> Any:
    """Return e to the power of a vector, at most 0, with a relative error below 1.2e-7.

    The remainder of ``x`` beyond a multiple of log 2 is computed in two steps, as the logarithm has more digits than a
    float32 (Cody and Waite, Software Manual for the Elementary Functions, 1980). The remainder's exponential is Cephes'
    polynomial (expf, Stephen Moshier, netlib.org/cephes). The multiple becomes the exponent of the result.
    """
    limited = larger(x, LOWEST)
    rounded = limited * LOG2_E + ROUNDING
    exponent = rounded - ROUNDING
    rest = limited - exponent * LOG_2_HIGH - exponent * LOG_2_LOW
    power = rest * np.float32(1.9875691500e-4) + np.float32(1.3981999507e-3)
    power = power * rest + np.float32(8.3334519073e-3)
    power = power * rest + np.float32(4.1665795894e-2)
    power = power * rest + np.float32(1.6666665459e-1)
    power = power * rest + np.float32(5.0000001201e-1)
    power = power * (rest * rest) + rest + np.float32(1.0)
    return power * power_of_two(rounded)


@njit(forceinline=True, fastmath=FAST)
def tangent(x: Any) -> Any:
    """Return the hyperbolic tangent of a vector, with an error below 1.2e-7."""
    shrunk = exponential(with_sign(x + x, np.float32(-1)))
    return with_sign((np.float32(1) - shrunk) / (np.float32(1) + shrunk), x)


@intrinsic
def memory_at(typing_context: Any, address: Any) -> Any:
    """Return an address, an int64, as a pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.PointerType(ir.IntType(8)))

    return types.voidptr(types.int64), generate


@intrinsic
def take_next(typing_context: Any, address: Any) -> Any:
    """Return the int64 at an address and increment it atomically."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        counter = builder.bitcast(arguments[0], ir.PointerType(ir.IntType(64)))
        return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.voidptr), generate
