"""What all pages of results are made of: headings, tables, and medians with their range."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def page(*parts: str) -> str:
    """Return a page of paragraphs, headings and tables, with a blank line after each; what is empty is left out."""
    return "\n\n".join(part for part in parts if part) + "\n"


def heading(title: str, record: Mapping[str, Any], what: str, note: str = "", *, how: str = "Measured") -> str:
    """Return a page's title and where its figures are from.

    Args:
        title: The page's.
        record: Says on which machine, when and by which command its figures were found.
        what: What the command's figures are; it follows the command.
        note: A last sentence, on what is the same for all figures.
        how: The first word.
    """
    machine = record["machine"]
    return (
        f"# {title}\n\n{how} on {machine['date']} by `{machine['command']}`{what}\n\n"
        f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} torch thread(s), {machine['system']}; "
        f"Python {machine['python']}, torch {machine['torch']}, transformers {machine['transformers']}, "
        f"kvframe {machine['kvframe']} at {machine['commit']}. {note}".rstrip()
    )


def medians(record: Mapping[str, Any]) -> str:
    """Return what is said of figures that are medians of rounds by turns."""
    return f", median of {record['repeats']} alternating repeats (lowest to highest in brackets)."


def spread(values: Sequence[float], form: str, *, scale: float = 1) -> str:
    """Return the median with the lowest and highest in brackets, each times ``scale`` and as ``form`` writes it.

    Without values the cell is empty.
    """
    if not values:
        return ""
    figures = (statistics.median(values), min(values), max(values))
    middle, low, high = (form.format(scale * value) for value in figures)
    return f"{middle} ({low} to {high})"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; nothing without rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *lines]) if lines else ""


Column = tuple[str, str] | tuple[str, str, float]
"""The head of a column, how a number is written, and by what it is multiplied, which is 1 unless given."""


def figures(
    rows: Mapping[str, Mapping[str, Any]], columns: Mapping[str, Column], corner: str = "", missing: str = ""
) -> str:
    """Return a table of figures: of several numbers the median with its range; a number, or text, as it is.

    Args:
        rows: The figures by name, of each row by its name.
        columns: By the name of a figure.
        corner: The head of the first column.
        missing: Stands for a figure that a row lacks.
    """

    def cell(value: Any, form: str, scale: float = 1) -> str:
        if value is None:
            return missing
        if isinstance(value, str):
            return value
        return spread(value, form, scale=scale) if isinstance(value, Sequence) else form.format(scale * value)

    cells = ((name, *(cell(row.get(key), *how[1:]) for key, how in columns.items())) for name, row in rows.items())
    return table((corner, *(head for head, *_ in columns.values())), cells)
