"""The list of kinds of mistakes, to which the other modules add theirs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TypeVar

import attrs

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class Kind:
    """One kind of mistake.

    Attributes:
        name: The mistake in words.
        part: A backend's, wrapper's or spec's class with this mistake, and no other.
        missed: Why the kit does not find it; empty if it does.
    """

    name: str
    part: type
    missed: str = ""


KINDS: dict[str, Kind] = {}

_MODULES = ("batches", "memory", "numbers", "effects", "wrappers", "specs")


def all_kinds() -> Mapping[str, Kind]:
    """Return the kinds of all modules, by name."""
    for module in _MODULES:
        importlib.import_module(f"tests.testing.mistakes.{module}")
    return KINDS


def kind(name: str, missed: str = "") -> Callable[[type[T]], type[T]]:
    """Add a class with a mistake to the list."""

    def note(part: type[T]) -> type[T]:
        assert name not in KINDS
        KINDS[name] = Kind(name=name, part=part, missed=missed)
        return part

    return note
