"""Options that several commands of the engine share, and what they print while they run."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click
from click.shell_completion import CompletionItem

from kvframe import Use
from kvframe.cli.options import TEXT_TYPE
from kvframe.contract import KVFrameError, StackError, shown

REFUSED_EXIT_CODE = 1
"""Exit code if at least one prompt or text was refused or failed, though the others finished."""


class UseType(click.ParamType[Use | str]):
    """A registered name, or a JSON object of a name and options: what a stack has as a table."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Use | str:
        """Return a name as it is, and an object as a ``Use``; fail for anything else."""
        if not isinstance(value, str) or not value.lstrip().startswith("{"):
            return str(value)
        try:
            options = json.loads(value)
            return Use(options.pop("name"), options)
        except (ValueError, KeyError, StackError):
            self.fail(f'{shown(value)} is no JSON object with a "name" and options', param, ctx)


Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def complete_registered(kind: str) -> Complete:
    """Return what completes registered names of a kind (``"backend"``), each with its distribution as help."""

    def complete(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
        from kvframe import load_plugins

        try:
            catalogue = load_plugins().registry.catalogues[kind]
        except KVFrameError:
            return []  # a shell shows no errors while somebody types
        owners = {claim.name: claim.owner for claim in catalogue.claims()}
        return [CompletionItem(name, help=owner) for name, owner in sorted(owners.items()) if name.startswith(begun)]

    return complete


device_option = click.option(
    "--device",
    metavar="DEVICE",
    help="Where to run, such as cpu or cuda. Default: as in the stack, or the GPU if there is one.",
)
drafts_option = click.option(
    "--drafts",
    type=UseType(),
    metavar="NAME",
    shell_complete=complete_registered("proposer"),
    help="Compute the draft tokens of this proposer, such as ngram; needs fewer steps. A proposer with options: a JSON "
    'object, such as \'{"name": "draft_model", "model": "path"}\'.',
)
cache_salt_option = click.option(
    "--cache-salt",
    "cache_salts",
    type=TEXT_TYPE,
    multiple=True,
    metavar="TEXT",
    help="Share cached prefixes with requests of the same salt only; repeat to give each request its own, in order.",
)


def read_salts(cache_salts: Sequence[str], num_requests: int) -> Sequence[str]:
    """Return a salt for each request, from no value, one for all, or one for each."""
    if len(cache_salts) not in (0, 1, num_requests):
        raise click.UsageError(
            f"give --cache-salt once, or once for each of {num_requests} requests, not {len(cache_salts)} times"
        )
    return cache_salts if len(cache_salts) == num_requests else [*cache_salts, ""][:1] * num_requests


@contextmanager
def log_lines() -> Iterator[None]:
    """Print kvframe's log messages to stderr while the body runs: they say what serves, and explain a slow start."""
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
