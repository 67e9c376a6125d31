"""Sorts the options of a stack into its tables."""

from __future__ import annotations

from typing import Any

import attrs

from kvframe.config.stack import CacheOptions, EngineOptions, LimitOptions, ModelOptions

_TABLES = {"cache": CacheOptions, "model": ModelOptions, "limits": LimitOptions, "engine": EngineOptions}


def tables_of(**options: Any) -> dict[str, dict[str, Any]]:
    """Return the tables of a stack file; each option is in the first table that has its key, ``[cache]`` first."""
    tables: dict[str, dict[str, Any]] = {}
    for key, value in options.items():
        table = next(name for name, keys in _TABLES.items() if key in attrs.fields_dict(keys))
        tables.setdefault(table, {})[key] = value
    return tables
