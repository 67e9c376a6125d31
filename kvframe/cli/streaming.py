"""Prints what a request generates, token by token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from kvframe.engine.engine import Engine
    from kvframe.engine.requests.request import RequestOutput


def is_textless(engine: Engine) -> bool:
    """Return whether the engine's model has no tokenizer."""
    return engine.model.decode([]) is None


def print_stream(engine: Engine, stream: Iterable[RequestOutput]) -> RequestOutput:
    """Print a request's new text as it comes, or token ids if there is no tokenizer, and return its last output."""
    textless = is_textless(engine)
    for output in stream:
        click.echo("".join(f"{token} " for token in output.new_token_ids) if textless else output.new_text, nl=False)
    return output
