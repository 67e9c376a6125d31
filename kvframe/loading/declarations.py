"""Checks the class attributes of a registered class against the annotations of its base class.

Planning and steps read these class attributes. If one is missing, has another type or raises, the failure would appear
far from its plugin. So each attribute is checked once, when the class is loaded.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

import attrs

from kvframe.contract.foreign import safe_repr


def find_misdeclared(base: type, made: Any) -> str:
    """Return which attribute of ``made`` does not fit its annotation in the contract's ``base``; empty if all fit.

    Of a subclass, the ``ClassVar`` annotations are checked, and of an instance all. Reading them may raise anything.
    """
    for name, hint in _declared(base, of_class=issubclass(type(made), type)):
        try:
            value = getattr(made, name)
        except AttributeError:
            return f"declares no {name}"
        if not _fits(value, hint):
            return f"declares {name} = {safe_repr(value)}, which is not {_in_words(hint)}"
    return ""


def find_undefined(backend_class: Any) -> str:
    """Return what a backend's class declares and lacks, or has in a form that no stack can use; empty if nothing."""
    from kvframe.contract.backend import AttentionBackend  # imports torch, as the class did

    options_class = backend_class.options_class
    if options_class is not None and not attrs.has(options_class):
        return f"declares options_class = {safe_repr(options_class)}, which is not an attrs class"
    bases = (vars(base) for base in backend_class.__mro__ if base is not AttentionBackend)
    taken = {name for base in bases if "attend" in base for name in inspect.signature(base["attend"]).parameters}
    capabilities = backend_class.capabilities
    for declared, value, argument in (
        ("sinks", capabilities.sinks, "sinks"),
        ("returns_lse", capabilities.returns_lse, "lse"),
        ("choices or kinds", capabilities.choices or capabilities.kinds, "more"),
    ):
        if value and argument not in taken:
            return f"declares {declared}, and its attend() does not take {argument!r}"
    return ""


@cache
def _declared(base: type, *, of_class: bool) -> tuple[tuple[str, Any], ...]:
    """Return the annotated attributes of a base class, with types: those of the class, or those of instances too."""
    are_class = [(name, hint, get_origin(hint) is ClassVar) for name, hint in get_type_hints(base).items()]
    declared = [
        (name, get_args(hint)[0] if is_class else hint)
        for name, hint, is_class in are_class
        if is_class or not of_class
    ]
    return tuple(declared)


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in inner)
    if origin is type:
        return issubclass(type(value), type)
    if origin is tuple:
        return issubclass(type(value), tuple) and all(_fits(each, inner[0]) for each in value)
    if origin is frozenset:
        return issubclass(type(value), frozenset) and all(_fits(each, inner[0]) for each in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            _fits(key, inner[0]) and _fits(each, inner[1]) for key, each in value.items()
        )
    if hint is float:
        return type(value) in (int, float)
    return issubclass(type(value), hint)


def _in_words(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")
