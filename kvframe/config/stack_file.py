"""Turns the tables of a stack file into values, and says which keys are unknown or hold wrong values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, get_args, get_origin

import attrs
import cattrs
from cattrs.gen import make_dict_structure_fn, override

from kvframe.config.options import CacheOptions, EngineOptions, LimitOptions, ModelOptions, Rule, Use
from kvframe.contract.errors import UnknownNameError, nearest_of, shorten
from kvframe.loading.checks import TABLE, TABLE_OF_TEXTS, TABLES, TEXT, TEXTS, Check, describe
from kvframe.loading.claims import KINDS

_texts = partial(attrs.field, factory=dict, validator=TABLE_OF_TEXTS, type=Mapping[str, str])
_OwnersTable: Any = attrs.make_class("_OwnersTable", {kind: _texts() for kind in KINDS}, frozen=True, kw_only=True)


@attrs.frozen(kw_only=True)
class _PluginsTable:
    disabled: tuple[str, ...] = attrs.field(default=(), validator=TEXTS)
    required: tuple[str, ...] = attrs.field(default=(), validator=TEXTS)
    owners: _OwnersTable = attrs.field(factory=_OwnersTable)


@attrs.frozen(kw_only=True)
class StackTables:
    """The tables of a stack file, checked key by key."""

    plugins: _PluginsTable = attrs.field(factory=_PluginsTable)
    plugin: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict, validator=TABLES)
    model: ModelOptions = attrs.field(factory=ModelOptions)
    limits: LimitOptions = attrs.field(factory=LimitOptions)
    cache: CacheOptions = attrs.field(factory=CacheOptions)
    engine: EngineOptions = attrs.field(factory=EngineOptions)
    rules: tuple[Rule, ...] = ()


def read_tables(data: Mapping[str, Any]) -> StackTables:
    """Return the tables of a stack file; raise what ``problems_of`` takes if a key or a value is wrong."""
    return _converter.structure(data, StackTables)


def _checked(check: Check, value: Any, _: Any) -> Any:
    return check.checked(value)


def _make_table_hook(table: type[Any]) -> Callable[[Any, Any], Any]:
    checks = {
        field.name: override(struct_hook=partial(_checked, field.validator))
        for field in attrs.fields(table)
        if isinstance(field.validator, Check)
    }
    # attrs' own validators would not know the key's path; these overrides do.
    make: Any = make_dict_structure_fn
    structure = make(table, _converter, _cattrs_forbid_extra_keys=True, **checks)
    return lambda value, kind: structure(TABLE.checked(value), kind)


def _is_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple


def _structure_tuple(value: Any, kind: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        hint = "; each table of an array starts with double brackets: [[rules]]" if isinstance(value, Mapping) else ""
        raise ValueError(f"must be an array, not {describe(value)}{hint}")
    items: Any = list[get_args(kind)[0]]  # type: ignore[misc]
    return tuple(_converter.structure(value, items))


def _structure_use(value: Any, _: Any) -> Use:
    if isinstance(value, Mapping):
        if not isinstance(value.get("name"), str):
            raise ValueError('needs a name beside its options: name = "..."')
        return Use.of_table(value)
    return Use(_NAME.checked(value))


_TABLE_OF = {
    field.name: table
    for table, options in (
        ("engine", EngineOptions),
        ("cache", CacheOptions),
        ("limits", LimitOptions),
        ("model", ModelOptions),
    )
    for field in attrs.fields(options)
}
"""The table of each key; a key of several tables is the model's."""
_NAME = Check("a name, or a table of a name and options", TEXT.accepts)
_converter = cattrs.Converter()
_converter.register_structure_hook_factory(attrs.has, _make_table_hook)
_converter.register_structure_hook_func(_is_tuple, _structure_tuple)
_converter.register_structure_hook(Use, _structure_use)


def problems_of(error: Exception, path: str = "") -> Iterator[str]:
    """Yield one sentence for each key with an error of cattrs; the sentence begins with the key's path."""
    prefix = f"{path}." if path else ""
    if isinstance(error, cattrs.ForbiddenExtraKeysError):
        known_keys = [field.name for field in attrs.fields(error.cl)]
        for key in sorted(error.extra_fields):
            yield f"{prefix}{shorten(key)}: {UnknownNameError('key', key, known_keys)}{_hint_at_table(key, known_keys)}"
    elif isinstance(error, cattrs.ClassValidationError):
        fields, table_errors = error.group_exceptions()
        for part, note in fields:
            yield from problems_of(part, f"{prefix}{note.name}")
        for part in table_errors:
            yield from problems_of(part, path)
    elif isinstance(error, cattrs.IterableValidationError):
        for part, index_note in error.group_exceptions()[0]:
            yield from problems_of(part, f"{path}[{index_note.index}]")
    else:
        yield f"{path} {error}" if path else str(error)


def _hint_at_table(key: str, known_keys: Sequence[str]) -> str:
    """Return a hint at the table that a key was meant for; empty if its own table has one that is as near."""
    if nearest_of(key, known_keys) is not None:
        return ""
    nearest = key if key in _TABLE_OF else nearest_of(key, list(_TABLE_OF))
    return "" if nearest is None else f"; did you mean {nearest!r} of [{_TABLE_OF[nearest]}]?"
