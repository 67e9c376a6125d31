"""Reads the text of a tool call: JSON, or pairs of a key and a value.

A reader gets the text between a call's marks. It raises ``ValueError`` if that is no call. Arguments that are JSON are
copied from the text, so that no number and no escaped character changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from kvframe_serve.answers.format import ToolCall, Tools

CallReader = Callable[[str, Tools], list[ToolCall]]
"""Returns the calls that a text holds, or raises ``ValueError``."""

_SPACE = re.compile(r"[ \t\n\r]*+")
_WRITTEN_BY_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Templates write values by ``| string``, and models repeat what they read."""


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_refuse)
"""It only checks: a number of any length is kept as its text."""


def members(text: str) -> dict[str | int, str]:
    """Return the JSON texts of an object's values by key, or those of an array's elements by index.

    Raises:
        ValueError: ``text`` is no such JSON, or has something after it.
    """
    position = _skip(text, 0)
    opening = text[position : position + 1]
    if opening not in ("{", "["):
        raise ValueError("no object and no array")
    closing = "}" if opening == "{" else "]"
    values: dict[str | int, str] = {}
    position = _skip(text, position + 1)
    is_closed = text.startswith(closing, position)
    while not is_closed:
        key: str | int = len(values)
        if opening == "{":
            key, position = _key(text, position)
        _, end = _DECODER.raw_decode(text, position)
        values[key] = text[position:end]
        position = _skip(text, end)
        is_closed = text.startswith(closing, position)
        if not is_closed:
            position = _expect(",", text, position)
    if _skip(text, position + 1) != len(text):
        raise ValueError("text follows")
    return values


def _key(text: str, position: int) -> tuple[str, int]:
    """Return a key, and where its value begins."""
    if not text.startswith('"', position):
        raise ValueError("a key is no string")
    key, end = _DECODER.raw_decode(text, position)
    return key, _expect(":", text, _skip(text, end))


def _expect(character: str, text: str, position: int) -> int:
    if not text.startswith(character, position):
        raise ValueError(f"{character} is missing")
    return _skip(text, position + 1)


def _skip(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None
    return match.end()


def _as_arguments(value: str) -> str:
    if value == "null":
        return "{}"
    if value.startswith('"'):  # a template that writes a client's JSON by tojson shows models JSON within a string
        value = json.loads(value).strip()
        value.encode()  # raises ValueError for half of a pair of UTF-16, which cannot be sent
        members(value)
    if not value.startswith("{"):
        raise ValueError("arguments are an object")
    return value


def json_calls(text: str, tools: Tools) -> list[ToolCall]:
    """Read ``{"name": …, "arguments": {…}}``, or an array of such; "parameters" is another name of the arguments."""
    values = [*members(text).values()] if text.lstrip().startswith("[") else [text]
    return list(map(_json_call, values))


def _json_call(text: str) -> ToolCall:
    values = members(text)
    if not values.keys() & {"arguments", "parameters"} or not values.get("name", "").startswith('"'):
        raise ValueError("no name, or no arguments")
    return ToolCall(json.loads(values["name"]), _as_arguments(values.get("arguments", values.get("parameters", ""))))


@attrs.frozen
class NamedObject:
    """Reads a name and a JSON object.

    Attributes:
        head: Matches what stands before the object; its group ``name`` is the tool's name.
        tail: Matches what stands after it.
    """

    head: re.Pattern[str] = attrs.field(converter=_compiled)
    tail: re.Pattern[str] = attrs.field(converter=_compiled, default=r"\s*+")

    def __call__(self, text: str, tools: Tools) -> list[ToolCall]:
        """Return the call."""
        head = _match(self.head, text)
        _, end = _DECODER.raw_decode(text, head.end())
        if not self.tail.fullmatch(text, end):
            raise ValueError("text follows")
        return [ToolCall(head["name"], _as_arguments(text[head.end() : end]))]


@attrs.frozen
class NamedPairs:
    """Reads a name, and pairs of a key and a value, each as plain text.

    A value whose parameter is a string is its text. Another value is JSON, or a string if it is no JSON.

    Attributes:
        head: Matches what stands before the pairs; its group ``name`` is the tool's name.
        pair: Matches one pair; its groups are ``key`` and ``value``.
    """

    head: re.Pattern[str] = attrs.field(converter=_compiled)
    pair: re.Pattern[str] = attrs.field(converter=_compiled)

    def __call__(self, text: str, tools: Tools) -> list[ToolCall]:
        """Return the call."""
        head = _match(self.head, text)
        position = head.end()
        pairs: dict[str, str] = {}
        while pair := self.pair.match(text, position):
            pairs[pair["key"]] = _as_json(pair["value"], _types(tools.get(head["name"]), pair["key"]))
            position = pair.end()
        if text[position:].strip():
            raise ValueError("text follows")
        arguments = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in pairs.items())
        return [ToolCall(head["name"], f"{{{arguments}}}")]


@attrs.frozen
class NamedBraces:
    """Reads a name, and an object whose keys are bare and whose strings stand between two marks: ``call:f{a:1}``.

    Attributes:
        head: Matches what stands before the object; its group ``name`` is the tool's name.
        quote: The mark on both sides of a string.
    """

    head: re.Pattern[str] = attrs.field(converter=_compiled)
    quote: str

    def __call__(self, text: str, tools: Tools) -> list[ToolCall]:
        """Return the call."""
        head = _match(self.head, text)
        texts = text[head.end() :].strip().split(self.quote)
        texts[::2] = [_as_bare_json(bare) for bare in texts[::2]]
        texts[1::2] = [json.dumps(string, ensure_ascii=False) for string in texts[1::2]]
        arguments = "".join(texts)
        members(arguments)
        return [ToolCall(head["name"], _as_arguments(arguments))]


def _as_bare_json(text: str) -> str:
    if '"' not in text:
        text = _BARE_WORD.sub(lambda match: _WRITTEN_BY_PYTHON[match[0]], text)
    return _BARE_KEY.sub(r'\1"\2":', text)


_BARE_WORD = re.compile(r"(?<=[:,\[])(?:True|False|None)(?=\s*+[,}\]])")
_BARE_KEY = re.compile(r'([{,]\s*+)([^\s{}\[\]:,"]++)\s*+:')


def _match(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    match = pattern.match(text)
    if match is None:
        raise ValueError("no name")
    return match


def _types(schema: Any, key: str) -> set[str]:
    """Return the types that a parameter can have, as far as the schema says it; a client may send any schema."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    parameter = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(parameter, Mapping):
        return set()
    choices = [parameter]
    for name in ("anyOf", "oneOf"):
        name_type = parameter.get(name)
        choices += (
            [choice for choice in name_type if isinstance(choice, Mapping)] if isinstance(name_type, list) else []
        )
    types: set[str] = set()
    for choice in choices:
        choice_type = choice.get("type")
        choice_types = choice_type if isinstance(choice_type, list) else [choice_type]
        types.update(name for name in choice_types if isinstance(name, str))
    return types


def _as_json(text: str, types: set[str]) -> str:
    content = text.strip()
    value = _WRITTEN_BY_PYTHON.get(content, content)
    is_null = value == "null" and "null" in types
    if "string" not in types or is_null:
        try:
            _, end = _DECODER.raw_decode(value)
        except (ValueError, RecursionError):
            end = -1
        if end == len(value):
            return value
    return json.dumps(text, ensure_ascii=False)
