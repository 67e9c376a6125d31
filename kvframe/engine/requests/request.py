"""One generating request: its parameters, its generated tokens, and the outputs for its owner."""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Mapping, Sequence

import attrs

from kvframe.cache.stats import FoundPrefix
from kvframe.contract.foreign import safe_text
from kvframe.contract.model import ModelInput
from kvframe.contract.specs import TokenRange
from kvframe.engine.requests.params import SamplingParams as SamplingParams
from kvframe.engine.requests.progress import NO_INPUTS, FinishReason, RequestProgress
from kvframe.engine.requests.text import TextStream


# Not frozen: one is made for each request in each step, and a frozen one takes four times as long.
@attrs.define(eq=False)
class RequestOutput:
    """What a request has produced, and which part of it is new since the last report; no later step changes it.

    Attributes:
        request_id: The request.
        sample: The index of the sample, from 0, if the params ask for several; each has its own outputs.
        prompt_token_ids: Its prompt.
        new_token_ids: The tokens since the last report.
        text: The text of ``token_ids``, cut before a stop string; empty if the model has no tokenizer.
        new_text: The text since the last report. It never ends within a character or within a possible stop string, so
            the parts of a request add up to its text.
        finish_reason: Why it ended; None until then.
        error: One sentence if the reason is ``refused`` or ``error``.
        logprobs: For each of ``token_ids``, the logarithm of its probability after the tokens before it, from the
            model's logits without temperature. None unless the params ask for it.
        top_logprobs: For each of ``token_ids``, the same of the most likely tokens at its place, by token id, the most
            likely first. None unless the params ask for it.
        prompt_logprobs: For each prompt token, the logarithm of its probability after the tokens before it, from the
            model's logits without temperature; None for the first token, NaN if the logits are not numbers. The whole
            field is None unless the params ask for it, and until the whole prompt is computed.
        cached: What was found of the prompt in the cache, which group limited it and why; None before it is admitted.
    """

    request_id: str
    sample: int = 0
    prompt_token_ids: tuple[int, ...] = ()
    new_token_ids: tuple[int, ...] = ()
    text: str = ""
    new_text: str = ""
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[Mapping[int, float], ...] | None = None
    prompt_logprobs: tuple[float | None, ...] | None = None
    cached: FoundPrefix | None = None
    # The request's own tokens, which only grow, and how many there were.
    _known_token_ids: Sequence[int] = attrs.field(default=(), repr=False)
    _num_known: int = attrs.field(default=0, repr=False)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Every token generated so far, an end token included."""
        return tuple(self._known_token_ids[len(self.prompt_token_ids) : self._num_known])


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
        random: Its own source of uniform numbers, one per sampled token.
        uniforms: Its next numbers, as far as they were drawn ahead.
        logprobs: The log-probability of each generated token, if the params ask for it.
        top_logprobs: For each generated token, the log-probabilities of the most likely tokens, likewise.
        prompt_token_ids: The prompt for the outputs, copied once for all of them.
        wants_prompt_rows: Whether log-probabilities of its prompt are still to be computed.
        known_logprobs: The prompt's log-probabilities so far; empty unless the params ask for them.
        prompt_logprobs: The same for the outputs, once all are known.
        is_unreadable: Whether its tokens could not be turned into text.
        num_reported: Generated tokens that its owner has seen.
        num_reported_chars: Characters of text that its owner has seen.
    """

    params: SamplingParams
    end_token_ids: frozenset[int]
    max_tokens: int
    text_stream: TextStream | None = None
    random: random.Random = attrs.field(init=False)
    uniforms: deque[float] = attrs.field(init=False, factory=deque)
    prompt_token_ids: tuple[int, ...] = attrs.field(init=False)
    logprobs: list[float] = attrs.field(init=False, factory=list)
    top_logprobs: list[dict[int, float]] = attrs.field(init=False, factory=list)
    known_logprobs: list[float | None] = attrs.field(init=False, factory=list)
    prompt_logprobs: tuple[float | None, ...] | None = attrs.field(init=False, default=None)
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
        text_stream: TextStream | None = None,
        inputs: Mapping[str, ModelInput] = NO_INPUTS,
        cache_salt: str = "",
        asked_id: str | None = None,
        sample: int = 0,
        boundaries: tuple[int, ...] = (),
        ranges: tuple[TokenRange, ...] = (),
    ) -> Request:
        """Return a request that has not started.

        Args:
            request_id: Unique among the requests in the engine.
            prompt_token_ids: Checked token ids, at least one and fewer than ``max_model_len``.
            params: How to sample and when to stop.
            eos_token_ids: The model's end tokens.
            max_model_len: The most tokens of any request.
            text_stream: Turns its tokens into text; None if the model has no tokenizer.
            inputs: Its inputs beside the tokens, by sequence, checked.
            cache_salt: The request shares cached prefixes with requests of the same salt.
            asked_id: The id that its owner uses; ``request_id`` unless given.
            sample: The index of the sample.
            boundaries: Tokens of the prompt at which steps end, ascending.
            ranges: Ranges of the prompt whose tokens see each other in both directions, checked.
        """
        return cls(
            request_id=request_id,
            asked_id=request_id if asked_id is None else asked_id,
            sample=sample,
            token_ids=array("I", prompt_token_ids),
            num_prompt_tokens=len(prompt_token_ids),
            params=params,
            end_token_ids=params.stop_token_ids | (frozenset() if params.ignore_eos else eos_token_ids),
            max_tokens=min(len(prompt_token_ids) + params.max_new_tokens, max_model_len),
            text_stream=text_stream,
            inputs=inputs,
            cache_salt=cache_salt,
            boundaries=boundaries,
            ranges=ranges,
        )

    def __attrs_post_init__(self) -> None:
        """Seed the request's own random source, and keep the prompt."""
        self.random = random.Random(self.params.seed)
        self.prompt_token_ids = tuple(self.token_ids[: self.num_prompt_tokens])
        self.wants_prompt_rows = self.params.prompt_logprobs
        if self.wants_prompt_rows:
            self.add_prompt_logprobs([None])

    @property
    def num_final_tokens(self) -> int:
        """The most tokens that it may have at its end."""
        return self.max_tokens

    @property
    def first_prompt_row(self) -> int:
        """The last prompt token whose log-probability is known: its logits give that of the next token."""
        return len(self.known_logprobs) - 1

    def add_prompt_logprobs(self, values: Sequence[float | None]) -> None:
        """Add the log-probabilities of the prompt tokens after the known ones."""
        self.known_logprobs.extend(values)
        if len(self.known_logprobs) == self.num_prompt_tokens:
            self.prompt_logprobs = tuple(self.known_logprobs)
            self.wants_prompt_rows = False

    def forget_partial(self) -> None:
        """Forget log-probabilities of the prompt that are not complete."""
        if self.wants_prompt_rows:
            self.known_logprobs = [None]

    def fork(self, other: RequestProgress) -> None:
        """Take over another request's computed tokens and its log-probabilities of the same prompt."""
        super().fork(other)
        if isinstance(other, Request) and other.prompt_logprobs is not None:
            self.known_logprobs, self.prompt_logprobs = other.known_logprobs, other.prompt_logprobs
            self.wants_prompt_rows = False

    def draw(self) -> float:
        """Return the uniform number that samples its next token."""
        return self.uniforms.popleft() if self.uniforms else self.random.random()

    def draw_ahead(self, place: int) -> float:
        """Return the number that samples the token ``place`` tokens after the next one; ``draw`` returns it again."""
        while len(self.uniforms) <= place:
            self.uniforms.append(self.random.random())
        return self.uniforms[place]

    def take(self, outcome: int) -> None:
        """Take the next generated token; set ``finish_reason`` if it is the last."""
        self.token_ids.append(outcome)
        if outcome in self.end_token_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.max_tokens:
            self.finish_reason = "length"
        if self.params.stop and self.text_stream is not None:
            if not self.read_text():
                self.finish_reason = "error"
            elif self.text_stream.stopped:
                self.finish_reason = "stop"

    def read_text(self) -> bool:
        """Turn new tokens into text; return False, with an ``error``, if the tokenizer raises."""
        if self.text_stream is None or self.is_unreadable:
            return True
        try:
            self.text_stream.feed(self.token_ids, final=self.finish_reason is not None)
        except BaseException as error:  # interrupts are delayed here, so the tokenizer raised it
            self.is_unreadable = True
            self.error = f"its tokens could not be turned into text: {safe_text(error)}"
            return False
        return True

    def report(self) -> RequestOutput:
        """Return what it has produced, with the text read so far, and mark it as reported."""
        text = "" if self.text_stream is None else self.text_stream.text
        num_known = len(self.token_ids)
        num_generated = num_known - self.num_prompt_tokens
        # By position: that many named arguments take longer than the rest of this method.
        output = RequestOutput(
            self.asked_id,
            self.sample,
            self.prompt_token_ids,
            tuple(self.token_ids[self.num_prompt_tokens + self.num_reported :]),
            text,
            text[self.num_reported_chars :],
            self.finish_reason,
            self.error,
            None,
            None,
            self.prompt_logprobs,
            self.cached,
            self.token_ids,
            num_known,
        )
        if self.params.logprobs:
            output.logprobs = tuple(self.logprobs[:num_generated])
            output.top_logprobs = tuple(self.top_logprobs[:num_generated]) if self.params.top_logprobs else None
        self.num_reported, self.num_reported_chars = num_generated, len(text)
        return output

    def take_back(self, output: RequestOutput) -> None:
        """Mark the last report as not seen by the owner."""
        self.num_reported -= len(output.new_token_ids)
        self.num_reported_chars -= len(output.new_text)
