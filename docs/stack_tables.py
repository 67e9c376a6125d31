"""Write the tables of keys in stack_file.md from the classes that read a stack file.

python docs/stack_tables.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from kvframe.config.options import CacheOptions, EngineOptions, LimitOptions, ModelOptions, Rule, Use
from kvframe.config.schema import describe_keys
from kvframe.loading.checks import Check

PAGE = Path(__file__).with_name("stack_file.md")
TABLES: Mapping[str, type[Any]] = {
    "[model]": ModelOptions,
    "[limits]": LimitOptions,
    "[cache]": CacheOptions,
    "[engine]": EngineOptions,
    "[[rules]]": Rule,
}
START, END = "<!-- tables: start -->\n", "<!-- tables: end -->\n"


def write_tables() -> str:
    """Return a table of all keys for each table of a stack file, as Markdown."""
    return "\n".join(f"### `{heading}`\n\n{_table(options)}" for heading, options in TABLES.items())


def with_tables(page: str) -> str:
    """Return a page with the tables between its two marks."""
    before, _, rest = page.partition(START)
    return f"{before}{START}\n{write_tables()}\n{END}{rest.partition(END)[2]}"


def _table(options: type[Any]) -> str:
    described = describe_keys(options)
    rows = [
        (f"`{field.name}`", _default(field), described[field.name], _expected(field)) for field in attrs.fields(options)
    ]
    header = ("key", "default", "what it says", "a value is")
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, ("---",) * len(header), *rows))


def _default(field: attrs.Attribute[Any]) -> str:
    default = field.default
    if default is None or isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        return ""
    if isinstance(default, Use):
        default = default.name
    written = str(list(default)) if isinstance(default, tuple) else f'"{default}"' if isinstance(default, str) else None
    return f"`{written or str(default).lower()}`"


def _expected(field: attrs.Attribute[Any]) -> str:
    if isinstance(field.validator, Check):
        return field.validator.expected.replace("'", '"')
    if field.name == "wrappers":
        return "an array of names, or of tables of a name and options"
    return "a name, or a table of a name and options"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
