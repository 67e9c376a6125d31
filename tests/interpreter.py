"""Makes Triton's interpreter faster in tests, without a change to what it computes.

Most of its time goes into work whose result is dropped or is always the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from numbers import Number
from types import ModuleType
from typing import Any

_MARK = "made_faster"


def make_faster(interpreter: ModuleType) -> None:
    """Replace slow parts of ``triton.runtime.interpreter``; a second call does nothing.

    Args:
        interpreter: The module. A version of Triton without these parts stays as it is.
    """
    names = ("_patch_lang", "_LangPatchScope", "_get_np_dtype", "interpreter_builder", "tl")
    if hasattr(interpreter, _MARK) or not all(hasattr(interpreter, name) for name in names):
        return
    setattr(interpreter, _MARK, True)
    builder: Any = interpreter.interpreter_builder
    if not builder.options.debug:
        # Integers are added and multiplied once more, in int64, for an assertion that only the debug mode makes.
        builder.options = replace(builder.options, sanitize_overflow=False)
    vars(interpreter)["_get_np_dtype"] = _remembered(interpreter._get_np_dtype)
    vars(interpreter)["_patch_lang"] = _PatchOnce(interpreter)
    if hasattr(interpreter, "TritonSemantic"):
        _know_shapes(interpreter.tl.core)
        _pass_equal_types(interpreter.TritonSemantic)


def _know_shapes(core: Any) -> None:
    """Make the constants of a shape once, and not for each tensor and each type that has the shape."""
    make_type = core.block_type.__init__
    constants: dict[tuple[int, ...], tuple[Any, Any]] = {}
    values: dict[tuple[int, ...], tuple[Any, int]] = {}

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        key = tuple(type.shape) if type.is_block() else ()
        if key not in constants:
            constants[key] = core.tuple([core.constexpr(size) for size in key]), core.constexpr(prod(key))
        self.shape, self.numel = constants[key]

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(getattr(size, "value", size) for size in shape)
        if key not in values:
            make_type(self, element_ty, shape)  # checks the shape
            values[key] = self.shape, self.numel
        self.element_ty = element_ty
        self.shape, self.numel = values[key]
        self.name = f"<{self.shape}, {element_ty}>"

    core.tensor.__init__ = init_tensor
    core.block_type.__init__ = init_type


def _pass_equal_types(semantic: Any) -> None:
    """Return two tensors of one type of numbers as they are, for which no common type has to be found."""
    check = semantic.binary_op_type_checking_impl

    def check_unless_equal(self: Any, lhs: Any, rhs: Any, *flags: bool, **named: bool) -> tuple[Any, Any]:
        # A division may compute in a larger type than its operands', and pointers have rules of their own.
        divides = named.get("div_or_mod", len(flags) > 3)
        has_number = isinstance(lhs, Number) or isinstance(rhs, Number)
        if not divides and not has_number and lhs.type.name == rhs.type.name and not lhs.dtype.is_ptr():
            return lhs, rhs
        found: tuple[Any, Any] = check(self, lhs, rhs, *flags, **named)
        return found

    semantic.binary_op_type_checking_impl = check_unless_equal


def _remembered(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the function that finds a type of numpy, with its results by the name of Triton's type."""
    known: dict[str, Any] = {}

    def find_once(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    return find_once


class _PatchOnce:
    """Patches ``triton.language`` when a kernel is launched, and not again when the kernel calls a function.

    Invariant: ``_patched`` names the modules that are patched until the launch ends; it is empty between launches.
    """

    def __init__(self, interpreter: ModuleType) -> None:
        self._patch: Callable[[Any], Any] = interpreter._patch_lang
        self._make_scope: Callable[[], Any] = interpreter._LangPatchScope
        self._languages = {"tl": interpreter.tl, "tl.core": interpreter.tl.core}
        self._found: dict[Any, frozenset[str]] = {}
        self._patched: frozenset[str] = frozenset()

    def __call__(self, function: Any) -> Any:
        if function not in self._found:
            self._found[function] = frozenset(
                name
                for name, module in self._languages.items()
                if any(value is module for value in function.__globals__.values())
            )
        found = self._found[function]
        if found and found <= self._patched:
            return self._make_scope()  # it has nothing to restore
        is_launch, self._patched = not self._patched, self._patched | found
        scope = self._patch(function)
        if is_launch:
            restore = scope.restore

            def end_launch() -> None:
                self._patched = frozenset()
                restore()

            scope.restore = end_launch
        return scope
