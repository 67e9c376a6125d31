"""Vectors of float32 for loops that numba compiles. They are explicit, because LLVM vectorises few of these loops.

``vector`` is a numba type with the operators ``+``, ``-``, ``*`` and ``/``, between vectors and with single numbers.
LLVM splits a vector that is wider than the processor's registers, so it runs on any processor.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable

_platform, _, _features = cpu_target.target_context.codegen().magic_tuple()
LANES = 16 if "+avx512f" in _features else 8
"""Numbers of a vector: sixteen if the processor that is compiled for has AVX-512, otherwise eight."""

SUMS = 4
"""The number of vectors whose lanes ``store_sums`` adds up."""

_CONVERTS_HALVES = "+f16c" in _features or not _platform.startswith(("x86", "i"))
"""Whether the processor converts float16; otherwise LLVM would call a function that does not exist."""

_INT, _FLOAT = ir.IntType(32), ir.FloatType()
_INTS, _VECTOR = ir.VectorType(_INT, LANES), ir.VectorType(_FLOAT, LANES)


class _Vector(types.Type):  # type: ignore[misc]
    pass


vector = _Vector("vector")


@register_model(_Vector)
class _Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)


def _constant(number: int) -> Any:
    """Return a vector with a constant in each lane."""
    return ir.Constant(_INTS, [number] * LANES)


def _spread(builder: Any, value: Any) -> Any:
    """Return a vector with a value in each lane; a vector is returned unchanged."""
    if isinstance(value.type, ir.VectorType):
        return value
    nothing = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(nothing, value, ir.Constant(_INT, 0))
    return _shuffle(builder, first, first, [0] * LANES)


def _shuffle(builder: Any, vector: Any, other: Any, lanes: Sequence[int]) -> Any:
    """Return the given lanes of two vectors; lanes of the second are numbered after those of the first."""
    return builder.shuffle_vector(vector, other, ir.Constant(ir.VectorType(_INT, len(lanes)), list(lanes)))


def _call(builder: Any, name: str, returned: Any, arguments: Sequence[Any]) -> Any:
    """Return the result of an LLVM intrinsic."""
    signature = ir.FunctionType(returned, [argument.type for argument in arguments])
    function = builder.module.globals.get(name) or ir.Function(builder.module, signature, name)
    return builder.call(function, arguments)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def _declare(function: Any, instruction: str) -> None:
    """Implement a Python operator on vectors by an instruction."""

    @type_callable(function)
    def find_type(context: Any) -> Any:
        return lambda left, right: vector if vector in (left, right) else None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return getattr(builder, instruction)(*(_spread(builder, argument) for argument in arguments))

    for kinds in ((vector, vector), (vector, types.float32), (types.float32, vector)):
        lower_builtin(function, *kinds)(generate)


_declare(operator.add, "fadd")
_declare(operator.sub, "fsub")
_declare(operator.mul, "fmul")
_declare(operator.truediv, "fdiv")


@intrinsic
def spread(typing_context: Any, number: Any) -> Any:
    """Return a vector with a number in each lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _spread(builder, *arguments)

    return vector(types.float32), generate


@intrinsic
def larger(typing_context: Any, value: Any, other: Any) -> Any:
    """Return the larger of a vector and another one, or a number; ``value`` in lanes where the other is NaN."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        left, right = (_spread(builder, argument) for argument in arguments)
        return builder.select(builder.fcmp_ordered("<", left, right), right, left)

    return vector(vector, other), generate


@intrinsic
def zero_where_at_most(typing_context: Any, limit: Any, compared: Any, value: Any) -> Any:
    """Return ``value``, with zeros in the lanes where ``compared`` is at most ``limit``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        limit, compared, value = arguments
        low = builder.fcmp_ordered("<=", compared, _spread(builder, limit))
        return builder.select(low, ir.Constant(_VECTOR, None), value)

    return vector(types.float32, vector, vector), generate


@intrinsic
def with_sign(typing_context: Any, value: Any, other: Any) -> Any:
    """Return a vector with the signs of another vector or of a number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sides = [_spread(builder, argument) for argument in arguments]
        return _call(builder, f"llvm.copysign.v{LANES}f32", _VECTOR, sides)

    return vector(vector, other), generate


@intrinsic
def power_of_two(typing_context: Any, exponent: Any) -> Any:
    """Return two to the power of whole numbers between -126 and 127, which are given with 1.5 * 2**23 added."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # In floats of that size, the last bits are the whole number. Shifted up, they become an exponent.
        bits = builder.shl(builder.bitcast(arguments[0], _INTS), _constant(23))
        return builder.bitcast(builder.add(bits, _constant(127 << 23)), _VECTOR)

    return vector(vector), generate


# --- memory -----------------------------------------------------------------------------------------------------------


def _address(context: Any, builder: Any, kind: Any, place: Sequence[Any], target: Any, count: Any = None) -> Any:
    """Return the address of a contiguous array's element, to read or write a ``target`` there.

    If numba checks indices (``NUMBA_BOUNDSCHECK``), so does this.

    Args:
        context: The compilation's context.
        builder: The builder of instructions.
        kind: The array's type.
        place: The array, and the element's index.
        target: The type to read or write.
        count: The elements that are accessed, a whole number; those of ``target`` unless given.
    """
    array, index = place
    memory = context.make_array(kind)(context, builder, array)
    if context.enable_boundscheck:
        num_elements = ir.Constant(index.type, target.count if isinstance(target, ir.VectorType) else 1)
        if count is not None:
            num_elements = builder.select(builder.icmp_signed("<", count, num_elements), count, num_elements)
        with builder.if_then(builder.icmp_signed(">", num_elements, ir.Constant(index.type, 0))):
            last = builder.sub(builder.add(index, num_elements), ir.Constant(index.type, 1))
            for element in (index, last):
                cgutils.do_boundscheck(context, builder, element, memory.nitems)
    return builder.bitcast(builder.gep(memory.data, [index]), ir.PointerType(target))


