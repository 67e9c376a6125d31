"""The options that benchmarks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from benchmarks.harness.machine import PEER

Option = Callable[[Any], Any]


def repeats(default: int, *, flag: str = "--repeats", max_rounds: int | None = None) -> Option:
    """Return the option for the number of rounds."""
    words = "Rounds in which all systems take turns."
    return click.option(flag, type=click.IntRange(1, max_rounds), default=default, show_default=True, help=words)


def threads(default: int) -> Option:
    """Return the option for the number of torch's threads; ``record.benchmark`` sets it."""
    return click.option(
        "--threads", type=click.IntRange(1), default=default, show_default=True, help="Threads of torch."
    )


def choose(flag: str, name: str, choices: Iterable[Any]) -> Option:
    """Return the option ``flag``, which chooses from the known names, or objects with a ``name``, several if repeated.

    The function's argument ``name`` gets the list. The default is all but those whose name begins with ``tiny``, which
    only try a script.
    """
    by_name = {choice if isinstance(choice, str) else choice.name: choice for choice in choices}
    return click.option(
        flag,
        name,
        multiple=True,
        type=click.Choice(list(by_name)),
        default=[case_name for case_name in by_name if not case_name.startswith("tiny")],
        callback=lambda context, option, names: [by_name[case_name] for case_name in dict.fromkeys(names)],
        help="A case to measure; may be given several times. The default is all but the tiny ones.",
    )


peer = click.option(
    "--peer", type=click.Path(path_type=Path), default=PEER, help="The folder in which make peer installed vLLM."
)
