"""Prints what a request generates, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from kvframe_engine.engine import Engine
    from kvframe_engine.requests.output import RequestOutput


def is_textless(engine: Engine) -> bool:
    """Return whether the engine's model has no tokenizer."""
    return engine.model.decode([]) is None


def print_stream(
    engine: Engine, stream: Iterable[RequestOutput], printed: Callable[[str], object] = lambda text: None
) -> RequestOutput:
    """Print what a request generates as it comes, its token ids if there is no tokenizer, and return its last output.

    Args:
        engine: The engine.
        stream: The request's outputs.
        printed: Called with each part of the text after it was printed.
    """
    textless = is_textless(engine)
    for output in stream:
        text = "".join(f"{token} " for token in output.new_token_ids) if textless else output.new_text
        click.echo(text, nl=False)
        printed(text)
    return output
