"""What the compiled loops are made of: stored bits as numbers, and an exponential that becomes vector instructions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

LOG2_E = np.float32(math.log2(math.e))
LOWEST = np.float32(-87.0)
"""Where the exponential, in float32, is next to nothing."""

FAST = {"contract", "nsz", "arcp", "reassoc"}
"""Sums in any order; NaN and infinity keep their meaning."""


@intrinsic
def _float_of_bits(typing_context: Any, bits: Any) -> Any:
    """Return the float32 that has these 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def load(typing_context: Any, stored: Any) -> Any:
    """Return a stored number as float32: a float32, a bfloat16 as ``uint16``, or a float16 as ``int16``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (bits,) = arguments
        if stored == types.float32:
            return bits
        if stored == types.int16:
            return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())
        # A bfloat16 is the upper half of a float32.
        wide = builder.shl(builder.zext(bits, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(wide, ir.FloatType())

    return types.float32(stored), generate


@njit(inline="always", fastmath=FAST)
def exponential(x: Any) -> Any:
    """Return e to the power of ``x``, at most 0, in float32, within 3e-7 and 8e-8 times ``-x``, relative.

    Two to the power of the nearest whole number is written as an exponent; the rest is Cephes' polynomial for two to a
    power (exp2f, Stephen Moshier, netlib.org/cephes). The error that grows with ``-x`` is that of
    the product's rounding.
    """
    scaled = max(x, LOWEST) * LOG2_E
    whole = math.floor(scaled + np.float32(0.5))
    rest = np.float32(scaled - whole)
    power = np.float32(1.535336188319500e-4)
    power = power * rest + np.float32(1.339887440266574e-3)
    power = power * rest + np.float32(9.618437357674640e-3)
    power = power * rest + np.float32(5.550332471162809e-2)
    power = power * rest + np.float32(2.402264791363012e-1)
    power = power * rest + np.float32(6.931472028550421e-1)
    power = power * rest + np.float32(1.0)
    return power * _float_of_bits((np.int32(whole) + np.int32(127)) << np.int32(23))


@intrinsic
def memory_at(typing_context: Any, address: Any) -> Any:
    """Return an address, an int64, as a pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.PointerType(ir.IntType(8)))

    return types.voidptr(types.int64), generate


@intrinsic
def take_next(typing_context: Any, address: Any) -> Any:
    """Return the int64 at an address and count it up, at once for all threads."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        counter = builder.bitcast(arguments[0], ir.PointerType(ir.IntType(64)))
        return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.voidptr), generate
