"""Options that several commands share, and the stack that they make."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from kvframe.cli.completion import complete_registered
from kvframe.contract.errors import StackError, shown
from kvframe.contract.specs import ITEM_BYTES

if TYPE_CHECKING:
    from kvframe.config.options import Use
    from kvframe.config.stack import Stack
    from kvframe.loading.plugins import PluginHost

NOTHING: Mapping[str, Any] = MappingProxyType({})

REFUSED_EXIT_CODE = 1
"""Exit code if at least one prompt or text was refused or failed, though the others finished."""


class TextType(click.ParamType[str]):
    """Text of the command line, which is UTF-8 in any locale."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text of an argument's bytes; fail if they are not UTF-8."""
        try:
            return os.fsencode(value).decode("utf-8")
        except UnicodeError:
            self.fail(f"{shown(value)} is not UTF-8 text", param, ctx)


TEXT_TYPE = TextType()


class UseType(click.ParamType["Use | str"]):
    """A registered name, or a JSON object of a name and options: what a stack has as a table."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Use | str:
        """Return a name as it is, and an object as a ``Use``; fail for anything else."""
        if not isinstance(value, str) or not value.lstrip().startswith("{"):
            return str(value)
        from kvframe.config.options import Use

        try:
            options = json.loads(value)
            return Use(options.pop("name"), options)
        except (ValueError, KeyError, StackError):
            self.fail(f'{shown(value)} is no JSON object with a "name" and options', param, ctx)


stack_option = click.option(
    "--stack",
    "stack_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The stack file (TOML): plugins, memory, and rules for specs, wrappers and backends.",
)
memory_option = click.option(
    "--memory",
    metavar="SIZE",
    help="Memory for the KV cache, such as 2GiB, or auto (enough for the most requests of the greatest length, at "
    "most half of the free memory). Default: as in the stack.",
)
html_option = click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a page with pictures to this file, too; it needs no network.",
)
block_size_option = click.option(
    "--block-size", type=click.IntRange(min=1), metavar="N", help="Tokens per block. Default: as in the stack."
)
device_option = click.option(
    "--device",
    metavar="DEVICE",
    help="Where to run, such as cpu or cuda. Default: as in the stack, or the GPU if there is one.",
)
max_model_len_option = click.option(
    "--max-model-len",
    type=click.IntRange(min=1),
    metavar="N",
    help="The longest request, in tokens. Default: as in the stack, or the model's own.",
)
dtype_option = click.option(
    "--dtype",
    type=click.Choice([name for name in ITEM_BYTES if "float" in name and "8" not in name]),
    help="The model's dtype, and the cache's unless the stack says otherwise. Default: as in the stack, or the "
    "checkpoint's.",
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
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")


def read_stack(
    stack_file: Path | None,
    *,
    model: Mapping[str, Any] = NOTHING,
    limits: Mapping[str, Any] = NOTHING,
    cache: Mapping[str, Any] = NOTHING,
) -> Stack:
    """Return the stack of a file, or the default one, with the command line's values in place of its own.

    ``model``, ``limits`` and ``cache`` are values of these tables by key; None replaces nothing.
    """
    from kvframe.config.stack import Stack

    stack = Stack() if stack_file is None else Stack.from_file(stack_file)
    return stack.with_options(model=model, limits=limits, cache=cache)


def read_salts(cache_salts: Sequence[str], num_requests: int) -> Sequence[str]:
    """Return a salt for each request, from no value, one for all, or one for each."""
    if len(cache_salts) not in (0, 1, num_requests):
        raise click.UsageError(
            f"give --cache-salt once, or once for each of {num_requests} requests, not {len(cache_salts)} times"
        )
    return cache_salts if len(cache_salts) == num_requests else [*cache_salts, ""][:1] * num_requests


def load_checked_plugins(stack: Stack) -> PluginHost:
    """Load the plugins that the stack allows, and check the names in its rules against what they register."""
    from kvframe.loading.plugins import load_plugins

    host = load_plugins(stack.plugins)
    stack.check(host.registry)
    return host
