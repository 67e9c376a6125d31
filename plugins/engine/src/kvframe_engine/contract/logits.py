"""Logits processors: what changes the logits of requests that ask for it, such as a grammar that answers follow.

Nothing here imports NumPy or torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from kvframe.contract.growth import Growing

if TYPE_CHECKING:
    import torch


@attrs.frozen(kw_only=True)
class Vocabulary:
    """What a processor is told of the model that it serves.

    Attributes:
        size: Token ids are ``[0, size)``. Logits may have more columns, which stand for no token.
        eos_token_ids: Ids that end a request.
        tokenizer_json: The tokenizer in the JSON format of the library ``tokenizers``; None if the model has none.
    """

    size: int
    eos_token_ids: frozenset[int] = frozenset()
    tokenizer_json: str | None = None


# Not frozen: one is made for each request in each step.
@attrs.define(eq=False)
class ProcessedRequest:
    """A request whose logits are to be changed.

    Attributes:
        token_ids: All its tokens so far, prompt and generated ones. Read only, and valid during the call.
        num_prompt_tokens: How many of them are the prompt.
        drafts: Draft tokens after them. Each may be accepted or rejected when the step ends.
        state: What ``start`` returned for it.
    """

    token_ids: Sequence[int]
    num_prompt_tokens: int
    drafts: Sequence[int]
    state: Any


class LogitsProcessor(Growing, ABC):
    """Changes the logits of the requests that name it in ``SamplingParams.processors``.

    One engine makes it, when the first request names it, and calls it in one thread at a time.
    """

    name: ClassVar[str]
    """The registered name (``"guided"``)."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Take the vocabulary.

        Args:
            vocabulary: That of the served model.

        Raises:
            RequestError: The processor cannot serve this model, such as one without a tokenizer.
        """
        self.vocabulary = vocabulary

    @abstractmethod
    def start(self, options: Mapping[str, Any]) -> Any:
        """Check the options of a request, and return the state of one of its samples.

        Called when a request is added, for each of its samples, outside the engine's steps.

        Args:
            options: What the request gives, never changed.

        Raises:
            RequestError: The options are wrong; the request is refused with the sentence.
        """

    @abstractmethod
    def process(self, logits: torch.Tensor, requests: Sequence[ProcessedRequest]) -> None:
        """Change the logits of a step, in place, before a token is sampled from each row.

        Called once a step, with all requests of the step that name the processor. A request has tokens that ``process``
        has not seen since it was last called; a draft of the last call is among them if it was accepted.

        Args:
            logits: ``[num_rows, vocab_size], device``, in float32 or float64: for each request, one row for the token
                after ``token_ids``, then one row for the token after each draft. Minus infinity bans a token.
            requests: The requests, in the order of their rows.

        Raises:
            Exception: Any: these requests end with an error, and others go on.
        """
