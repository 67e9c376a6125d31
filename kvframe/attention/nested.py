"""Finds the tensors inside nested values in a fixed order, and rebuilds the values with other tensors.

This runs in every step. So what a class is, and which of its fields can hold a tensor, is found out once per class.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, is_
from types import MappingProxyType, MemberDescriptorType, NoneType, UnionType
from typing import Any, TypeVar

import attrs
import torch

T = TypeVar("T")


def host_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors on the host that a value holds outside of ``_cpu`` fields, each once, in a fixed order.

    Args:
        value: Tensors in attrs classes, dataclasses, tuples, lists and mappings. Fields that are declared as numbers,
            strings or containers of them are skipped, and so are objects of other classes.
    """
    tensors: dict[int, torch.Tensor] = {}
    _collect(value, tensors, set())
    return list(tensors.values())


def _collect(value: Any, tensors: dict[int, torch.Tensor], seen_ids: set[int]) -> None:
    structure = _structures[type(value)]
    if structure is None:
        return
    number = id(value)
    if structure is TENSOR:
        if number not in tensors and value.is_cpu:
            tensors[number] = value
    elif number not in seen_ids:
        seen_ids.add(number)
        for part in structure.parts(value):
            _collect(part, tensors, seen_ids)


def replace_tensors(value: T, change: Callable[[torch.Tensor], torch.Tensor]) -> T:
    """Return a value with its tensors changed, but for those in fields whose names end with ``_cpu``.

    An object that occurs several times is replaced by one object; an object without changes is returned as it is.
    """
    result: T = _replace(value, change, {})
    return result


def _replace(value: Any, change: Callable[[torch.Tensor], torch.Tensor], replacements: dict[int, Any]) -> Any:
    structure = _structures[type(value)]
    if structure is None:
        return value
    if structure is TENSOR:
        return change(value)
    number = id(value)
    if number in replacements:
        return replacements[number]
    old_parts = structure.parts(value)
    new_parts = [_replace(part, change, replacements) for part in old_parts]
    result = value if all(map(is_, old_parts, new_parts)) else structure.rebuild(value, new_parts)
    replacements[number] = result
    return result


def field_names(cls: type) -> tuple[str, ...] | None:
    """Return the fields of an attrs class or a dataclass whose names do not end in ``_cpu``; None for another class."""
    every = _declared(cls)
    return None if every is None else tuple(name for name in every if not name.endswith("_cpu"))


# --- how a class holds tensors ----------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class Structure:
    """How to take a value of a class apart, and how to rebuild it.

    Attributes:
        parts: Returns the parts of a value that may be tensors or hold tensors.
        rebuild: Returns a copy of a value with other parts.
    """

    parts: Callable[[Any], Sequence[Any]]
    rebuild: Callable[[Any, Sequence[Any]], Any]


def _of_fields(cls: type, every: Sequence[str], looked_into: Sequence[str]) -> Structure:
    """Return the structure of an attrs class or a dataclass.

    Args:
        cls: The class.
        every: Its fields.
        looked_into: The fields that may hold tensors.
    """
    other_names = [name for name in every if name not in looked_into]
    setters, values_of_others = [_setter(cls, name) for name in (*looked_into, *other_names)], _getter(other_names)

    def rebuild(value: Any, parts: Sequence[Any]) -> Any:
        # The constructor is not called, because it may do more than set fields.
        copy: Any = object.__new__(cls)
        for set_field, field_value in zip(setters, (*parts, *values_of_others(value)), strict=True):
            set_field(copy, field_value)
        return copy

    return Structure(_getter(looked_into), rebuild)


def _getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    # For a single name, attrgetter does not return a tuple.
    return lambda value: tuple(getattr(value, name) for name in names)


def _setter(cls: type, name: str) -> Callable[[Any, Any], None]:
    """Return a function that sets a field, even of a frozen class; if the class has slots, it is the slot's setter."""
    field = getattr(cls, name, None)
    if isinstance(field, MemberDescriptorType):
        return field.__set__
    return lambda value, part: object.__setattr__(value, name, part)


def _rebuild_mapping(value: Any, parts: Sequence[Any]) -> Any:
    items = dict(zip(value, parts, strict=True))
    return MappingProxyType(items) if type(value) is MappingProxyType else items


def _rebuild_sequence(value: Any, parts: Sequence[Any]) -> Any:
    cls = type(value)
    return cls(*parts) if hasattr(cls, "_fields") else cls(parts)


TENSOR = Structure(parts=lambda value: (), rebuild=lambda value, parts: value)
MAPPING = Structure(parts=lambda value: tuple(value.values()), rebuild=_rebuild_mapping)
SEQUENCE = Structure(parts=lambda value: value, rebuild=_rebuild_sequence)


class _Structures(dict[type, Structure | None]):
    """The structure of each class; None for a class that holds no tensors to find."""

    def __missing__(self, cls: type) -> Structure | None:
        self[cls] = TENSOR  # until the structure is found, so that a field of the class's own type is looked into
        structure = self[cls] = _find_structure(cls)
        return structure


_structures = _Structures()


def _find_structure(cls: type) -> Structure | None:
    if issubclass(cls, torch.Tensor):
        return TENSOR
    every = _declared(cls)
    if every is not None:
        declared = _types_of_fields(cls)
        looked_into = [
            name for name in every if not name.endswith("_cpu") and _may_hold_tensors(declared.get(name, Any))
        ]
        return _of_fields(cls, every, looked_into) if looked_into else None
    if issubclass(cls, Mapping):
        return MAPPING
    return SEQUENCE if issubclass(cls, tuple | list) else None


def _declared(cls: type) -> tuple[str, ...] | None:
    """Return the fields of an attrs class or a dataclass; None for another class."""
    if attrs.has(cls):
        return tuple(field.name for field in attrs.fields(cls))
    if dataclasses.is_dataclass(cls):
        return tuple(field.name for field in dataclasses.fields(cls))
    return None


def _types_of_fields(cls: type) -> Mapping[str, Any]:
    try:
        # A module that imports torch for type checkers only can still declare tensors.
        return typing.get_type_hints(cls, localns={torch.__name__: torch})
    except NameError:
        return {}


def _may_hold_tensors(declared: Any) -> bool:
    """Return whether a field of a declared type may hold a tensor to find."""
    origin, arguments = typing.get_origin(declared), typing.get_args(declared)
    if arguments and (origin in (typing.Union, UnionType) or _is_container(origin)):
        return any(_may_hold_tensors(argument) for argument in arguments if argument is not Ellipsis)
    if not isinstance(declared, type):
        return True
    if declared is NoneType or issubclass(declared, bool | int | float | str):
        return False
    return _declared(declared) is None or _structures[declared] is not None


def _is_container(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, tuple | list | Mapping)
