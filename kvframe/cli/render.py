"""Prints tables, facts and progress bars that fit the width of the terminal, or 80 columns in a pipe.

rich is imported only for progress bars.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Any, TextIO

import click

if TYPE_CHECKING:
    from rich.console import Console

ShowProgress = Callable[[int], None]
"""Takes the number of finished units and updates a progress bar."""


_PIPE_WIDTH = 80
"""Columns of a line if the output is not a terminal."""

_NARROWEST_LINE, _WIDEST_LINE = 20, 1000
"""The least and the most columns that a line is made for, whatever the terminal or the environment says."""

_NARROWEST_FOLD = 24
"""The least width that a folded cell gets, unless its longest word is shorter."""

_NARROWEST_VALUE = 12
"""The least width that the value of a named fact gets."""

_INDENT = _GAP = "  "
"""What is before a line of a table, and between its columns."""


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


def line_width() -> int:
    """Return the columns of a line: ``COLUMNS`` if it is set, the terminal's width on a terminal, 80 in a pipe.

    A number of columns that no text can be folded to is replaced by the nearest one that works.
    """
    columns = _columns_asked_for()
    if not columns:
        try:
            columns = os.get_terminal_size(sys.stdout.fileno()).columns or _PIPE_WIDTH
        except (OSError, ValueError, AttributeError):  # not a terminal, or a stream without a descriptor
            columns = _PIPE_WIDTH
    return min(max(columns, _NARROWEST_LINE), _WIDEST_LINE)


def make_console(stream: TextIO) -> Console:
    """Return a console of rich for a stream, as wide as ``line_width`` if ``COLUMNS`` is set.

    Otherwise it follows the width of the terminal. rich itself takes any number from ``COLUMNS``, or raises.
    """
    from rich.console import Console

    if "COLUMNS" not in os.environ:
        return Console(file=stream)
    return Console(file=stream, width=line_width(), height=shutil.get_terminal_size().lines)


def _columns_asked_for() -> int:
    """Return the number in ``COLUMNS``; 0 if there is none."""
    columns = os.environ.get("COLUMNS", "")
    if not columns.isdecimal():
        return 0
    # Python converts no number of thousands of digits.
    return int(columns) if len(columns) < len(str(sys.maxsize)) else _WIDEST_LINE


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table whose lines fit into ``line_width``: cells of text fold, and so do headings.

    If the columns do not fit even so, the rows are printed one after the other, one value a line. A column of numbers
    is aligned to the right.
    """
    to_right = [bool(rows) and all(_is_number(row[index]) for row in rows) for index in range(len(columns))]
    widths = _column_widths(columns, rows, to_right, line_width() - len(_INDENT))
    if widths is None:
        for index, row in enumerate(rows):
            print_facts(f"{title} ({index + 1} of {len(rows)})", zip(columns, row, strict=True))
        return
    click.echo(_styled(title, bold=True))
    for number, row in enumerate((columns, *rows)):
        cells = [_fold_text(cell, width) for cell, width in zip(row, widths, strict=True)]
        for line in range(max(map(len, cells))):
            parts = (cell[line] if line < len(cell) else "" for cell in cells)
            text = _GAP.join(
                part.rjust(width) if right else part.ljust(width)
                for part, width, right in zip(parts, widths, to_right, strict=True)
            )
            click.echo(_INDENT + (text.rstrip() if number else _styled(text.rstrip(), fg="cyan")))
        if number == 0 and is_drawn_on(sys.stdout):
            click.echo(_INDENT + "─" * (sum(widths) + len(_GAP) * (len(widths) - 1)))
    click.echo()


def print_facts(title: str, facts: Iterable[tuple[str, str]]) -> None:
    """Print named values under a title, one a line; a long value folds."""
    lines = list(facts)
    names = max(len(name) for name, _ in lines)
    width = max(_NARROWEST_VALUE, line_width() - names - len(_INDENT + _GAP))
    click.echo(_styled(title, bold=True))
    for name, value in lines:
        for index, part in enumerate(_fold_text(value, width)):
            click.echo(f"{_INDENT}{('' if index else name).ljust(names)}{_GAP}{part}".rstrip())
    click.echo()


def print_reasons(title: str, reasons: Mapping[str, Sequence[str]]) -> None:
    """Print under a title each reason once, after the names that it holds for."""
    click.echo(_styled(title, bold=True))
    for reason, names in reasons.items():
        for index, part in enumerate(_fold_text(f"{', '.join(names)}: {reason}", line_width() - 2 * len(_INDENT))):
            click.echo(f"{_INDENT * (2 if index else 1)}{part}")
    click.echo()


def print_note(text: str) -> None:
    """Print a sentence, folded."""
    click.echo("\n".join(_fold_text(text, line_width())))


def _styled(text: str, **style: Any) -> str:
    return click.style(text, **style) if is_drawn_on(sys.stdout) else text


def _column_widths(
    columns: Sequence[str], rows: Sequence[Sequence[str]], to_right: Sequence[bool], available: int
) -> list[int] | None:
    """Return the width of each column, so that a line fits into ``available``; None if it cannot.

    If the columns are too wide, headings fold, if that is enough. Otherwise the widest columns give up most: a column
    of numbers never folds; a column of text keeps its longest word, or ``_NARROWEST_FOLD`` characters of it if all of
    it does not fit.
    """
    widest = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    available -= len(_GAP) * (len(columns) - 1)
    for max_width in (None, available, _NARROWEST_FOLD):
        widths = []
        for heading, right, *cells in zip(columns, to_right, *rows, strict=True):
            whole = right or max_width is None
            parts = [len(part) for cell in cells for part in ([cell] if whole else _words(cell))]
            longest = max(parts, default=0)
            widths.append(max(*map(len, heading.split()), longest if whole else min(longest, max_width or 0)))
        if sum(widths) <= available:
            break
    else:
        return None
    for _ in range(available - sum(widths)):
        narrow = [index for index, width in enumerate(widths) if width < widest[index]]
        if not narrow:
            break
        widths[min(narrow, key=widths.__getitem__)] += 1
    return widths


_BREAKS = re.compile(r"(\s+|(?<=,)(?=\S))")


def _words(text: str) -> list[str]:
    """Return the parts of a text between which a line may end: after spaces and commas."""
    return [part for part in _BREAKS.split(text) if part.strip()]


def _fold_text(text: str, width: int) -> list[str]:
    """Return the lines of a text of at most ``width`` characters each; at least one."""
    wrapper = TextWrapper(width, break_on_hyphens=False)
    wrapper.wordsep_simple_re = _BREAKS
    return wrapper.wrap(text) or [""]


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"[\d,.]+( (B|KiB|MiB|GiB|TiB|%|x))?|-", cell) is not None


@contextmanager
def progress(description: str, total: int) -> Iterator[ShowProgress]:
    """Show a progress bar on stderr while the body runs; nothing unless stderr is a terminal.

    Yields a function that takes the number of finished units.
    """
    if not is_drawn_on(sys.stderr):
        yield lambda num_done: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=make_console(sys.stderr), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda num_done: bar.update(task, completed=num_done)


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
    names_by_shape: dict[tuple[str, ...], list[list[str]]] = {}
    for name in names:
        parts = re.split(r"(\d+)", name)
        names_by_shape.setdefault(tuple(parts[0::2]), []).append(parts)
    return ", ".join(text for same_words in names_by_shape.values() for text in _fold(same_words))


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
        f"{text_before}{strings[0]}{text_after}"
        if len(strings) == 1
        else f"{text_before}{{{_ranges(strings)}}}{text_after}"
        for (text_before, text_after), strings in numbers.items()
    ]


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)
