"""The options that benchmarks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from benchmarks.harness.machine import PEER

Option = Callable[[Any], Any]


def repeats(default: int, *, flag: str = "--repeats", least: int = 1, most: int | None = None) -> Option:
    """Return the option for how often everything is measured."""
    known = click.IntRange(least, most)
    return click.option(flag, type=known, default=default, show_default=True, help="Turns of each.")


def threads(default: int) -> Option:
    """Return the option for torch's threads, which ``harness/record.py`` sets."""
    return click.option("--threads", type=click.IntRange(1), default=default, show_default=True, help="Of torch.")


def choose(flag: str, name: str, known: Iterable[Any]) -> Option:
    """Return the option that names some of what can be measured, one by one.

    Unless given, it is all whose name does not begin with ``tiny``: these try a script.

    Args:
        flag: On the command line.
        name: Of the function's argument, which gets a list of the chosen.
        known: What can be named: names, or what has a ``name``.
    """
    by_name = {each if isinstance(each, str) else each.name: each for each in known}
    return click.option(
        flag,
        name,
        multiple=True,
        type=click.Choice(list(by_name)),
        default=[each for each in by_name if not each.startswith("tiny")],
        callback=lambda context, option, names: [by_name[each] for each in dict.fromkeys(names)],
        help="What is measured; several are named one by one.",
    )


peer = click.option("--peer", type=click.Path(path_type=Path), default=PEER, help="Where make peer installed vLLM.")
