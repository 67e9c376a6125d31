"""Checks of a stack's values, the same for values from a file and values given in Python."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from kvframe.contract.errors import StackError, nearest_of, shown
from kvframe.contract.sizes import MAX_SIZE, parse_bytes
from kvframe.loading.claims import KINDS

_TOML_NAMES = {
    bool: "a boolean",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "a table",
}


MAX_WHOLE = 2**31 - 1
"""The largest number of tokens, requests or blocks: arrays on a device count them in 32 bits."""


def describe(value: Any) -> str:
    """Return a value and its type, named as in TOML."""
    return f"{shown(value)} ({_TOML_NAMES.get(type(value), type(value).__name__)})"


@attrs.frozen
class Check:
    """The accepted values of one key. An instance is the validator of an attrs field.

    Attributes:
        expected: The accepted values in words, which follow "must be".
        accepts: Returns whether a value is accepted.
        known: All accepted values, to find the nearest match; empty if they cannot be listed.
        schema: The accepted values as a JSON Schema.
    """

    expected: str
    accepts: Callable[[Any], bool]
    known: tuple[str, ...] = ()
    schema: Mapping[str, Any] = attrs.field(factory=dict, eq=False, repr=False)

    def __call__(self, instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        """Raise ``StackError`` for a wrong value."""
        try:
            self.checked(value)
        except ValueError as error:
            raise StackError(f"{type(instance).__name__}.{attribute.name} {error}") from None

    def checked(self, value: Any) -> Any:
        """Return ``value``; raise ``ValueError`` with the expected values if it is wrong."""
        if not self.accepts(value):
            nearest = nearest_of(value, self.known) if isinstance(value, str) else None
            hint = "" if nearest is None else f"; did you mean {nearest!r}?"
            raise ValueError(f"must be {self.expected}, not {describe(value)}{hint}")
        return value


def one_of(*names: str) -> Check:
    """Return the check for a string from a list."""
    words = f"one of {', '.join(map(repr, names))}" if len(names) > 1 else repr(names[0])
    return Check(words, lambda value: isinstance(value, str) and value in names, names, {"enum": list(names)})


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_WHOLE


def _is_wholes(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(map(_is_whole, value))


def _is_size(value: Any) -> bool:
    try:
        return value == "auto" or parse_bytes(value) > 0
    except StackError:
        return False


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_text, value))


def _is_table_of_texts(value: Any) -> bool:
    return _is_table(value) and all(map(_is_text, value.values()))


def _is_owners(value: Any) -> bool:
    return _is_table(value) and set(value) <= set(KINDS) and all(map(_is_table_of_texts, value.values()))


def _is_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_text, value))


def _is_device(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[a-z]{1,20}(:\d{1,3})?", value, re.ASCII) is not None


_WHOLE = {"type": "integer", "minimum": 1, "maximum": MAX_WHOLE}
_WHOLES = {"type": "array", "minItems": 1, "items": _WHOLE}
_SIZES = (
    {"type": "integer", "minimum": 1, "maximum": MAX_SIZE},
    {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*([KMGT]i?B|B)?\s*$"},
)
_TEXT = {"type": "string", "minLength": 1}

WHOLE = Check(f"a whole number from 1 to {MAX_WHOLE}", _is_whole, schema=_WHOLE)
WHOLE_OR_NONE = Check(WHOLE.expected, lambda value: value is None or _is_whole(value), schema=_WHOLE)
WHOLES = Check(f"an array of whole numbers from 1 to {MAX_WHOLE}", _is_wholes, schema=_WHOLES)
GRAPH_SIZES = Check(
    "'off', 'auto', or an array of numbers of requests, each at least 1",
    lambda value: value in ("off", "auto") if isinstance(value, str) else _is_wholes(value),
    ("off", "auto"),
    {"anyOf": [{"enum": ["off", "auto"]}, _WHOLES]},
)
SWITCH = Check("true or false", lambda value: isinstance(value, bool), schema={"type": "boolean"})
TEXT = Check("a string that is not empty", _is_text, schema=_TEXT)
TEXT_OR_NONE = Check(TEXT.expected, lambda value: value is None or _is_text(value), schema=_TEXT)
TEXTS = Check("an array of strings", _is_texts, schema={"type": "array", "items": _TEXT})
TABLE = Check("a table", _is_table, schema={"type": "object", "propertyNames": {"minLength": 1}})
TABLE_OR_NONE = Check(TABLE.expected, lambda value: value is None or _is_table(value), schema=TABLE.schema)
TABLES = Check("a table of tables", lambda value: _is_table(value) and all(map(_is_table, value.values())))
TABLE_OF_TEXTS = Check("a table of strings", _is_table_of_texts)
OWNERS = Check(f'a table with the keys {", ".join(KINDS)}, each a table of name = "distribution"', _is_owners)
MEMORY = Check(
    "'auto', a number of bytes, or a size like '2GiB'", _is_size, schema={"anyOf": [{"enum": ["auto"]}, *_SIZES]}
)
SIZE_OR_NONE = Check(
    "a number of bytes, or a size like '2GiB'",
    lambda value: value is None or (value != "auto" and _is_size(value)),
    schema={"anyOf": [*_SIZES]},
)
DEVICE = Check(
    "'auto', or a device like 'cpu' or 'cuda:0'",
    _is_device,
    schema={"type": "string", "pattern": r"^[a-z]{1,20}(:[0-9]{1,3})?$"},
)
