"""Validators of attrs fields: a wrong value is refused in a sentence that names the field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from kvframe.contract.errors import SpecError, shown

Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]


def must_be(wording: str, is_right: Callable[[Any], bool]) -> Validator:
    """Return a validator that raises ``SpecError`` for other values: ``OwnSpec.window must be <wording>, not 0``."""

    def validate(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not is_right(value):
            raise SpecError(f"{type(instance).__name__}.{attribute.name} must be {wording}, not {shown(value)}")

    return validate


def whole_number(least: int) -> Validator:
    """Return a validator of whole numbers that are at least ``least``; True and False are none."""
    return must_be(f"a whole number of at least {least}", lambda value: type(value) is int and value >= least)


positive_int = attrs.field(validator=whole_number(1))
"""An attrs field for a count or size: a whole number of at least one."""
