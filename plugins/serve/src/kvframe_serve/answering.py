"""Answers a question: it runs in the engine, and the answer is sent as a whole or in parts."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.responses import Response, StreamingResponse

from kvframe import EmbeddingOutput, FoundPrefix
from kvframe_serve.access import CALLER, Caller, error_body
from kvframe_serve.answers import AnswerFormat
from kvframe_serve.choices import ChatChoice, Choice, TextChoice
from kvframe_serve.generation import Generation, Part, RequestFailedError
from kvframe_serve.logprobs import TokenTexts
from kvframe_serve.metrics import RequestTimes
from kvframe_serve.reading.question import EmbeddingQuestion, Question
from kvframe_serve.runner import EngineEnded, EngineRequest, RequestRunner


class Answerer(ABC):
    """Answers the questions of one route."""

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, name: str, runner: RequestRunner, times: RequestTimes, texts: TokenTexts) -> None:
        """Take what serves.

        Args:
            name: The model's name.
            runner: Runs the requests.
            times: Where the times of tokens are recorded.
            texts: The texts of tokens.
        """
        self._name = name
        self._runner = runner
        self._times = times
        self._texts = texts

    @abstractmethod
    def _choice(self, question: Question, index: int, request_id: str) -> Choice:
        """Return a choice of the answer."""

    async def answer(self, question: Question) -> Response:
        """Return the answer to a question.

        Raises:
            KVFrameError: The engine refuses the question.
            RequestFailedError: It ended with an error.
        """
        caller = CALLER.get()
        caller.share.grow(question.num_samples)
        generation = Generation(question, caller, self._times)
        await generation.start(self._runner)
        request_id = f"{self.prefix}-{caller.request_id}"
        choices = [self._choice(question, index, request_id) for index in range(question.num_samples)]
        base = {"id": request_id, "created": int(time.time()), "model": self._name}
        usage = partial(_usage, question, generation, caller)
        if question.stream:
            base["object"] = self.chunk_kind
            return StreamingResponse(
                _events(generation, choices, base, usage, with_usage=question.with_usage),
                media_type="text/event-stream",
            )
        whole = [Part(choice=index) for index in range(question.num_samples)]
        async for parts in generation.parts():
            for part in parts:
                _append(whole[part.choice], part)
        answers = [choice.whole(part) for choice, part in zip(choices, whole, strict=True)]
        return _json({**base, "object": self.kind, "choices": answers, "usage": usage()})


class Completions(Answerer):
    """Answers ``/v1/completions``."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def _choice(self, question: Question, index: int, request_id: str) -> Choice:
        return TextChoice(question, index, self._texts)


