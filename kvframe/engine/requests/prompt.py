"""Prompts: text or token ids, and the input of an encoder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import attrs

from kvframe.contract.errors import RequestError, shown


@attrs.frozen(kw_only=True, eq=False)
class Prompt:
    """A prompt of two parts, for a model with an encoder. Text or ids alone are taken to be the encoder's.

    Attributes:
        encoder: What the encoder reads: text, token ids, or features as a tensor or an array, by the model; None for
            nothing, where a model can do without.
        decoder: The tokens that are to be continued: text, which is put after the tokens that the model starts with,
            or ids, which are taken as they are. The model's start tokens unless given.
    """

    encoder: Any = None
    decoder: str | Sequence[int] | None = None


AnyPrompt = str | Sequence[int] | Prompt
"""Text, token ids, or a prompt of two parts."""


def prompts_of(prompts: Any) -> list[Any]:
    """Return the prompts of a batch; they are not checked yet.

    Raises:
        RequestError: There is no batch: a single prompt, say, or what has no order (``bad_prompts``).
    """
    if not isinstance(prompts, Iterable) or isinstance(prompts, str | bytes | bytearray | Set | Mapping):
        raise RequestError(f"prompts must be a list of prompts, not {shown(prompts)}", code="bad_prompts")
    return list(prompts)
