"""What a request has produced: its transcript, and the outputs that its owner gets of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from kvframe import FoundPrefix
from kvframe_engine.requests.progress import FinishReason


@attrs.define(eq=False)
class Transcript:
    """What a request has produced so far.

    Invariant: the text and each list only grow, so an output refers to them and to their lengths at that time.

    Attributes:
        token_ids: The prompt and the generated tokens.
        text: The text that was reported.
        logprobs: The log-probability of each generated token; None unless the params ask for it.
        top_logprobs: For each generated token, the log-probabilities of the most likely tokens, likewise.
    """

    token_ids: Sequence[int] = ()
    text: str = ""
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None

    def add(self, logprob: float, top_logprobs: dict[int, float]) -> None:
        """Add the log-probability of the next token, and those of the most likely tokens in its place."""
        assert self.logprobs is not None
        self.logprobs.append(logprob)
        if self.top_logprobs is not None:
            self.top_logprobs.append(top_logprobs)


# Not frozen: one is made for each request in each step, and a frozen one takes four times as long.
@attrs.define(eq=False, repr=False)
class RequestOutput:
    """What a request has produced, and which part of it is new since the last report; no later step changes it.

    An output stores what is new. The whole is built when it is read: ``text``, ``token_ids``, ``logprobs`` and
    ``top_logprobs``. So read them once, and not in a loop over tokens.

    Attributes:
        request_id: The request.
        sample: The index of the sample, from 0, if the params ask for several; each has its own outputs.
        prompt_token_ids: Its prompt.
        new_token_ids: The tokens since the last report.
        new_text: The text since the last report. It never ends within a character or within a possible stop string, so
            the parts of a request add up to its text.
        finish_reason: Why it ended; None until then.
        error: One sentence if the reason is ``refused`` or ``error``.
        prompt_logprobs: For each prompt token, the logarithm of its probability after the tokens before it, from the
            model's logits without temperature; None for the first token, NaN if the logits are not numbers. The whole
            field is None unless the params ask for it, and until the whole prompt is computed.
        prompt_top_logprobs: For each prompt token, the same of the most likely tokens in its position, by token id, the
            most likely first; None for the first token. The whole field is None as ``prompt_logprobs`` is, and unless
            the params ask for ``top_logprobs`` too.
        cached: What was found of the prompt in the cache, which group limited it and why; None before it is admitted.
    """

    request_id: str
    sample: int = 0
    prompt_token_ids: tuple[int, ...] = ()
    new_token_ids: tuple[int, ...] = ()
    new_text: str = ""
    finish_reason: FinishReason | None = None
    error: str | None = None
    prompt_logprobs: tuple[float | None, ...] | None = None
    prompt_top_logprobs: tuple[Mapping[int, float] | None, ...] | None = None
    cached: FoundPrefix | None = None
    # What the request has produced, and how much of it there was.
    _transcript: Transcript = attrs.field(factory=Transcript)
    _num_generated: int = 0
    _num_chars: int = 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Every token generated so far, an end token included."""
        num_prompt_tokens = len(self.prompt_token_ids)
        return tuple(self._transcript.token_ids[num_prompt_tokens : num_prompt_tokens + self._num_generated])

    @property
    def text(self) -> str:
        """The text of ``token_ids``, cut before a stop string; empty if the model has no tokenizer."""
        return self._transcript.text[: self._num_chars]

    @property
    def logprobs(self) -> tuple[float, ...] | None:
        """For each of ``token_ids``, the logarithm of its probability after the tokens before it.

        It comes from the model's logits without temperature. None unless the params ask for it.
        """
        logprobs = self._transcript.logprobs
        return None if logprobs is None else tuple(logprobs[: self._num_generated])

    @property
    def new_logprobs(self) -> tuple[float, ...] | None:
        """The same for each of ``new_token_ids``."""
        logprobs = self._transcript.logprobs
        return None if logprobs is None else tuple(logprobs[self._new])

    @property
    def top_logprobs(self) -> tuple[Mapping[int, float], ...] | None:
        """For each of ``token_ids``, the log-probabilities of the most likely tokens in its position.

        They are by token id, the most likely first. None unless the params ask for them.
        """
        top_logprobs = self._transcript.top_logprobs
        return None if top_logprobs is None else tuple(top_logprobs[: self._num_generated])

    @property
    def new_top_logprobs(self) -> tuple[Mapping[int, float], ...] | None:
        """The same for each of ``new_token_ids``."""
        top_logprobs = self._transcript.top_logprobs
        return None if top_logprobs is None else tuple(top_logprobs[self._new])

    @property
    def _new(self) -> slice:
        """The generated tokens since the last report."""
        return slice(self._num_generated - len(self.new_token_ids), self._num_generated)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in _SHOWN)
        return f"RequestOutput({values})"


_SHOWN = [
    "request_id",
    "sample",
    "prompt_token_ids",
    "new_token_ids",
    "text",
    "new_text",
    "finish_reason",
    "error",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "prompt_top_logprobs",
    "cached",
]
