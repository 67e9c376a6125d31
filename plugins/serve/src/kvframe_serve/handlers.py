"""Serves chat and completions over a kvframe engine, on transformers' serving application.

Every name of that application that this package uses is imported here and in ``choices.py``; a test lists them.
"""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import attrs
from fastapi import FastAPI
from fastapi.responses import Response, StreamingResponse
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import BaseHandler, Modality

from kvframe import RequestOutput, SamplingParams
from kvframe.contract import RequestError, shown
from kvframe_serve.access import CALLER, error_body
from kvframe_serve.choices import Asking, ChatChoice, Choice, TextChoice
from kvframe_serve.engine_thread import EngineThread
from kvframe_serve.logprobs import TokenTexts
from kvframe_serve.request_body import SALT_FIELD, check_body, read_params, wants_usage

SERVED_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health")
"""The served paths of transformers' application; its other paths load, unload or need other models."""

_BAD_MESSAGES = (TemplateError, AttributeError, LookupError, TypeError, ValueError)
"""What reading messages raises if they are wrong: a chat template is a program of the model's."""


class RequestFailedError(Exception):
    """A request ended with an error that its client did not cause."""


class UnknownModelError(Exception):
    """A client named a model that is not served."""


@attrs.define
class ServedModel:
    """The one model of the server, in the place of transformers' managers of models and generations.

    Attributes:
        name: The name that clients use.
        tokenizer: The model's tokenizer.
        config: The model's config.
        created: The time of the start, in seconds since 1970.
        defaults: The sampling parameters that a request does not name.
        most_tokens: The most tokens that a request may generate.
        thread: The engine's thread; None until the server runs.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    config: Any
    created: int
    defaults: Mapping[str, Any]
    most_tokens: int
    thread: EngineThread | None = None

    def get_gen_models(self) -> list[dict[str, Any]]:
        """Return the list of models, as OpenAI's interface gives it."""
        return [{"id": self.name, "object": "model", "created": self.created, "owned_by": "kvframe"}]

    def is_cb_alive(self) -> bool:
        """Return whether requests are served."""
        return self.thread is not None and self.thread.is_alive

    def shutdown(self) -> None:
        """Close the engine."""
        if self.thread is not None:
            self.thread.close()


class Generation:
    """The outputs of one request, all samples of it, for the handler that waits for them."""

    def __init__(self, num_samples: int) -> None:
        """Start with nothing."""
        self._num_running = num_samples
        self._outputs: asyncio.Queue[RequestOutput] = asyncio.Queue()

    async def start(self, thread: EngineThread, token_ids: Sequence[int], params: SamplingParams, salt: str) -> None:
        """Add the request to the engine; it ends when its client goes away.

        Raises:
            RequestError: The engine refuses it.
            EngineError: The server is closing.
        """
        request_id = await thread.add(token_ids, params, self._outputs.put_nowait, cache_salt=salt)
        CALLER.get().on_end.append(lambda: thread.abort(request_id))

    async def outputs(self) -> AsyncIterator[list[RequestOutput]]:
        """Yield the outputs as they come, all that are there at once, until all samples have ended.

        Raises:
            RequestFailedError: The request ended with an error.
        """
        while self._num_running > 0:
            ready = [await self._outputs.get()]
            while not self._outputs.empty():
                ready.append(self._outputs.get_nowait())
            for output in ready:
                if output.error is not None:
                    raise RequestFailedError(output.error)
                self._num_running -= output.finish_reason is not None
            yield ready


