"""Triton's interpreter in tests: faster, with the results and the state that it has otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.interpreter import make_faster


@dataclass(frozen=True)
class Options:
    debug: bool = False
    sanitize_overflow: bool = True


class Scope:
    num_restored = 0

    def restore(self) -> None:
        Scope.num_restored += 1


def fake(debug: bool = False) -> Any:
    """Return a stand-in for the interpreter's module; it notes what it patches and which types it finds."""
    module: Any = ModuleType("interpreter")
    module.tl = ModuleType("tl")
    module.tl.core = ModuleType("tl.core")
    module.patched, module.asked, module._LangPatchScope = [], [], Scope

    def patch(function: Any) -> Scope:
        module.patched.append(function)
        return Scope()

    def find(dtype: Any) -> str:
        module.asked.append(dtype.scalar.name)
        return f"numpy's {dtype.scalar.name}"

    module._patch_lang, module._get_np_dtype = patch, find
    module.interpreter_builder = SimpleNamespace(options=Options(debug))
    return module


def function_that_sees(*modules: ModuleType) -> Callable[[], None]:
    names: dict[str, Any] = {f"name_{index}": module for index, module in enumerate(modules)}
    exec("def function(): pass", names)
    function: Callable[[], None] = names["function"]
    return function


def test_the_installed_interpreter_is_one_that_is_made_faster() -> None:
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    make_faster(interpreter)
    assert not interpreter.interpreter_builder.options.sanitize_overflow
    names = ("float16", "float32", "int32", "uint8", "int1", "bfloat16", "float8e4nv", "int64")
    types = [getattr(interpreter.tl, name) for name in names]
    assert ["float16", "float32", "int32", "uint8", "bool", "uint16", "uint8", "int64"] == [
        interpreter._get_np_dtype(dtype).name for dtype in types
    ]
    pointers = [interpreter.tl.pointer_type(dtype) for dtype in types]
    blocks = [interpreter.tl.block_type(dtype, [4]) for dtype in (*types, *pointers)]
    assert ["uint64"] * 8 == [interpreter._get_np_dtype(dtype).name for dtype in pointers]
    assert [interpreter._get_np_dtype(dtype) for dtype in (*types, *pointers)] == [
        interpreter._get_np_dtype(dtype) for dtype in blocks
    ]


def test_shapes_are_those_of_the_type_and_are_checked() -> None:
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    make_faster(interpreter)
    tl = interpreter.tl
    for element in (tl.float32, tl.int8):
        block = tl.block_type(element, [4, tl.constexpr(8)])
        assert ((4, 8), 32, f"<['4', '8'], {element}>") == (tuple(block.shape), block.numel, block.name)
        tensor = tl.tensor(None, block)
        assert ([4, 8], 32, element) == ([size.value for size in tensor.shape], tensor.numel.value, tensor.dtype)
        assert ([], 1) == ([*tl.tensor(None, element).shape], tl.tensor(None, element).numel.value)
    for _ in range(2):
        with pytest.raises(ValueError, match="power of 2"):
            tl.block_type(tl.float32, [4, 3])


def test_operands_of_one_type_stay_as_they_are_unless_the_operation_needs_another() -> None:
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    make_faster(interpreter)
    tl, semantic = interpreter.tl, interpreter.interpreter_semantic
    half, other = (semantic.scalar_constant(value, tl.float16) for value in (1.0, 2.0))
    check = semantic.binary_op_type_checking_impl
    assert (half, other) == check(half, other)
    for arguments, options in (((False, False, True, True), {}), ((), {"div_or_mod": True})):
        assert ["fp32", "fp32"] == [operand.dtype.name for operand in check(half, other, *arguments, **options)]
    byte, word = semantic.scalar_constant(1, tl.int8), semantic.scalar_constant(1, tl.int32)
    assert ["int32", "int32"] == [operand.dtype.name for operand in check(byte, word)]
    assert ["int8", "int8"] == [operand.dtype.name for operand in check(byte, 3)]
    pointer = tl.tensor(None, tl.pointer_type(tl.int8))
    with pytest.raises(Exception, match="invalid operands of type pointer"):
        check(pointer, pointer)


def test_a_launch_patches_once_and_restores_at_its_end() -> None:
    module = fake()
    make_faster(module)
    make_faster(module)
    kernel, called = function_that_sees(module.tl), function_that_sees(module.tl)
    before = Scope.num_restored
    for _ in range(2):
        scope = module._patch_lang(kernel)
        for _ in range(3):
            module._patch_lang(called)
        scope.restore()
    assert [kernel, kernel] == module.patched
    assert 2 == Scope.num_restored - before


def test_a_function_that_sees_another_module_is_patched_too() -> None:
    module = fake()
    make_faster(module)
    kernel, called = function_that_sees(module.tl), function_that_sees(module.tl, module.tl.core)
    scope = module._patch_lang(kernel)
    module._patch_lang(called)
    module._patch_lang(called)
    scope.restore()
    assert [kernel, called] == module.patched
    module._patch_lang(kernel)
    assert [kernel, called, kernel] == module.patched


def test_a_type_is_found_once() -> None:
    module = fake()
    make_faster(module)
    types = [SimpleNamespace(scalar=SimpleNamespace(name=name)) for name in ("fp32", "int8", "fp32")]
    assert ["numpy's fp32", "numpy's int8", "numpy's fp32"] == [module._get_np_dtype(dtype) for dtype in types]
    assert ["fp32", "int8"] == module.asked


@pytest.mark.parametrize("debug", [False, True])
def test_overflows_are_looked_for_only_where_they_are_reported(debug: bool) -> None:
    module = fake(debug)
    make_faster(module)
    assert debug == module.interpreter_builder.options.sanitize_overflow


def test_an_interpreter_with_other_parts_stays_as_it_is() -> None:
    module = fake()
    del module._LangPatchScope
    before = dict(vars(module))
    make_faster(module)
    assert before == vars(module)