class Chats(Answerer):
    """Answers ``/v1/chat/completions``."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, *serving: Any, answer_format: AnswerFormat | None, special: Collection[str]) -> None:
        """Take what serves.

        Args:
            serving: As for the base class.
            answer_format: How the model marks reasoning and tool calls; None if that is not known.
            special: The texts of the special tokens.
        """
        super().__init__(*serving)
        self._format = answer_format
        self._special = special

    def _choice(self, question: Question, index: int, request_id: str) -> Choice:
        parser, parsing = None, question.parsing
        if parsing is not None and self._format is not None:
            parser = self._format.parser(
                reasoning=parsing.reasoning,
                tools=parsing.tools,
                in_reasoning=parsing.in_reasoning,
                special=self._special,
            )
        return ChatChoice(question, index, self._texts, parser, request_id)


class Embeddings:
    """Answers ``/v1/embeddings``."""

    def __init__(self, name: str, runner: RequestRunner, times: RequestTimes) -> None:
        """Take what serves, as ``Answerer`` does."""
        self._name = name
        self._runner = runner
        self._times = times

    async def answer(self, question: EmbeddingQuestion) -> Response:
        """Return the embeddings of texts.

        Raises:
            KVFrameError: The engine refuses a text.
            RequestFailedError: It ended with an error.
        """
        caller, start_time = CALLER.get(), time.perf_counter()
        caller.share.grow(question.num_samples)
        outputs: asyncio.Queue[tuple[int, EmbeddingOutput | EngineEnded]] = asyncio.Queue()
        salt, hints = caller.salt_for(question.cache_salt), caller.hints_for(question.hints)
        options = {"cache_salt": salt, "owner": caller.owner, "hints": hints}
        for index, prompt in enumerate(question.prompts):

            def receive(output: Any, index: int = index) -> None:
                outputs.put_nowait((index, output))

            request_id = await self._runner.add(EngineRequest(prompt=prompt, options=options), receive)
            caller.on_end.append(partial(self._runner.abort, request_id))
        vectors: dict[int, tuple[float, ...]] = {}
        while len(vectors) < len(question.prompts):
            index, output = await outputs.get()
            if isinstance(output, EngineEnded) or output.embedding is None:
                self._times.failed()
                raise RequestFailedError(output.error or "the text has no embedding")
            vectors[index] = output.embedding
        self._times.whole(time.perf_counter() - start_time)
        count = sum(map(len, question.prompts))
        caller.logged |= {"prompt_tokens": count, **question.logged}
        data = [
            {"object": "embedding", "index": index, "embedding": _vector(vectors[index], question.as_base64)}
            for index in range(len(question.prompts))
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return _json({"object": "list", "data": data, "model": self._name, "usage": usage})


def _vector(values: Sequence[float], as_base64: bool) -> Any:
    return base64.b64encode(array("f", values).tobytes()).decode() if as_base64 else list(values)


def _append(whole: Part, part: Part) -> None:
    """Add a part to what a choice has so far."""
    whole.text += part.text
    whole.token_ids += part.token_ids
    whole.logprobs += part.logprobs
    whole.top_logprobs += part.top_logprobs
    whole.finish_reason = part.finish_reason
    if part.prompt_logprobs is not None:
        whole.prompt_logprobs, whole.prompt_top_logprobs = part.prompt_logprobs, part.prompt_top_logprobs


async def _events(
    generation: Generation, choices: Sequence[Choice], base: Mapping[str, Any], usage: Any, *, with_usage: bool
) -> AsyncIterator[str]:
    """Yield the events of a stream."""

    def events(chunks: Sequence[Mapping[str, Any]]) -> str:
        return "".join(_event({**base, "choices": [chunk]}) for chunk in chunks)

    try:
        if start := "".join(events(choice.start()) for choice in choices):
            yield start
        async for parts in generation.parts():
            if ready := "".join(events(choices[part.choice].chunks(part)) for part in parts):
                yield ready
        counts = usage()
        if with_usage:
            yield _event({**base, "choices": [], "usage": counts})
    except RequestFailedError as error:
        yield _event(error_body(str(error), "server_error", "failed"))
    yield "data: [DONE]\n\n"


def _usage(question: Question, generation: Generation, caller: Caller) -> dict[str, Any]:
    """Return the counts of tokens, and note them for the log."""
    prompt, num_generated = sum(map(len, question.prompts)), generation.num_generated
    if question.only_echo:
        num_generated = 0
    num_cached = generation.num_cached
    caller.logged |= {
        "prompt_tokens": prompt,
        "cached_tokens": num_cached,
        "generated_tokens": num_generated,
        **question.logged,
    }
    details: dict[str, Any] = {"cached_tokens": num_cached}
    if question.with_cached:
        details["cached"] = [_found(generation.cached.get(index)) for index in range(len(question.prompts))]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": num_generated,
        "total_tokens": prompt + num_generated,
        "prompt_tokens_details": details,
    }


def _found(cached: FoundPrefix | None) -> dict[str, Any] | None:
    """Return what was found of a prompt, where it was, and why it was not more."""
    if cached is None:
        return None
    return {
        "cached_tokens": cached.num_tokens,
        "known_tokens": cached.known_tokens,
        "device_tokens": cached.num_tokens - cached.restored_tokens,
        "restored_tokens": cached.restored_tokens,
        "restored_from": list(cached.restored_from),
        "of_groups": {str(group): count for group, count in cached.of_groups.items()},
        "limited_by": list(cached.limited_by),
        "why": cached.why,
    }


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {_text(value)}\n\n"


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _json(value: Mapping[str, Any]) -> Response:
    return Response(_text(value), media_type="application/json")
