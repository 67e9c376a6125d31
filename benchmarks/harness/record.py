"""The frame of a benchmark: its command, rounds in which systems take turns, ratios, and the files that it writes."""

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
    cases: str | None = None,
) -> Callable[[Callable[..., dict[str, Any]]], click.Command]:
    """Turn a function that returns its measurements into a command that writes a record and prints its page.

    The command has the options of the function, and ``--results``. If the function has the option ``--threads``, torch
    gets this number of threads. The record begins with the machine; its files are called ``name``.

    Args:
        name: The name of the record.
        page: Returns a record as Markdown.
        plots: By file name, functions that draw a record into an SVG file.
        fails: Returns whether the command ends with exit code 1 for a record.
        cases: The entry of the record that holds the measured cases by name. A later call adds its cases to those of
            earlier calls on the same machine, commit and versions, so a long record can be made case by case.
    """

    def decorate(measure: Callable[..., dict[str, Any]]) -> click.Command:
        @functools.wraps(measure)
        def command(results: Path, **options: Any) -> None:
            if "threads" in options:
                import torch

                torch.set_num_threads(options["threads"])
            record = {"machine": describe_machine(options.get("threads", 1)), **measure(**options)}
            if cases is not None and (results / f"{name}.json").exists():
                record = join(json.loads((results / f"{name}.json").read_text(encoding="utf-8")), record, cases)
            write(results, name, record, page(record))
            for plot, draw in (plots or {}).items():
                draw(record, results / f"{plot}.svg")
            click.echo(page(record))
            if fails is not None and fails(record):
                sys.exit(1)

        place = click.option("--results", type=click.Path(path_type=Path), default=RESULTS, help="Where to write.")
        return click.command()(place(command))

    return decorate


def can_join(before: Record, record: Record) -> bool:
    """Return whether two records are of one machine, one known commit and the same versions."""
    machine, earlier = record["machine"], before["machine"]
    same = {*machine} - {"command", "date"}
    versions = before.get("versions", {})
    return (
        machine["commit"] != "unknown"
        and all(machine[key] == earlier.get(key) for key in same)
        and all(versions.get(name, version) == version for name, version in record.get("versions", {}).items())
    )


def join(before: Record, record: dict[str, Any], entry: str) -> dict[str, Any]:
    """Add the cases of an earlier record to a record, if both can be joined and have the same other entries.

    ``machine.command`` then names both commands, and ``repeats`` lists both numbers of rounds if they differ.
    """
    others = {*record} - {"machine", "repeats", "versions", entry}
    is_same = can_join(before, record) and all(before.get(name) == record[name] for name in others)
    if not is_same or set(record[entry]) >= set(before[entry]):
        return record
    commands = dict.fromkeys((*before["machine"]["command"].split("; "), record["machine"]["command"]))
    joined = {
        **record,
        "machine": {**record["machine"], "command": "; ".join(commands)},
        **{name: {**before[name], **record[name]} for name in (entry, "versions") if name in record},
    }
    if "repeats" in record:
        rounds = {*_listed(before["repeats"]), *_listed(record["repeats"])}
        joined["repeats"] = sorted(rounds) if len(rounds) > 1 else record["repeats"]
    return joined


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def write(results: Path, name: str, record: Record, page: str) -> None:
    """Write a record for programs and its page for people."""
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (results / f"{name}.md").write_text(page, encoding="utf-8")


@contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar; yield a function that adds a number of finished units to it."""
    num_done = 0
    with render.progress(description, total) as show:

        def advance(count: int) -> None:
            nonlocal num_done
            num_done += count
            show(num_done)

        yield advance


def measure_each(
    cases: Iterable[Any], num_rounds: int, measure: Callable[[Any, Callable[[int], object]], T]
) -> dict[str, T]:
    """Measure cases one after the other under one progress bar; return what ``measure`` returned, by the case's name.

    ``measure`` gets a case and a function, which it calls with 1 after each of its ``num_rounds`` rounds.
    """
    all_cases = [*cases]
    with progress("measuring", len(all_cases) * num_rounds) as advance:
        return {case.name: measure(case, advance) for case in all_cases}


def by_turns(
    sides: Sequence[Side],
    count: int,
    run: Callable[[Side, int], T],
    advance: Callable[[int], object] = lambda _: None,
    *,
    warm_up: bool = False,
) -> Iterator[tuple[int, dict[Side, T]]]:
    """Let sides take turns: each round begins with the next side. Yield each round's number and results by side.

    ``run`` does one side's turn in the round of a number, and ``advance`` is called with 1 after each round. If
    ``warm_up`` is true, a round with the number -1 comes first.
    """
    for number in range(-warm_up, count):
        first = number % len(sides) if sides else 0
        results = {side: run(side, number) for side in (*sides[first:], *sides[:first])}
        yield number, {side: results[side] for side in sides}
        advance(1)


def counted(turns: Iterable[tuple[int, Mapping[str, T]]]) -> dict[str, list[T]]:
    """Return each side's results in the rounds of ``by_turns`` that count."""
    return in_columns(results for number, results in turns if number >= 0)


def in_columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Turn rows with the same names into lists of values, by name."""
    columns: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return columns


def ratios(seconds: Sequence[float], own: Sequence[float]) -> list[float]:
    """Return, for each round, how many times as fast ``own`` is: ``seconds / own``."""
    return [theirs / ours for theirs, ours in zip(seconds, own, strict=True)]
