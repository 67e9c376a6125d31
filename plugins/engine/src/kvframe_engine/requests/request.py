"""One generating request: its parameters and its generated tokens; the samples of one prompt as requests."""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from kvframe.contract.foreign import safe_text
from kvframe_engine.requests.output import RequestOutput, Transcript
from kvframe_engine.requests.params import SamplingParams as SamplingParams
from kvframe_engine.requests.processors import Started
from kvframe_engine.requests.progress import RequestProgress
from kvframe_engine.requests.text import TextStream


@attrs.define(eq=False, kw_only=True)
class Request(RequestProgress):
    """A request for tokens that continue a prompt.

    Invariant: ``known_logprobs`` holds the log-probabilities of the first tokens of the prompt, each once, however
    often they are computed.

    Attributes:
        params: How to sample and when to stop.
        end_token_ids: The ids that end it: the model's, unless the params ignore them, and those of the params.
        max_tokens: The most tokens it may have, prompt included.
        text_stream: Turns its tokens into text; None if the model has no tokenizer.
        processors: The logits processors that it names, with their states.
        random: Its own source of uniform numbers, one per sampled token.
        uniforms: Its next numbers, as far as they were drawn ahead.
        next_logprobs: If the params ask for log-probabilities, those of the next tokens that the last step computed,
            and of the most likely tokens instead of each.
        transcript: What it has produced, for the outputs.
        prompt_token_ids: The prompt for the outputs, copied once for all of them.
        wants_prompt_rows: Whether log-probabilities of its prompt are still to be computed.
        known_logprobs: The prompt's log-probabilities so far; empty unless the params ask for them.
        known_top_logprobs: Those of the most likely tokens in their positions; empty unless the params ask for them.
        prompt_logprobs: ``known_logprobs`` for the outputs, once all are known.
        prompt_top_logprobs: ``known_top_logprobs`` for the outputs, likewise.
        failure: Why one of its logits processors failed; empty if none did.
        is_unreadable: Whether its tokens could not be turned into text.
        num_reported: Generated tokens that its owner has seen.
        num_reported_chars: Characters of text that its owner has seen.
    """

    params: SamplingParams
    end_token_ids: frozenset[int]
    max_tokens: int
    text_stream: TextStream | None = None
    processors: tuple[Started, ...] = ()
    failure: str = ""
    random: random.Random = attrs.field(init=False)
    uniforms: deque[float] = attrs.field(init=False, factory=deque)
    prompt_token_ids: tuple[int, ...] = attrs.field(init=False)
    next_logprobs: deque[tuple[float, dict[int, float]]] = attrs.field(init=False, factory=deque)
    transcript: Transcript = attrs.field(init=False)
    known_logprobs: list[float | None] = attrs.field(init=False, factory=list)
    known_top_logprobs: list[dict[int, float] | None] = attrs.field(init=False, factory=list)
    prompt_logprobs: tuple[float | None, ...] | None = attrs.field(init=False, default=None)
    prompt_top_logprobs: tuple[dict[int, float] | None, ...] | None = attrs.field(init=False, default=None)
    is_unreadable: bool = False
    num_reported: int = 0
    num_reported_chars: int = 0

    @classmethod
    def create(
        cls,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        keeps_part: bool = False,
        **attributes: Any,
    ) -> Request:
        """Return a request that has not started.

        Args:
            request_id: Unique among the requests in the engine.
            prompt_token_ids: Checked token ids, at least one and fewer than ``max_model_len``.
            params: How to sample and when to stop.
            eos_token_ids: The model's end tokens.
            max_model_len: The most tokens of any request.
            keeps_part: Whether layers keep a part of the prompt; a step ends with the prompt then.
            attributes: Further attributes.
        """
        num_prompt_tokens = len(prompt_token_ids)
        request = cls(
            request_id=request_id,
            token_ids=array("I", prompt_token_ids),
            num_prompt_tokens=num_prompt_tokens,
            params=params,
            end_token_ids=params.stop_token_ids | (frozenset() if params.ignore_eos else eos_token_ids),
            max_tokens=min(num_prompt_tokens + params.max_new_tokens, max_model_len),
            **attributes,
        )
        if keeps_part:
            request.keeps_part, request.boundaries = True, (*request.boundaries, num_prompt_tokens)
        return request

    def __attrs_post_init__(self) -> None:
        """Seed the request's own random source, and keep the prompt."""
        self.random = random.Random(self.params.seed)
        self.transcript = Transcript(self.token_ids)
        self.prompt_token_ids = tuple(self.token_ids[: self.num_prompt_tokens])
        if self.params.logprobs:
            self.transcript.logprobs = []
            self.transcript.top_logprobs = [] if self.params.top_logprobs else None
        if self.params.prompt_logprobs:
            self.wants_prompt_rows = True
            self.add_prompt_logprobs([None], [None])

    @property
    def num_final_tokens(self) -> int:
        """The most tokens that it may have at its end."""
        return self.max_tokens

    @property
    def no_outcome(self) -> str:
        """The error of a request that got no token: its parameters ban all, or the model's output is not numbers."""
        if not self.params.changes_logits:
            return super().no_outcome
        if self.failure:
            return self.failure
        return (
            f"after token {self.num_computed}, no token is left: its parameters ban all, or the output is not numbers"
        )

    @property
    def first_prompt_row(self) -> int:
        """The last prompt token whose log-probability is known: its logits give that of the next token."""
        return len(self.known_logprobs) - 1

    @property
    def num_top_prompt_logprobs(self) -> int:
        """Of how many of the most likely tokens in the positions of its prompt it wants the log-probabilities."""
        return self.params.top_logprobs if self.params.prompt_logprobs else 0

    def add_prompt_logprobs(
        self, values: Sequence[float | None], top_values: Sequence[dict[int, float] | None] = ()
    ) -> None:
        """Add the log-probabilities of the prompt tokens after the known ones.

        Args:
            values: Those of the tokens.
            top_values: Those of the most likely tokens in their positions; ignored unless the params ask for them.
        """
        has_top = self.num_top_prompt_logprobs > 0
        self.known_logprobs.extend(values)
        if has_top:
            self.known_top_logprobs.extend(top_values)
        if len(self.known_logprobs) == self.num_prompt_tokens:
            self.prompt_logprobs = tuple(self.known_logprobs)
            self.prompt_top_logprobs = tuple(self.known_top_logprobs) if has_top else None
            self.wants_prompt_rows = False

    def forget_partial(self) -> None:
        """Forget log-probabilities of the prompt that are not complete."""
        if self.wants_prompt_rows:
            self.known_logprobs, self.known_top_logprobs = [], []
            self.add_prompt_logprobs([None], [None])

    def fork(self, other: RequestProgress) -> None:
        """Take over another request's computed tokens and its log-probabilities of the same prompt."""
        super().fork(other)
        if isinstance(other, Request) and other.prompt_logprobs is not None:
            self.known_logprobs, self.prompt_logprobs = other.known_logprobs, other.prompt_logprobs
            self.known_top_logprobs, self.prompt_top_logprobs = other.known_top_logprobs, other.prompt_top_logprobs
            self.wants_prompt_rows = False

    @property
    def needs_outcomes(self) -> bool:
        """Whether it names logits processors, which read its tokens on the host."""
        return bool(self.params.processors)

    def draw_ahead(self, num_drawn: int) -> float:
        """Return the uniform number that samples the token ``num_drawn`` tokens after the next one."""
        while len(self.uniforms) <= num_drawn:
            self.uniforms.append(self.random.random())
        return self.uniforms[num_drawn]

    def take(self, outcome: int) -> None:
        """Take the next generated token; set ``finish_reason`` if it is the last."""
        self.token_ids.append(outcome)
        if self.uniforms or self.next_logprobs:
            self._use_next()
        if outcome in self.end_token_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.max_tokens:
            self.finish_reason = "length"
        if self.params.stop and self.text_stream is not None:
            if not self.read_text():
                self.finish_reason = "error"
            elif self.text_stream.stopped:
                self.finish_reason = "stop"

    def _use_next(self) -> None:
        """Use up what was drawn and computed for the token that is taken."""
        if self.uniforms:
            self.uniforms.popleft()
        if self.next_logprobs:
            self.transcript.add(*self.next_logprobs.popleft())

    def read_text(self) -> bool:
        """Turn new tokens into text; return False, with an ``error``, if the tokenizer raises."""
        if self.text_stream is None or self.is_unreadable:
            return True
        token_ids = self.token_ids
        if self.params.special_tokens and self.finish_reason == "stop" and token_ids[-1] in self.end_token_ids:
            token_ids = token_ids[:-1]
        try:
            self.text_stream.feed(token_ids, final=self.finish_reason is not None)
        except BaseException as error:  # interrupts are delayed here, so the tokenizer raised it
            self.is_unreadable = True
            self.error = f"its tokens could not be turned into text: {safe_text(error)}"
            return False
        return True

    def report(self) -> RequestOutput:
        """Return what it has produced, with the text read so far, and mark it as reported."""
        transcript = self.transcript
        if self.text_stream is not None:
            transcript.text = self.text_stream.text
        num_generated, num_chars = len(self.token_ids) - self.num_prompt_tokens, len(transcript.text)
        # By position: that many named arguments take longer than the rest of this method.
        output = RequestOutput(
            self.asked_id,
            self.sample,
            self.prompt_token_ids,
            tuple(self.token_ids[self.num_prompt_tokens + self.num_reported :]),
            transcript.text[self.num_reported_chars :],
            self.finish_reason,
            self.error,
            self.prompt_logprobs,
            self.prompt_top_logprobs,
            self.cached,
            transcript,
            num_generated,
            num_chars,
        )
        self.num_reported, self.num_reported_chars = num_generated, num_chars
        return output

    def take_back(self, output: RequestOutput) -> None:
        """Mark the last report as not seen by the owner."""
        self.num_reported -= len(output.new_token_ids)
        self.num_reported_chars -= len(output.new_text)


def other_samples(
    first: Request,
    ids: Sequence[str],
    params: SamplingParams,
    start_text: Callable[[], TextStream] | None,
    processors: Sequence[tuple[Started, ...]],
    *,
    forks: bool,
) -> list[Request]:
    """Return the samples of a prompt beside the first one, which has not started.

    Args:
        first: The first sample.
        ids: Their ids.
        params: The parameters of the prompt.
        start_text: Starts the text of a sample; None if there is no tokenizer.
        processors: The logits processors of each sample, the first one included.
        forks: Whether they fork from the first one, so that the prompt is computed once.
    """
    others = [
        attrs.evolve(
            first,
            request_id=sample_id,
            sample=sample,
            token_ids=first.token_ids[:],
            params=params.of_sample(sample),
            text_stream=None if start_text is None else start_text(),
            processors=processors[sample],
            forks_from=first if forks else None,
        )
        for sample, sample_id in enumerate(ids, start=1)
    ]
    if forks:
        # Each sample computes the prompt's last token itself, because it samples from the logits of that token.
        first.pause_for_forks(first.num_prompt_tokens - 1)
    return others
