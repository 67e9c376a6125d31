"""The options that choose tokens, which ``generate`` and ``chat`` share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

_OPTIONS = (
    click.option(
        "--temperature",
        type=click.FloatRange(min=0),
        metavar="T",
        help="0 takes the likeliest token. This and the next options: as the checkpoint's generation config says, if "
        "not given; without one, 0.",
    ),
    click.option("--top-k", type=click.IntRange(min=0), metavar="K", help="Sample among the K likeliest tokens."),
    click.option(
        "--top-p",
        type=click.FloatRange(0, 1, min_open=True),
        metavar="P",
        help="Sample among the likeliest mass P.",
    ),
    click.option(
        "--min-p",
        type=click.FloatRange(0, 1),
        metavar="P",
        help="Sample among tokens that have P of the likeliest one's probability.",
    ),
    click.option(
        "--repetition-penalty",
        type=click.FloatRange(0, min_open=True),
        metavar="R",
        help="Make tokens less likely that are in the prompt or the output already; 1 for none.",
    ),
    click.option("--seed", type=click.IntRange(min=0), metavar="N", help="Make sampling repeatable."),
)


_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command, which gets those that are given as ``sampling``, by the names of parameters."""

    @functools.wraps(command)
    def with_sampling(**values: Any) -> Any:
        options = {name: values.pop(name) for name in _NAMES}
        return command(sampling={name: value for name, value in options.items() if value is not None}, **values)

    decorated: Callable[..., Any] = with_sampling
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated
