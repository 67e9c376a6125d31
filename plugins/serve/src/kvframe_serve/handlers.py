"""transformers' handlers for chat and completions, over a kvframe engine instead of ``generate``.

Every name of transformers' serving application that this package uses is imported here; a test lists them.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import attrs
from fastapi import FastAPI
from jinja2 import TemplateError
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import Modality, response_events_to_chunks

from kvframe import RequestOutput
from kvframe.contract import RequestError
from kvframe_serve.access import CALLER, error_body
from kvframe_serve.asked import SALT_FIELD, Asked, check_body, read_params
from kvframe_serve.engine_thread import EngineThread

SERVED_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health")
"""The paths of transformers' application that are served; its others load, unload or need other models."""


class CheckedTokenizer:
    """A tokenizer whose chat template's failures are the client's."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Take the tokenizer."""
        self._tokenizer: Any = tokenizer

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the tokenizer."""
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Tokenize."""
        return self._tokenizer(*args, **kwargs)

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        """Return the tokens of messages.

        Raises:
            RequestError: The model has no chat template (``no_chat_template``), or it refuses the messages
                (``bad_text``).
        """
        if self._tokenizer.chat_template is None:
            raise RequestError("the model has no chat template; use /v1/completions", code="no_chat_template")
        options.pop("load_audio_from_video", None)
        try:
            return self._tokenizer.apply_chat_template(messages, **options)
        except (TemplateError, LookupError, TypeError, ValueError) as error:  # a template is a program of the model's
            raise RequestError(f"the model's chat template refuses the messages: {error}", code="bad_text") from error


class Generation:
    """The generation of one request, for the handler that waits for it.

    It is what transformers' handlers take for a manager of generation, and for a streamer.

    Attributes:
        total_tokens: The generated tokens so far.
    """

    def __init__(self, thread: EngineThread, processor: PreTrainedTokenizerBase) -> None:
        """Take the engine's thread and the tokenizer."""
        self._thread = thread
        self._processor = processor
        self._asked: Asked | None = None
        self._request_id: str | None = None
        self._outputs: asyncio.Queue[RequestOutput] = asyncio.Queue()
        self._items: asyncio.Queue[Any] | None = None
        self._parser: Any = None
        self._raw: Any = None
        self.total_tokens = 0

    def init_cb(self, model: Any, gen_config: Any) -> None:
        """Do nothing: the engine runs already."""

    async def start(self, token_ids: list[int], asked: Asked) -> None:
        """Add the request to the engine; raise ``RequestError`` if the engine refuses it."""
        self._asked = asked
        self._request_id = await self._thread.add(token_ids, asked.params, self._receive, cache_salt=asked.cache_salt)
        CALLER.get().on_end.append(self.cancel)

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue[Any], Generation]:
        """Return the queue of the parts of the answer, which ends with None, and this generation."""
        self._items = asyncio.Queue()
        self._parser = response_parser
        if response_parser is not None:
            # A parser reads the special tokens, which the engine's text leaves out.
            self._raw = DecodeStream([], skip_special_tokens=False)
            self._put_events(response_parser.initial_events)
        while not self._outputs.empty():
            self._stream(self._outputs.get_nowait())
        return self._items, self

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """Return the text, the number of prompt tokens and the generated tokens, when the request has ended.

        Raises:
            RequestFailed: It ended with an error.
        """
        while (output := await self._outputs.get()).finish_reason is None:
            pass
        self._note_end(output)
        if output.error is not None:
            raise RequestFailedError(output.error)
        return output.text, len(output.prompt_token_ids), list(output.token_ids)

    def cancel(self) -> None:
        """End the request, if it has not ended."""
        if self._request_id is not None:
            self._thread.abort(self._request_id)

    def stop(self) -> None:
        """Do nothing: the engine outlives the request."""

    def _receive(self, output: RequestOutput) -> None:
        if self._items is None:
            self._outputs.put_nowait(output)
        else:
            self._stream(output)

    def _stream(self, output: RequestOutput) -> None:
        """Put an output's new part into the queue."""
        assert self._items is not None
        self.total_tokens = len(output.token_ids)
        if self._parser is None:
            if output.new_text:
                self._items.put_nowait(output.new_text)
        else:
            tokenizer: Any = self._processor
            text = "".join(self._raw.step(tokenizer.backend_tokenizer, each) or "" for each in output.new_token_ids)
            self._put_events(self._parser.feed(text) if text else [])
        if output.finish_reason is None:
            return
        self._note_end(output)
        if output.error is not None:
            self._items.put_nowait(ErrorPart(output.error))
        elif self._parser is not None:
            with suppress(ValueError, RuntimeError):  # the text ended within a structured part
                self._put_events(self._parser.finalize()[1])
        self._items.put_nowait(None)

    def _put_events(self, events: Any) -> None:
        assert self._items is not None
        for item in response_events_to_chunks(events):
            self._items.put_nowait(item)

    def _note_end(self, output: RequestOutput) -> None:
        """Make the handler report the engine's reason: it says ``length`` from ``max_new_tokens`` tokens on."""
        assert self._asked is not None
        count = len(output.token_ids)
        self._asked.max_new_tokens = count if output.finish_reason == "length" else count + 1


