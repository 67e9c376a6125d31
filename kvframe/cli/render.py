"""Prints tables and progress bars on a terminal, and aligned plain text in a pipe.

rich is imported only if the output is a terminal.
"""

from __future__ import annotations

import codecs
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TextIO

import click

ShowProgress = Callable[[int], None]
"""Takes the number of finished units and updates a progress bar."""


_NARROWEST_FOLD = 24
"""The most characters of a table's widest column; longer cells are folded."""


def wants_no_escapes() -> bool:
    """Return whether the user's environment, or the terminal, asks for plain text: https://no-color.org."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def is_drawn_on(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that supports escape codes."""
    return stream.isatty() and not wants_no_escapes()


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Print ``value`` as one JSON document, on one line if ``indent`` is None."""
    # For a character that the output's encoding lacks, Python would write an escape that is not JSON.
    is_utf8 = codecs.lookup(sys.stdout.encoding or "ascii").name == "utf-8"
    click.echo(json.dumps(value, indent=indent, ensure_ascii=not is_utf8))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: drawn on a terminal, aligned columns in a pipe.

    Args:
        title: The text above the table.
        columns: The headings.
        rows: One cell of text for each column. A column of numbers is aligned to the right.
    """
    to_right = [bool(rows) and all(_is_number(row[index]) for row in rows) for index in range(len(columns))]
    if is_drawn_on(sys.stdout):
        _draw_table(title, columns, rows, to_right)
        return
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    click.echo(title)
    for line in (columns, *rows):
        cells = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, to_right, strict=True)
        )
        click.echo("  " + "  ".join(cells).rstrip())
    click.echo()


def print_facts(title: str, facts: Iterable[tuple[str, str]]) -> None:
    """Print named values, one a line, under a title."""
    lines = list(facts)
    width = max(len(name) for name, _ in lines)
    click.echo(click.style(title, bold=True))
    for name, value in lines:
        click.echo(f"  {name.ljust(width)}  {value}")
    click.echo()


def _draw_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], to_right: Sequence[bool]) -> None:
    """Draw a table whose widest column folds; if the terminal is too narrow, print it row by row, one value a line."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    widest = widths.index(max(widths))
    needed = sum(widths) - widths[widest] + min(widths[widest], _NARROWEST_FOLD) + 2 * len(columns)
    if needed > console.width:
        for index, row in enumerate(rows):
            print_facts(f"{title} ({index + 1} of {len(rows)})", zip(columns, row, strict=True))
        return
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for index, (name, right) in enumerate(zip(columns, to_right, strict=True)):
        justify: Literal["left", "right"] = "right" if right else "left"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=index != widest, header_style="cyan")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"[\d,.]+( (B|KiB|MiB|GiB|TiB|%|x))?|-", cell) is not None


@contextmanager
def progress(description: str, total: int) -> Iterator[ShowProgress]:
    """Show a progress bar on stderr while the body runs; nothing unless stderr is a terminal.

    Args:
        description: The text before the bar.
        total: The number of units.

    Yields:
        A function that takes the number of finished units.
    """
    if not is_drawn_on(sys.stderr):
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def log_lines() -> Iterator[None]:
    """Print kvframe's log messages while the body runs, if stderr is a terminal: they explain a slow start."""
    if not sys.stderr.isatty():
        yield
        return
    log, handler = logging.getLogger("kvframe"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("kvframe: %(message)s"))
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)


def format_bytes(num_bytes: int) -> str:
    """Return a byte count as text, in binary units (``1.50 GiB``)."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:,.2f} TiB"


def compact_names(names: Sequence[str]) -> str:
    """Return layer names on one line, in which the layers' numbers are folded into ranges.

    ``["m.0.attn", "m.1.attn", "m.2.attn", "m.5.attn"]`` becomes ``m.{0-2,5}.attn``.
    """
    alike: dict[tuple[str, ...], list[list[str]]] = {}
    for name in names:
        parts = re.split(r"(\d+)", name)
        alike.setdefault(tuple(parts[0::2]), []).append(parts)
    return ", ".join(text for same_words in alike.values() for text in _fold(same_words))


def _fold(names: Sequence[list[str]]) -> list[str]:
    """Fold names that differ in their numbers only; each name is a list of words and numbers in turn."""
    varying = [index for index in range(1, len(names[0]), 2) if len({parts[index] for parts in names}) > 1]
    if not varying:
        return ["".join(parts) for parts in names]
    counter = varying[0]
    numbers: dict[tuple[str, str], list[int]] = {}
    for parts in names:
        around = ("".join(parts[:counter]), "".join(parts[counter + 1 :]))
        numbers.setdefault(around, []).append(int(parts[counter]))
    return [
        f"{before}{found[0]}{after}" if len(found) == 1 else f"{before}{{{_ranges(found)}}}{after}"
        for (before, after), found in numbers.items()
    ]


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)
