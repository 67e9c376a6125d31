"""``kvframe embed``: make embeddings of texts with a model on disk."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvframe import find_model
from kvframe.cli.options import (
    block_size_option,
    dtype_option,
    memory_option,
    read_stack,
    stack_option,
)
from kvframe.cli.render import print_json, progress
from kvframe_engine.commands.options import REFUSED_EXIT_CODE, cache_salt_option, device_option, log_lines, read_salts
from kvframe_engine.commands.prompts import read_prompt_token_ids, read_prompts

if TYPE_CHECKING:
    from kvframe_engine.running.pooling import EmbeddingOutput

_NUM_SHOWN = 4


@click.command(short_help="Make embeddings of texts with a model on disk.")
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--texts",
    "texts_file",
    type=click.Path(path_type=Path, allow_dash=True),
    metavar="FILE",
    help="A file of texts: one a line, a JSON list (.json) or JSON lines (.jsonl); - for standard input.",
)
@click.option(
    "--token-ids",
    "token_ids_file",
    type=click.Path(path_type=Path, allow_dash=True),
    metavar="FILE",
    help="A file of JSON lists of token ids, for models with no tokenizer; - for standard input.",
)
@click.option(
    "--pooling",
    type=click.Choice(["mean", "cls", "last"]),
    help="Which tokens make an embedding: all, the first or the last. Default: as the checkpoint says, otherwise all "
    "for an encoder and the last for a decoder.",
)
@click.option(
    "--normalize/--no-normalize",
    default=None,
    help="Whether to divide an embedding by its length. Default: as the checkpoint says.",
)
@cache_salt_option
@stack_option
@memory_option
@block_size_option
@device_option
@dtype_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line, for each text.")
def embed(
    model: Path,
    texts_file: Path | None,
    token_ids_file: Path | None,
    pooling: Any,
    normalize: bool | None,
    cache_salts: tuple[str, ...],
    stack_file: Path | None,
    memory: str | None,
    block_size: int | None,
    device: str | None,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Make embeddings of texts with MODEL, a model's folder: an encoder, or a decoder's last token.

    Texts come from one of --texts and --token-ids. A text that cannot be embedded is refused alone: the others finish,
    and the exit code is 1. No text is truncated.
    """
    texts = _read_texts(texts_file, token_ids_file)
    salts = read_salts(cache_salts, len(texts))
    model = find_model(model, weights=True)
    stack = read_stack(
        stack_file,
        cache={"memory": memory, "block_size": block_size},
        model={"device": device, "dtype": dtype},
    )

    from kvframe_engine.embedding import Embedder

    with log_lines():
        loaded = Embedder.from_pretrained(model, stack=stack, pooling=pooling, normalize=normalize)
    with loaded as embedder, progress("embedding", len(texts)) as show:
        start_time = time.perf_counter()
        outputs = embedder.embed(texts, cache_salt=salts, on_progress=show)
        seconds = time.perf_counter() - start_time
        num_tokens = embedder.stats().prompt_tokens
    for text, output in zip(texts, outputs, strict=True):
        if as_json:
            print_json(_to_dict(text, output), indent=None)
        else:
            _print(text, output)
    if sys.stderr.isatty():
        click.echo(f"{len(texts)} texts, {num_tokens} tokens in {seconds:.2f} s", err=True)
    if any(output.error is not None for output in outputs):
        click.get_current_context().exit(REFUSED_EXIT_CODE)


def _read_texts(texts_file: Path | None, token_ids_file: Path | None) -> Sequence[str | list[int]]:
    if texts_file is not None and token_ids_file is None:
        return read_prompts(texts_file, "text")
    if token_ids_file is not None and texts_file is None:
        return read_prompt_token_ids(token_ids_file)
    raise click.UsageError("give texts by one of --texts and --token-ids")


def _to_dict(text: str | list[int], output: EmbeddingOutput) -> dict[str, Any]:
    is_whole = output.finish_reason == "computed"
    return {
        "text": text if isinstance(text, str) else None,
        "token_ids": list(output.token_ids) if isinstance(text, str) else text,
        "num_tokens": len(output.token_ids),
        # JSON has no value for numbers that are not finite.
        "embedding": list(output.embedding) if is_whole and output.embedding is not None else None,
        "finish_reason": output.finish_reason,
        "error": output.error,
    }


def _print(text: str | list[int], output: EmbeddingOutput) -> None:
    click.echo(click.style(str(text), bold=True))
    if output.error is not None or output.embedding is None:
        click.echo(f"{output.finish_reason}: {output.error}")
    else:
        first = " ".join(f"{value:.4f}" for value in output.embedding[:_NUM_SHOWN])
        more = " …" if len(output.embedding) > _NUM_SHOWN else ""
        click.echo(
            f"{len(output.token_ids)} tokens, {len(output.embedding)} dimensions, length "
            f"{math.hypot(*output.embedding):.4f}: {first}{more}"
        )
    click.echo()