class _Handler(ABC):
    """Serves one path: it checks a body, adds a request, and answers with what the engine generates."""

    _is_chat: bool
    _prefix: str
    _kind: str
    _chunk_kind: str
    _choice: type[Choice]

    def __init__(self, served: ServedModel) -> None:
        """Take the model."""
        self._served = served

    @abstractmethod
    def _tokens_of(self, body: Mapping[str, Any]) -> list[int]:
        """Return the tokens of a body's prompt."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Response:
        """Serve a request.

        Raises:
            RequestError: The body or the prompt is wrong.
            UnknownModelError: It names another model.
            RequestFailedError: It ended with an error.
        """
        served = self._served
        check_body(body, is_chat=self._is_chat)
        if body.get("model") not in (None, served.name):
            raise UnknownModelError(f"there is no model {shown(body['model'])}; this server serves {served.name!r}")
        params = read_params(body, served.defaults, served.most_tokens, is_chat=self._is_chat)
        asking = Asking(
            request_id=f"{self._prefix}-{request_id}",
            tokenizer=served.tokenizer,
            model=SimpleNamespace(config=served.config),
            texts=self._texts,
            params=params,
            token_ids=self._tokens_of(body),
            tools=body.get("tools"),
            suffix=body.get("suffix") or "",
        )
        generation = Generation(params.n)
        assert served.thread is not None
        salt = CALLER.get().salt_for(body.get(SALT_FIELD))
        await generation.start(served.thread, asking.token_ids, params, salt)
        choices = [self._choice(asking, index) for index in range(params.n)]
        if body.get("stream"):
            parts = self._stream(asking, generation, choices, with_usage=wants_usage(body))
            return StreamingResponse(parts, media_type="text/event-stream")
        return Response(await self._whole(asking, generation, choices), media_type="application/json")

    @cached_property
    def _texts(self) -> TokenTexts:
        return TokenTexts(self._served.tokenizer)

    async def _whole(self, asking: Asking, generation: Generation, choices: Sequence[Choice]) -> str:
        last: list[RequestOutput | None] = [None] * len(choices)
        async for outputs in generation.outputs():
            for output in outputs:
                last[output.sample] = output
        ended = [attrs.evolve(output, new_token_ids=output.token_ids) for output in last if output is not None]
        answer = {
            **self._base(asking, self._kind),
            "choices": [choice.whole(output) for choice, output in zip(choices, ended, strict=True)],
            "usage": _usage(asking, [len(output.token_ids) for output in ended]),
        }
        return _as_json(answer)

    async def _stream(
        self, asking: Asking, generation: Generation, choices: Sequence[Choice], *, with_usage: bool
    ) -> AsyncIterator[str]:
        base, counts = self._base(asking, self._chunk_kind), [0] * len(choices)

        def events(parts: Sequence[dict[str, Any]]) -> str:
            return "".join(_event({**base, "choices": [part]}) for part in parts)

        if start := "".join(events(choice.start()) for choice in choices):
            yield start
        try:
            async for outputs in generation.outputs():
                for output in outputs:
                    counts[output.sample] = len(output.token_ids)
                if ready := "".join(events(choices[each.sample].parts(each)) for each in outputs):
                    yield ready
            if with_usage:
                yield _event({**base, "choices": [], "usage": _usage(asking, counts)})
        except RequestFailedError as error:
            yield _event(error_body(str(error), "server_error", "failed"))
        yield "data: [DONE]\n\n"

    def _base(self, asking: Asking, kind: str) -> dict[str, Any]:
        return {"id": asking.request_id, "object": kind, "created": int(time.time()), "model": self._served.name}


class ChatHandler(_Handler):
    """Serves ``/v1/chat/completions``."""

    _is_chat = True
    _prefix = "chatcmpl"
    _kind = "chat.completion"
    _chunk_kind = "chat.completion.chunk"
    _choice = ChatChoice

    def _tokens_of(self, body: Mapping[str, Any]) -> list[int]:
        tokenizer: Any = self._served.tokenizer
        if tokenizer.chat_template is None:
            raise RequestError("the model has no chat template; use /v1/completions", code="no_chat_template")
        try:
            messages = BaseHandler.get_processor_inputs_from_messages(body["messages"], Modality.LLM)
            found = tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=True,
                tools=body.get("tools"),
                return_dict=True,
                tokenize=True,
                **(body.get("chat_template_kwargs") or {}),
            )
        except _BAD_MESSAGES as error:
            why = f"{type(error).__name__}: {error}" if isinstance(error, LookupError | AttributeError) else str(error)
            raise RequestError(f"the model's chat template refuses the messages: {why}", code="bad_text") from error
        return list(found["input_ids"])


class TextHandler(_Handler):
    """Serves ``/v1/completions``."""

    _is_chat = False
    _prefix = "cmpl"
    _kind = _chunk_kind = "text_completion"
    _choice = TextChoice

    def _tokens_of(self, body: Mapping[str, Any]) -> list[int]:
        tokenizer: Any = self._served.tokenizer
        return list(tokenizer(body["prompt"])["input_ids"])


def _usage(asking: Asking, counts: Sequence[int]) -> dict[str, int]:
    prompt, generated = len(asking.token_ids), sum(counts)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {_as_json(value)}\n\n"


def _as_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def make_application(served: ServedModel) -> FastAPI:
    """Return transformers' application with these handlers, and only the paths that are served."""
    parts: Any = served
    chat: Any = ChatHandler(served)
    text: Any = TextHandler(served)
    nothing: Any = None
    app: FastAPI = build_server(
        model_manager=parts,
        chat_handler=chat,
        completion_handler=text,
        response_handler=nothing,
        transcription_handler=nothing,
        systemone_handler=nothing,
        generation_state=parts,
    )
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) in SERVED_PATHS]
    return app
