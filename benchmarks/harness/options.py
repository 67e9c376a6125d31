"""The options that benchmarks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from benchmarks.harness.machine import PEER

Option = Callable[[Any], Any]


def repeats(default: int, *, flag: str = "--repeats", most: int | None = None) -> Option:
    """Return the option for how often everything is measured."""
    return click.option(flag, type=click.IntRange(1, most), default=default, show_default=True, help="Turns of each.")


def threads(default: int) -> Option:
    """Return the option for torch's threads, which ``harness/record.py`` sets."""
    return click.option("--threads", type=click.IntRange(1), default=default, show_default=True, help="Of torch.")


def choose(flag: str, name: str, known: Iterable[str], *, default: Iterable[str] | None = None) -> Option:
    """Return the option that names some of what can be measured, one by one; all of it unless given.

    Args:
        flag: On the command line.
        name: Of the function's argument, which gets a tuple.
        known: What can be named.
        default: What is measured if nothing is named, if that is not all.
    """
    names = list(known)
    words = "What is measured; several are named one by one."
    chosen = names if default is None else list(default)
    return click.option(flag, name, multiple=True, type=click.Choice(names), default=chosen, help=words)


peer = click.option("--peer", type=click.Path(path_type=Path), default=PEER, help="Where make peer installed vLLM.")
