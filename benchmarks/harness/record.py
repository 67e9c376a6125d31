"""How a benchmark is called, takes its turns and writes what it found: a record as JSON, a page, plots."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from benchmarks.harness.machine import RESULTS, describe_machine
from kvframe.cli import render

Record = Mapping[str, Any]
T = TypeVar("T")
Side = TypeVar("Side")


def benchmark(
    name: str,
    page: Callable[[Record], str],
    *,
    plots: Mapping[str, Callable[[Any, Path], None]] | None = None,
    fails: Callable[[Record], bool] | None = None,
    joined: str | None = None,
    epilog: str | None = None,
) -> Callable[[Callable[..., dict[str, Any]]], click.Command]:
    """Turn a function that returns what it measured into a command that writes it and prints its page.

    The command has the options of the function, and ``--results``. An option ``--threads`` is the number of torch's
    threads. The record begins with the machine.

    Args:
        name: Of the record and the page, without an ending.
        page: Returns a record as Markdown.
        plots: By name, what draws a record into an SVG file.
        fails: Whether the command ends with exit code 1 for a record.
        joined: The entry of which a later call keeps what an earlier one measured, if the machine, the versions and the
            commit are the same: what takes long can be measured by several calls.
        epilog: The last words of the command's help.
    """

    def decorate(measure: Callable[..., dict[str, Any]]) -> click.Command:
        @functools.wraps(measure)
        def command(results: Path, **options: Any) -> None:
            if "threads" in options:
                import torch

                torch.set_num_threads(options["threads"])
            record = {"machine": describe_machine(options.get("threads", 1)), **measure(**options)}
            if joined is not None and (results / f"{name}.json").exists():
                record = join(json.loads((results / f"{name}.json").read_text(encoding="utf-8")), record, joined)
            write(results, name, record, page(record))
            for plot, draw in (plots or {}).items():
                draw(record, results / f"{plot}.svg")
            click.echo(page(record))
            if fails is not None and fails(record):
                sys.exit(1)

        place = click.option("--results", type=click.Path(path_type=Path), default=RESULTS, help="Where to write.")
        return click.command(epilog=epilog)(place(command))

    return decorate


def can_join(before: Record, record: Record) -> bool:
    """Return whether two records are of one machine, one known commit and the same versions."""
    machine, earlier = record["machine"], before["machine"]
    same = {*machine} - {"command", "date"}
    return machine["commit"] != "unknown" and all(machine[key] == earlier.get(key) for key in same)


def join(before: Record, record: dict[str, Any], entry: str) -> dict[str, Any]:
    """Return a record with what an earlier one measured besides; without it, unless they can be joined."""
    if not can_join(before, record) or set(record[entry]) >= set(before[entry]):
        return record
    commands = dict.fromkeys((*before["machine"]["command"].split("; "), record["machine"]["command"]))
    return {
        **record,
        "machine": {**record["machine"], "command": "; ".join(commands)},
        entry: {**before[entry], **record[entry]},
    }


def write(results: Path, name: str, record: Record, page: str) -> None:
    """Write a record for programs and its page for people."""
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (results / f"{name}.md").write_text(page, encoding="utf-8")


@contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar; yield what is called with the number of units that were finished since the last call."""
    done = 0
    with render.progress(description, total) as show:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            show(done)

        yield advance


def by_turns(
    sides: Sequence[Side],
    count: int,
    run: Callable[[Side, int], T],
    advance: Callable[[int], object] = lambda _: None,
    *,
    warm_up: bool = False,
) -> Iterator[tuple[int, dict[Side, T]]]:
    """Let sides take turns, in an order that is turned by one in each round; yield what each did in a round.

    Args:
        sides: Those that take turns.
        count: The rounds, numbered from 0.
        run: Does a side's turn in the round of a number.
        advance: Called with 1 after each round.
        warm_up: Whether a round of the number -1 comes first, which is not to be counted.
    """
    for number in range(-warm_up, count):
        first = number % len(sides) if sides else 0
        found = {side: run(side, number) for side in (*sides[first:], *sides[:first])}
        yield number, {side: found[side] for side in sides}
        advance(1)


def counted(turns: Iterable[tuple[int, Mapping[str, T]]]) -> dict[str, list[T]]:
    """Return what each side did in the rounds of ``by_turns`` that count."""
    return in_columns(found for number, found in turns if number >= 0)


def in_columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of several rows by name."""
    columns: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return columns


def ratios(seconds: Sequence[float], own: Sequence[float]) -> list[float]:
    """Return how many times as fast ``own`` is in each round."""
    return [theirs / ours for theirs, ours in zip(seconds, own, strict=True)]
