"""What all pages of results are made of: headings, tables, and medians with their range."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def heading(title: str, machine: Mapping[str, Any], what: str, note: str = "", *, how: str = "Measured") -> list[str]:
    """Return a page's first lines.

    Args:
        title: The page's.
        machine: Where, when and by which command its figures were found.
        what: What the command's figures are; it follows the command.
        note: A last sentence, on what is the same for all figures.
        how: The first word.
    """
    return [
        f"# {title}",
        "",
        f"{how} on {machine['date']} by `{machine['command']}`{what}",
        "",
        f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} torch thread(s), {machine['system']}; "
        f"Python {machine['python']}, torch {machine['torch']}, transformers {machine['transformers']}, "
        f"kvframe {machine['kvframe']} at {machine['commit']}. {note}".rstrip(),
    ]


def medians(record: Mapping[str, Any]) -> str:
    """Return what is said of figures that are medians of rounds by turns."""
    return f", median of {record['repeats']} alternating repeats (lowest to highest in brackets)."


def spread(values: Sequence[float], form: str, *, scale: float = 1) -> str:
    """Return the median with the lowest and highest in brackets, each times ``scale`` and as ``form`` writes it."""
    figures = (statistics.median(values), min(values), max(values))
    middle, low, high = (form.format(scale * value) for value in figures)
    return f"{middle} ({low} to {high})"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *(f"| {' | '.join(row)} |" for row in rows)]
