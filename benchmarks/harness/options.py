"""The options that benchmarks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from benchmarks.harness.machine import PEER

Option = Callable[[Any], Any]


def repeats(default: int, *, flag: str = "--repeats", least: int = 1, most: int | None = None) -> Option:
    """Return the option for the number of rounds."""
    known = click.IntRange(least, most)
    return click.option(
        flag, type=known, default=default, show_default=True, help="Rounds in which all systems take turns."
    )


def threads(default: int) -> Option:
    """Return the option for the number of torch's threads; ``record.benchmark`` sets it."""
    return click.option(
        "--threads", type=click.IntRange(1), default=default, show_default=True, help="Threads of torch."
    )


def choose(flag: str, name: str, known: Iterable[Any]) -> Option:
    """Return the option that chooses cases by name; it may be given several times.

    The default is all cases but those whose name begins with ``tiny``, which only try a script.

    Args:
        flag: The option on the command line.
        name: The function's argument; it gets the list of the chosen cases.
        known: All cases: names, or objects with a ``name``.
    """
    by_name = {each if isinstance(each, str) else each.name: each for each in known}
    return click.option(
        flag,
        name,
        multiple=True,
        type=click.Choice(list(by_name)),
        default=[each for each in by_name if not each.startswith("tiny")],
        callback=lambda context, option, names: [by_name[each] for each in dict.fromkeys(names)],
        help="A case to measure; may be given several times. The default is all but the tiny ones.",
    )


peer = click.option(
    "--peer", type=click.Path(path_type=Path), default=PEER, help="The folder in which make peer installed vLLM."
)


def on_a_busy_machine(module: str) -> str:
    """Return the last words of a command's help: how other programs are kept away from what is timed."""
    return (
        f"On a machine with other work, `chrt -f 1 python -m benchmarks.{module} …` (as root) keeps that work from the "
        "processor while something is timed; without it, threads that wait for each other wait for that work too."
    )