class ErrorPart(str):
    """The part of a stream that says why the request failed, in place of text."""


class RequestFailedError(Exception):
    """A request ended with an error that is not its client's."""


@attrs.define
class ServedModel:
    """The one model of the server, in the place of transformers' managers of models and generations.

    Attributes:
        name: The name that clients give.
        tokenizer: Its tokenizer.
        config: Its config.
        created: Seconds since 1970 at the start.
        defaults: Sampling parameters where a request says nothing.
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

    @property
    def force_model(self) -> str:
        """The only model that requests may name."""
        return self.name

    def process_model_name(self, model_id: str) -> str:
        """Return the name as responses give it."""
        return model_id

    def load_model_and_processor(self, model_id: str, gguf_file: str | None = None) -> tuple[Any, Any]:
        """Return what handlers read of the model, and the tokenizer."""
        return SimpleNamespace(config=self.config, generation_config=None), CheckedTokenizer(self.tokenizer)

    def get_model_modality(self, model: Any, processor: Any = None) -> Modality:
        """Return that it reads and writes text."""
        return Modality.LLM

    def get_gen_models(self) -> list[dict[str, Any]]:
        """Return the list of models, as OpenAI's interface gives it."""
        return [{"id": self.name, "object": "model", "created": self.created, "owned_by": "kvframe"}]

    def use_continuous_batching(self, model: Any, modality: Modality) -> bool:
        """Return True: handlers then tokenize to lists of ids."""
        return True

    def get_manager(self, model_id: str, use_cb: bool = False) -> Generation:
        """Return the generation of a new request."""
        assert self.thread is not None
        return Generation(self.thread, self.tokenizer)

    def is_cb_alive(self) -> bool:
        """Return whether requests are served."""
        return self.thread is not None and self.thread.is_alive

    def shutdown(self) -> None:
        """Close the engine."""
        if self.thread is not None:
            self.thread.close()


class _OnEngine:
    """How both handlers differ from transformers': they check a body, and add the request before they answer."""

    _is_chat: bool
    model_manager: ServedModel

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Serve a request.

        Raises:
            RequestError: The body or the prompt is wrong.
        """
        check_body(body, is_chat=self._is_chat)
        answer = await super().handle_request(body, request_id)  # type: ignore[misc]
        return await answer if inspect.isawaitable(answer) else answer

    def _validate_request(self, body: dict[str, Any]) -> None:
        """Do nothing: the body is checked already."""

    def _build_generation_config(
        self, body: dict[str, Any], model_generation_config: Any, use_cb: bool = False
    ) -> Asked:
        served = self.model_manager
        params = read_params(body, served.defaults, served.most_tokens)
        return Asked(params, CALLER.get().salt_for(body.get(SALT_FIELD)), params.max_new_tokens)

    def _build_chunk_sse(self, *args: Any, **named: Any) -> str:
        for part in (named.get("content"), named.get("text")):
            if isinstance(part, ErrorPart):
                return f"data: {json.dumps(error_body(part, 'server_error', 'failed'))}\n\n"
        parent: Any = super()
        return str(parent._build_chunk_sse(*args, **named))

    async def _streaming(self, *arguments: Any, **named: Any) -> Any:
        await _start(*arguments, **named)
        parent: Any = super()
        return parent._streaming(*arguments, **named)

    async def _non_streaming(self, *arguments: Any, **named: Any) -> Any:
        await _start(*arguments, **named)
        parent: Any = super()
        return await parent._non_streaming(*arguments, **named)


async def _start(
    request_id: str,
    model: Any,
    processor: Any,
    model_id: str,
    inputs: Any,
    gen_config: Asked,
    gen_manager: Generation,
    *rest: Any,
    **named: Any,
) -> None:
    """Add the request of a handler's call to the engine; the arguments are those of the call."""
    await gen_manager.start(inputs["input_ids"], gen_config)


class ChatHandler(_OnEngine, ChatCompletionHandler):  # type: ignore[misc]
    """Serves ``/v1/chat/completions``."""

    _is_chat = True


class TextHandler(_OnEngine, CompletionHandler):  # type: ignore[misc]
    """Serves ``/v1/completions``."""

    _is_chat = False


def make_application(served: ServedModel) -> FastAPI:
    """Return transformers' application with these handlers, and only the paths that are served."""
    parts: Any = served
    nothing: Any = None
    app = build_server(
        model_manager=parts,
        chat_handler=ChatHandler(parts, parts),
        completion_handler=TextHandler(parts, parts),
        response_handler=nothing,
        transcription_handler=nothing,
        systemone_handler=nothing,
        generation_state=parts,
    )
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) in SERVED_PATHS]
    return app
