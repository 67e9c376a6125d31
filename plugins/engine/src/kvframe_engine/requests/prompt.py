"""Prompts: text or token ids, and the input of an encoder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import attrs

from kvframe.contract.errors import RequestError, shown


@attrs.frozen(kw_only=True, eq=False)
class Prompt:
    """A prompt of two parts, for a model with an encoder; or a prompt whose common beginnings are named.

    A prompt that is only text or ids goes to the encoder, if the model has one.

    Attributes:
        encoder: The encoder's input: text, token ids, or features as a tensor or an array, depending on the model; None
            for no input, if the model allows that.
        decoder: The tokens that are to be continued: text, which is put after the model's start tokens, or ids, which
            are used unchanged. The model's start tokens unless given. For a model without an encoder, the prompt.
        boundaries: Numbers of the prompt's first tokens that other prompts begin with too, such as a system prompt's
            length. Layers that keep states at few places keep one at the last whole blocks before each of them, so that
            the next request finds it.
        bidirectional: Ranges ``(start, stop)`` of the prompt whose tokens see each other in both directions, such as
            the tokens of an image: each sees the later tokens of its range beside those that the layers' masks show.
            The ranges are sorted and disjoint. Each is computed in one step.
    """

    encoder: Any = None
    decoder: str | Sequence[int] | None = None
    boundaries: Sequence[int] = ()
    bidirectional: Sequence[tuple[int, int]] = ()


AnyPrompt = str | Sequence[int] | Prompt
"""Text, token ids, or a prompt of two parts."""


def prompts_of(prompts: Any) -> list[Any]:
    """Return the prompts of a batch; they are not checked yet.

    Raises:
        RequestError: ``prompts`` is not a batch, but for example a single prompt or a set (``bad_prompts``).
    """
    if not isinstance(prompts, Iterable) or isinstance(prompts, str | bytes | bytearray | Set | Mapping):
        raise RequestError(f"prompts must be a list of prompts, not {shown(prompts)}", code="bad_prompts")
    return list(prompts)
