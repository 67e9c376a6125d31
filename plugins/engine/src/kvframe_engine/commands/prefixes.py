"""Loads and saves files of prefixes for ``kvframe generate``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from kvframe_engine.prefixes.saved import SavedPrefix

load_option = click.option(
    "--load-prefixes",
    "loaded_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Put the prefixes that were saved to a file into the cache first.",
)
save_option = click.option(
    "--save-prefixes",
    "saved_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Compute the prompts' whole blocks and save them to a file first, for --load-prefixes.",
)


def check_loaded_file(path: Path) -> None:
    """Raise for a path that is not a file of saved prefixes, before a model is loaded."""
    from kvframe_engine.prefixes.file_reader import PrefixFileReader

    PrefixFileReader(path).close()


def check_saved_file(path: Path) -> None:
    """Raise for a path that cannot be written, or that holds another kind of file, before a model is loaded."""
    from kvframe_engine.prefixes.file_writer import check_prefix_path

    check_prefix_path(path)


def to_dict(prefix: SavedPrefix) -> dict[str, Any]:
    """Return a prefix, saved or loaded, as plain values without its tokens."""
    return {
        "num_tokens": prefix.num_tokens,
        "cache_salt": prefix.cache_salt,
        "is_cached": prefix.is_cached,
        "reason": prefix.reason,
    }


def show(verb: str, path: Path, prefixes: Sequence[SavedPrefix]) -> None:
    """Print on stderr which prefixes of a file were saved or loaded, and why the others were left out."""
    cached_prefixes = [prefix for prefix in prefixes if prefix.is_cached]
    num_tokens = sum(prefix.num_tokens for prefix in cached_prefixes)
    click.echo(f"{verb} {len(cached_prefixes)} of {len(prefixes)} prefixes, {num_tokens} tokens: {path}", err=True)
    for prefix in prefixes:
        if prefix.reason is not None:
            click.echo(f"a prefix of {prefix.num_tokens} tokens was left out: {prefix.reason}", err=True)
