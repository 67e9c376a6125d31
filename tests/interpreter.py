"""Makes Triton's interpreter faster in tests, without a change to what it computes.

Most of its time goes into work whose result is dropped or is always the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
