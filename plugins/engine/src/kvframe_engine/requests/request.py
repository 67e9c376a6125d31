"""One generating request: its parameters, its generated tokens, and the outputs for its owner."""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Mapping, Sequence

import attrs

from kvframe import FoundPrefix, Hints
from kvframe.contract.foreign import safe_text
from kvframe.contract.model import ModelInput
from kvframe_engine.requests.params import SamplingParams as SamplingParams
from kvframe_engine.requests.processors import Started
from kvframe_engine.requests.progress import NO_HINTS, NO_INPUTS, FinishReason, RequestProgress
from kvframe_engine.requests.text import TextStream


@attrs.define(eq=False)
class Transcript:
    """What a request has produced so far.

    Invariant: each list only grows, so an output refers to it and to its length at that time.

    Attributes:
        token_ids: The prompt and the generated tokens.
        text_parts: The text, in the parts that were reported.
        logprobs: The log-probability of each generated token, if the params ask for it.
        top_logprobs: For each generated token, the log-probabilities of the most likely tokens, likewise. Both lists
            may have further entries for drafts after a request's end.
    """

    token_ids: Sequence[int] = ()
    text_parts: list[str] = attrs.field(factory=list)
    logprobs: list[float] = attrs.field(factory=list)
    top_logprobs: list[dict[int, float]] = attrs.field(factory=list)


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
    # What the request has produced, how much of it there was, and which log-probabilities the params ask for.
    _transcript: Transcript = attrs.field(factory=Transcript)
    _num_generated: int = 0
    _num_parts: int = 0
    _has_logprobs: bool = False
    _has_top_logprobs: bool = False

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Every token generated so far, an end token included."""
        num_prompt_tokens = len(self.prompt_token_ids)
        return tuple(self._transcript.token_ids[num_prompt_tokens : num_prompt_tokens + self._num_generated])

    @property
    def text(self) -> str:
        """The text of ``token_ids``, cut before a stop string; empty if the model has no tokenizer."""
        return "".join(self._transcript.text_parts[: self._num_parts])

    @property
    def logprobs(self) -> tuple[float, ...] | None:
        """For each of ``token_ids``, the logarithm of its probability after the tokens before it.

        It comes from the model's logits without temperature. None unless the params ask for it.
        """
        return tuple(self._transcript.logprobs[: self._num_generated]) if self._has_logprobs else None

    @property
    def new_logprobs(self) -> tuple[float, ...] | None:
        """The same for each of ``new_token_ids``."""
        return tuple(self._transcript.logprobs[self._new]) if self._has_logprobs else None

    @property
    def top_logprobs(self) -> tuple[Mapping[int, float], ...] | None:
        """For each of ``token_ids``, the log-probabilities of the most likely tokens in its position.

        They are by token id, the most likely first. None unless the params ask for them.
        """
        return tuple(self._transcript.top_logprobs[: self._num_generated]) if self._has_top_logprobs else None

    @property
    def new_top_logprobs(self) -> tuple[Mapping[int, float], ...] | None:
        """The same for each of ``new_token_ids``."""
        return tuple(self._transcript.top_logprobs[self._new]) if self._has_top_logprobs else None

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
        num_chars: Characters of text in the transcript.
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
    transcript: Transcript = attrs.field(init=False)
    known_logprobs: list[float | None] = attrs.field(init=False, factory=list)
    known_top_logprobs: list[dict[int, float] | None] = attrs.field(init=False, factory=list)
    prompt_logprobs: tuple[float | None, ...] | None = attrs.field(init=False, default=None)
    prompt_top_logprobs: tuple[dict[int, float] | None, ...] | None = attrs.field(init=False, default=None)
    is_unreadable: bool = False
    num_reported: int = 0
    num_reported_chars: int = 0
    num_chars: int = 0

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
        processors: tuple[Started, ...] = (),
        inputs: Mapping[str, ModelInput] = NO_INPUTS,
        cache_salt: str = "",
        owner: str = "",
        hints: Hints = NO_HINTS,
        asked_id: str | None = None,
        sample: int = 0,
        boundaries: tuple[int, ...] = (),
        keeps_part: bool = False,
        num_joint_tokens: int = 0,
    ) -> Request:
        """Return a request that has not started.

        Args:
            request_id: Unique among the requests in the engine.
            prompt_token_ids: Checked token ids, at least one and fewer than ``max_model_len``.
            params: How to sample and when to stop.
            eos_token_ids: The model's end tokens.
            max_model_len: The most tokens of any request.
            text_stream: Turns its tokens into text; None if the model has no tokenizer.
            processors: The logits processors that it names.
            inputs: Its inputs beside the tokens, by sequence, checked.
            cache_salt: The request shares cached prefixes with requests of the same salt.
            owner: Whose request it is.
            hints: What its sender knows of it.
            asked_id: The id that its owner uses; ``request_id`` unless given.
            sample: The index of the sample.
            boundaries: Tokens of the prompt at which steps end, ascending.
            keeps_part: Whether layers keep a part of the prompt; a step ends with the prompt then.
            num_joint_tokens: As for ``RequestProgress``.
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
            processors=processors,
            inputs=inputs,
            cache_salt=cache_salt,
            owner=owner,
            hints=hints,
            boundaries=(*boundaries, len(prompt_token_ids)) if keeps_part else boundaries,
            keeps_part=keeps_part,
            num_joint_tokens=num_joint_tokens,
        )

    def __attrs_post_init__(self) -> None:
        """Seed the request's own random source, and keep the prompt."""
        self.random = random.Random(self.params.seed)
        self.transcript = Transcript(self.token_ids)
        self.prompt_token_ids = tuple(self.token_ids[: self.num_prompt_tokens])
        self.wants_prompt_rows = self.params.prompt_logprobs
        if self.wants_prompt_rows:
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
        """Whether its tokens change its logits, or log-probabilities are wanted, which are computed with its tokens."""
        return self.params.changes_logits or self.params.logprobs or self.wants_prompt_rows

    def draw_ahead(self, place: int) -> float:
        """Return the uniform number that samples the token ``place`` tokens after the next one."""
        while len(self.uniforms) <= place:
            self.uniforms.append(self.random.random())
        return self.uniforms[place]

    def take(self, outcome: int) -> None:
        """Take the next generated token; set ``finish_reason`` if it is the last."""
        self.token_ids.append(outcome)
        if self.uniforms:
            self.uniforms.popleft()
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
        transcript, params = self.transcript, self.params
        text = "" if self.text_stream is None else self.text_stream.text
        num_chars = len(text)
        if num_chars > self.num_chars:
            transcript.text_parts.append(text[self.num_chars :])
            self.num_chars = num_chars
        num_generated = len(self.token_ids) - self.num_prompt_tokens
        # By position: that many named arguments take longer than the rest of this method.
        output = RequestOutput(
            self.asked_id,
            self.sample,
            self.prompt_token_ids,
            tuple(self.token_ids[self.num_prompt_tokens + self.num_reported :]),
            text[self.num_reported_chars :],
            self.finish_reason,
            self.error,
            self.prompt_logprobs,
            self.prompt_top_logprobs,
            self.cached,
            transcript,
            num_generated,
            len(transcript.text_parts),
            params.logprobs,
            params.logprobs and params.top_logprobs > 0,
        )
        self.num_reported, self.num_reported_chars = num_generated, num_chars
        return output

    def take_back(self, output: RequestOutput) -> None:
        """Mark the last report as not seen by the owner."""
        self.num_reported -= len(output.new_token_ids)
        self.num_reported_chars -= len(output.new_text)
