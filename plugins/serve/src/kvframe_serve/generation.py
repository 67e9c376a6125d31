"""What the engine generates for one question, as differences that wait for the client that reads them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

import attrs

from kvframe import FoundPrefix, RequestOutput
from kvframe_serve.access import Caller
from kvframe_serve.metrics import RequestTimes
from kvframe_serve.reading.question import Question
from kvframe_serve.runner import EngineEnded, EngineRequest, RequestRunner

MOST_UNREAD = 1 << 16
"""Tokens and log-probabilities that may wait for a client; a client that leaves more unread is given up."""


class RequestFailedError(Exception):
    """A request ended with an error that its client did not cause."""


@attrs.define(kw_only=True)
class Part:
    """What one choice has generated since its client read the last part.

    Attributes:
        choice: The index of the choice in the answer.
        text: The text.
        token_ids: The tokens.
        logprobs: The log-probability of each token, if the question asks for it.
        top_logprobs: For each token, those of the most likely ones, likewise.
        finish_reason: Why the choice ended; None until then.
        prompt_logprobs: With the first part, if the question asks for it: those of the prompt's tokens.
        prompt_top_logprobs: Likewise, of the most likely tokens.
    """

    choice: int
    text: str = ""
    token_ids: list[int] = attrs.field(factory=list)
    logprobs: list[float] = attrs.field(factory=list)
    top_logprobs: list[Mapping[int, float]] = attrs.field(factory=list)
    finish_reason: str | None = None
    prompt_logprobs: tuple[float | None, ...] | None = None
    prompt_top_logprobs: tuple[Mapping[int, float] | None, ...] | None = None


class Generation:
    """The outputs of one question: of all its prompts, and all samples of each.

    Invariant: all outputs that arrived are in ``_parts``, at most one part for each choice.

    Attributes:
        num_generated: The generated tokens of all choices.
        num_cached: The prompt tokens that were found in the cache.
        cached: By the index of the prompt, what was found of it.
    """

    def __init__(self, question: Question, caller: Caller, times: RequestTimes) -> None:
        """Start with nothing.

        Args:
            question: What is asked for.
            caller: Who asks: its share is given back when everything is generated.
            times: Where the times of tokens are recorded.
        """
        self.num_generated = self.num_cached = 0
        self.cached: dict[int, FoundPrefix] = {}
        self._question = question
        self._caller = caller
        self._times = times
        self._num_running = question.num_samples
        self._parts: dict[int, Part] = {}
        self._num_unread = 0
        self._error: str | None = None
        self._ready = asyncio.Event()
        self._first_at = [0.0] * question.num_samples
        self._num_tokens = [0] * question.num_samples
        self._begun = time.perf_counter()

    async def start(self, runner: RequestRunner) -> None:
        """Add all prompts to what runs them; they end when their client goes away.

        Raises:
            RequestError: The engine refuses one.
            EngineError: The server is closing.
        """
        question, caller = self._question, self._caller
        options: dict[str, Any] = {"cache_salt": caller.salt_for(question.cache_salt), "owner": caller.owner}
        options["hints"] = caller.hints_for(question.hints)
        for index, prompt in enumerate(question.prompts):
            request = EngineRequest(
                prompt=prompt,
                boundaries=question.boundaries,
                params=question.params,
                options=options,
                stream=question.stream,
            )
            request_id = await runner.add(request, partial(self._receive, index * question.params.n))
            caller.on_end.append(partial(runner.abort, request_id))

    async def parts(self) -> AsyncIterator[list[Part]]:
        """Yield the parts as they come, all that are there at once, until all choices have ended.

        Raises:
            RequestFailedError: The request ended with an error.
        """
        while True:
            await self._ready.wait()
            self._ready.clear()
            parts, self._parts, self._num_unread = list(self._parts.values()), {}, 0
            if parts:
                yield parts
            if self._error is not None:
                raise RequestFailedError(self._error)
            if self._num_running == 0 and not self._parts:
                return

    def _receive(self, first_choice: int, output: RequestOutput | EngineEnded) -> None:
        """Take an output, on the event loop."""
        if self._error is not None:
            return
        if output.error is not None:
            self._fail(output.error)
            return
        assert isinstance(output, RequestOutput)
        choice = first_choice + output.sample
        part = self._parts.get(choice)
        if part is None:
            part = self._parts[choice] = Part(choice=choice)
        self._add(part, output)
        self._note(choice, output)
        if self._num_unread > MOST_UNREAD:
            self._fail("the client does not read its answer")
        self._ready.set()

    def _add(self, part: Part, output: RequestOutput) -> None:
        params, tokens = self._question.params, output.new_token_ids
        part.text += output.new_text
        part.token_ids += tokens
        part.finish_reason = output.finish_reason
        if params.logprobs:
            part.logprobs += output.new_logprobs or ()
            part.top_logprobs += output.new_top_logprobs or ()
        if params.prompt_logprobs and output.prompt_logprobs is not None and not self._first_at[part.choice]:
            part.prompt_logprobs, part.prompt_top_logprobs = output.prompt_logprobs, output.prompt_top_logprobs
        self._num_unread += len(tokens) * (1 + params.top_logprobs)

    def _note(self, choice: int, output: RequestOutput) -> None:
        """Count tokens, and record times."""
        now = time.perf_counter()
        self.num_generated += len(output.new_token_ids)
        self._num_tokens[choice] += len(output.new_token_ids)
        if not self._first_at[choice]:
            self._first_at[choice] = now
            if output.sample == 0:
                self._times.first_token(now - self._begun)
                if output.cached is not None:
                    self.num_cached += output.cached.num_tokens
                    self.cached[choice // self._question.params.n] = output.cached
        if output.finish_reason is not None:
            if self._num_tokens[choice] > 1:
                self._times.output_token((now - self._first_at[choice]) / (self._num_tokens[choice] - 1))
            self._num_running -= 1
            if self._num_running == 0:
                self._times.whole(now - self._begun)
                self._caller.share.free()

    def _fail(self, error: str) -> None:
        """End with an error; samples that still run are aborted."""
        self._error = error
        self._times.failed()
        self._caller.logged["failed"] = error
        for end in self._caller.on_end:
            end()
        self._caller.share.free()
        self._ready.set()
