"""A JSON Schema of the stack file, made of the options' own checks, so that editors complete and check it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvframe.config.choices import UNREGISTERED
from kvframe.config.options import AUTO, KIND, CacheOptions, EngineOptions, LimitOptions, ModelOptions, Rule
from kvframe.loading.checks import TABLE, TEXT, Check
from kvframe.loading.claims import KINDS


def make_schema(names: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the schema.

    Args:
        names: The registered names of each kind, and under ``"plugin"`` the plugins, which an editor offers. Any other
            name is valid too: a stack may be for another machine.
    """
    plugin = _name(names, "plugin")
    plugins = {
        "disabled": {"type": "array", "items": plugin, "description": "Plugins that are not imported."},
        "required": {"type": "array", "items": plugin, "description": "Plugins without which the stack cannot run."},
        "owners": {
            "description": "The owner of each contested name: the kind, the name, the distribution.",
            **_closed({kind: {"type": "object", "additionalProperties": TEXT.schema} for kind in KINDS}),
        },
    }
    rule = _table(Rule, names)
    rule["properties"]["kind"] |= _name(names, "spec")
    rule["anyOf"] = [{"required": ["kind"]}, {"required": ["layers"]}]
    tables = {
        "plugins": {"description": "Which plugins are used.", **_closed(plugins)},
        "plugin": {
            "description": "Each plugin's own settings, [plugin.<name>].",
            "type": "object",
            "properties": dict.fromkeys(names.get("plugin", ()), TABLE.schema),
            "additionalProperties": TABLE.schema,
        },
        "model": {"description": "How the model runs.", **_table(ModelOptions, names)},
        "limits": {"description": "The most of a step and of a request.", **_table(LimitOptions, names)},
        "cache": {"description": "The KV cache.", **_table(CacheOptions, names)},
        "engine": {"description": "The engine.", **_table(EngineOptions, names)},
        "rules": {"description": "Choices for some layers; a later rule wins.", "type": "array", "items": rule},
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A stack file of kvframe",
        **_closed(tables),
    }


def describe_keys(options: type[Any]) -> dict[str, str]:
    """Return what the docstring of a class of options says of each key; nothing if Python dropped docstrings."""
    section = (inspect.getdoc(options) or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text).replace("``", "`") for name, text in entries}


def _closed(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "additionalProperties": False}


def _table(options: type[Any], names: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    texts = describe_keys(options)
    properties = {}
    for field in attrs.fields(options):
        annotations: dict[str, Any] = {"description": texts[field.name]} if field.name in texts else {}
        if isinstance(field.default, bool | int | str):
            annotations["default"] = field.default
        properties[field.name] = {**_value(field, names), **annotations}
    return _closed(properties)


def _value(field: attrs.Attribute[Any], names: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the schema of one key's value."""
    if KIND in field.metadata:
        kind = field.metadata[KIND]
        unregistered_names = (
            [AUTO.name]
            if kind == "backend"
            else [name for registered_kind, name in UNREGISTERED if registered_kind == kind]
        )
        use = _use({**names, kind: [*unregistered_names, *names.get(kind, ())]}, kind)
        return {"type": "array", "items": use} if field.name in ("wrappers", "stores") else use
    assert isinstance(field.validator, Check)
    return dict(field.validator.schema)


def _name(names: Mapping[str, Sequence[str]], kind: str) -> dict[str, Any]:
    """Return the schema of a registered name of a kind. An editor offers the known names."""
    known_names = list(names.get(kind, ()))
    return {"anyOf": [{"enum": known_names}, TEXT.schema]} if known_names else dict(TEXT.schema)


def _use(names: Mapping[str, Sequence[str]], kind: str) -> dict[str, Any]:
    """Return the schema of a name, or a table of a name and options."""
    name = _name(names, kind)
    table = {**TABLE.schema, "properties": {"name": name}, "required": ["name"]}
    return {"anyOf": [*name.get("anyOf", [name]), table]}
