"""Options that several commands share, and the stack that they make."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvframe.contract.errors import shown
from kvframe.contract.specs import ITEM_BYTES

if TYPE_CHECKING:
    from kvframe.config.stack import Stack
    from kvframe.loading.plugins import PluginHost


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
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")


def read_stack(stack_file: Path | None, **tables: Mapping[str, Any]) -> Stack:
    """Return the stack of a file, or the default one, with the command line's values in place of its own.

    ``tables`` are those of ``Stack.with_options``.
    """
    from kvframe.config.stack import Stack

    return (Stack() if stack_file is None else Stack.from_file(stack_file)).with_options(**tables)


def load_checked_plugins(stack: Stack) -> PluginHost:
    """Load the plugins that the stack allows, and check the names in its rules against what they register."""
    from kvframe.loading.plugins import load_plugins

    host = load_plugins(stack.plugins)
    stack.check(host.registry)
    return host
