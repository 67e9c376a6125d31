"""What a body asks for, as values that a reading process sends to the server."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import attrs

from kvframe import SamplingParams


@attrs.frozen(kw_only=True)
class Parsing:
    """How an answer is taken apart.

    Attributes:
        reasoning: Whether reasoning is told apart from the content.
        tools: The schema of the parameters of each tool that may be called; None if calls are not looked for.
        in_reasoning: Whether the chat template has opened the reasoning already.
    """

    reasoning: bool
    tools: Mapping[str, Mapping[str, Any]] | None
    in_reasoning: bool


@attrs.frozen(kw_only=True)
class Question:
    """What a completion or a chat asks for.

    Attributes:
        prompts: The token ids of each prompt.
        params: How each is sampled.
        stream: Whether the answer comes in parts.
        with_usage: Whether a stream ends with the counts of tokens.
        cache_salt: The salt that the body names; empty for none.
        hints: The hints that the body gives, by name.
        boundaries: Numbers of the first tokens of each prompt that other prompts share.
        with_cached: Whether the counts of tokens say where cached ones came from.
        logged: What the body says only for the log.
        echo: The text of each prompt, if answers begin with it.
        only_echo: Whether nothing else is asked for: what the engine generates is left out.
        parsing: How a chat's answer is taken apart; None if it is answered as it is.
    """

    prompts: tuple[array[int], ...]
    params: SamplingParams
    stream: bool = False
    with_usage: bool = False
    cache_salt: str = ""
    hints: Mapping[str, Any] = attrs.field(factory=dict)
    boundaries: tuple[int, ...] = ()
    with_cached: bool = False
    logged: Mapping[str, str] = attrs.field(factory=dict)
    echo: tuple[str, ...] | None = None
    only_echo: bool = False
    parsing: Parsing | None = None

    @property
    def num_samples(self) -> int:
        """The samples of all prompts."""
        return len(self.prompts) * self.params.n


@attrs.frozen(kw_only=True)
class EmbeddingQuestion:
    """Which texts are to be embedded.

    Attributes:
        prompts: The token ids of each.
        as_base64: Whether embeddings are answered as base64.
        cache_salt: The salt that the body names; empty for none.
        hints: The hints that the body gives, by name.
        logged: What the body says only for the log.
    """

    prompts: tuple[array[int], ...]
    as_base64: bool
    cache_salt: str = ""
    hints: Mapping[str, Any] = attrs.field(factory=dict)
    logged: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def num_samples(self) -> int:
        """The texts."""
        return len(self.prompts)


@attrs.frozen(kw_only=True)
class ServedModel:
    """What reading a body needs to know of the model.

    Attributes:
        path: Its folder.
        name: The name that clients use.
        max_model_len: The most tokens of a request.
        most_tokens: The most tokens of a request that the cache can hold.
        generates: Whether it generates tokens; otherwise it makes embeddings.
        defaults: The sampling parameters that a body does not name.
        max_new_tokens: The most generated tokens of a sample.
        max_samples: The most samples of a request.
        max_logprobs: The most log-probabilities of an answer.
        answers: The name of the format of answers that the stack names; None for the one that matches.
        vocab_size: The model's token ids are below this; 0 if it is not known.
    """

    path: str
    name: str
    max_model_len: int
    most_tokens: int
    generates: bool
    defaults: Mapping[str, Any]
    max_new_tokens: int
    max_samples: int
    max_logprobs: int
    answers: str | None = None
    vocab_size: int = 0