@intrinsic
def load(typing_context: Any, array: Any, index: Any) -> Any:
    """Return the vector of an array of float32 from an element on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_address(context, builder, array, arguments, _VECTOR), align=4)

    return vector(array, types.intp), generate


@intrinsic
def load_spread(typing_context: Any, array: Any, index: Any) -> Any:
    """Return a vector with one element of an array of float32 in each lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _spread(builder, builder.load(_address(context, builder, array, arguments, _FLOAT)))

    return vector(array, types.intp), generate


@intrinsic
def store(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    """Write a vector to an array of float32 from an element on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        *place, value = arguments
        builder.store(value, _address(context, builder, array, place, _VECTOR), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), generate


@intrinsic
def load_stored(typing_context: Any, array: Any, index: Any, count: Any) -> Any:
    """Return the vector of stored numbers from an element on, zeros in its lanes from ``count`` on.

    The array holds float32, bfloat16 as ``uint16``, or float16 as ``int16``. Nothing after ``count`` is read.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = ir.VectorType(context.get_value_type(array.dtype), LANES)
        *place, count = arguments
        address = _address(context, builder, array, place, bits, count)
        is_whole = builder.icmp_signed(">=", count, ir.Constant(count.type, LANES))
        with builder.if_else(is_whole, likely=True) as (then, otherwise):
            with then:
                all_lanes = builder.load(address, align=array.dtype.bitwidth // 8)
                all_from = builder.block
            with otherwise:
                few_lanes = _load_few(builder, address, bits, builder.trunc(count, _INT))
                few_from = builder.block
        loaded = builder.phi(bits)
        loaded.add_incoming(all_lanes, all_from)
        loaded.add_incoming(few_lanes, few_from)
        return _widen(builder, array.dtype, loaded)

    return vector(array, types.intp, types.intp), generate


def _load_few(builder: Any, address: Any, kind: Any, count: Any) -> Any:
    """Return the vector at an address; only the first ``count`` lanes are read."""
    mask = builder.icmp_signed("<", ir.Constant(_INTS, list(range(LANES))), _spread(builder, count))
    name = f"llvm.masked.load.v{LANES}{'f32' if kind == _VECTOR else 'i16'}.p0"
    return _call(builder, name, kind, [address, ir.Constant(_INT, 1), mask, ir.Constant(kind, None)])


def _widen(builder: Any, stored_type: Any, bits: Any) -> Any:
    """Return the float32 numbers of stored bits."""
    if stored_type == types.float32:
        return bits
    if stored_type == types.int16 and _CONVERTS_HALVES:
        return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), _VECTOR)
    wide = builder.zext(bits, _INTS)
    if stored_type == types.int16:
        return _widen_halves(builder, wide)
    # A bfloat16 is the upper half of a float32.
    return builder.bitcast(builder.shl(wide, _constant(16)), _VECTOR)


def _widen_halves(builder: Any, wide: Any) -> Any:
    """Return the float32 numbers of bits of float16."""
    # The exponent of a float16 is 112 smaller than that of a float32; its largest exponent means infinity or NaN.
    size = builder.and_(wide, _constant(0x7FFF))
    scaled = builder.fmul(
        builder.bitcast(builder.shl(size, _constant(13)), _VECTOR), ir.Constant(_VECTOR, [2.0**112] * LANES)
    )
    number_bits = builder.bitcast(scaled, _INTS)
    is_number = builder.icmp_unsigned("<", size, _constant(0x7C00))
    number_bits = builder.select(is_number, number_bits, builder.or_(number_bits, _constant(0x7F800000)))
    sign = builder.shl(builder.and_(wide, _constant(0x8000)), _constant(16))
    return builder.bitcast(builder.or_(number_bits, sign), _VECTOR)


@intrinsic
def store_sums(typing_context: Any, array: Any, index: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Write the sum of the lanes of each of four vectors to an array of float32, from an element on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        *place, a, b, c, d = arguments
        # Within each four lanes: (a b a b), (c d c d), then (a b c d).
        ab, cd = (_add_shuffled(builder, *pair, (0, LANES, 1, LANES + 1)) for pair in ((a, b), (c, d)))
        sums = _add_shuffled(builder, ab, cd, (0, 1, LANES, LANES + 1))
        lanes = LANES
        while lanes > SUMS:
            lanes //= 2
            parts = (_shuffle(builder, sums, sums, range(start, start + lanes)) for start in (0, lanes))
            sums = builder.fadd(*parts)
        builder.store(sums, _address(context, builder, array, place, sums.type), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, *[vector] * SUMS), generate


def _add_shuffled(builder: Any, vector: Any, other: Any, low: Sequence[int]) -> Any:
    """Return the sum of two selections from each four lanes: the given lanes, and the lanes two higher."""
    fours = range(0, LANES, SUMS)
    return builder.fadd(
        *(_shuffle(builder, vector, other, [four + lane + high for four in fours for lane in low]) for high in (0, 2))
    )


@intrinsic
def fetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Prefetch the memory of an array's element."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # A prefetch of memory that is not there does nothing.
        nothing = ir.Constant(arguments[1].type, 0)
        address = _address(context, builder, array, arguments, ir.IntType(8), nothing)
        # For reading, into all cache levels, as data.
        hints = [ir.Constant(_INT, hint) for hint in (0, 3, 1)]
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), [address, *hints])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate
