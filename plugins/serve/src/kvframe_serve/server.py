"""Put an engine, its thread and the HTTP application together."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from kvframe import Engine, Stack
from kvframe.contract import EngineError, ModelError, RequestError
from kvframe_serve.access import Access, error_body
from kvframe_serve.engine_thread import EngineThread
from kvframe_serve.handlers import RequestFailedError, ServedModel, UnknownModelError, make_application
from kvframe_serve.metrics import EngineMetrics
from kvframe_serve.plugin import limits

_DEFAULT_TOKENS = 1024
"""The most generated tokens of a request that names no limit."""


class Server:
    """Serves one model by OpenAI's interface.

    Attributes:
        app: The ASGI application.
        served: The model as clients see it.
    """

    def __init__(
        self,
        path: Path,
        *,
        stack: Stack | None = None,
        name: str | None = None,
        keys: Collection[str] = (),
    ) -> None:
        """Load a model and make its engine.

        Args:
            path: A model's folder, with a tokenizer.
            stack: The stack; the default stack unless given. Its ``[plugin.serve]`` limits requests.
            name: The name that clients use; the folder's name unless given.
            keys: The keys that are accepted; without keys, every caller is served.

        Raises:
            KVFrameError: The stack, the model or the memory is wrong, or the model has no tokenizer.
        """
        self._engine = Engine.from_pretrained(path, stack=stack)
        try:
            limit = limits()
            self.served = _read_model(path, name or path.resolve().name, limit["max_new_tokens"])
            app = make_application(self.served)
            _add_errors(app)
            self._access = Access(
                app, keys=keys, max_requests=limit["max_requests"], max_body_bytes=limit["max_body_bytes"]
            )
            self._metrics = EngineMetrics(self._engine, lambda: self._access.num_running)
            _add_metrics(app, self._metrics)
        except BaseException:
            self._engine.close()
            raise
        self.app: Any = self._access

    async def run(self, place: socket.socket, *, grace: float = 5.0, log_level: str = "info") -> None:
        """Serve until the process is told to end.

        Args:
            place: A bound socket, which this closes.
            grace: Seconds that running requests then get to end; the others end with an error.
            log_level: What uvicorn logs.
        """
        config = uvicorn.Config(self.app, log_level=log_level, access_log=False)
        self.start(asyncio.get_running_loop())
        try:
            await _Ending(config, self.served, grace).serve([place])
        finally:
            self.close()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the engine's thread; outputs are delivered in ``loop``."""
        self.served.thread = EngineThread(self._engine, loop, self._metrics.note_step)

    def close(self) -> None:
        """End all requests and close the engine. It may be called twice."""
        self.served.shutdown()
        self._engine.close()


class _Ending(uvicorn.Server):
    """uvicorn's server, whose requests end with an error some time after the process was told to end."""

    def __init__(self, config: uvicorn.Config, served: ServedModel, grace: float) -> None:
        super().__init__(config)
        self._served = served
        self._grace = grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close, after the running requests have ended or the time for them is over."""

        async def end_requests() -> None:
            await asyncio.sleep(self._grace)
            await asyncio.to_thread(self._served.shutdown)

        ending = asyncio.ensure_future(end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()


def _read_model(path: Path, name: str, most_tokens: int) -> ServedModel:
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} has no tokenizer, which a server needs: {error}") from error
    defaults: dict[str, Any] = {"max_new_tokens": min(_DEFAULT_TOKENS, most_tokens)}
    if (path / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(str(path), local_files_only=True)
        if generation.do_sample:
            named = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
            defaults |= {key: getattr(generation, key) or value for key, value in named.items()}
    config = AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    return ServedModel(name, tokenizer, config, int(time.time()), defaults, most_tokens)


def _add_errors(app: FastAPI) -> None:
    """Answer every error in OpenAI's format, with one sentence."""

    def answer(status: int, error: str, code: str) -> JSONResponse:
        kind = "server_error" if status >= 500 else "invalid_request_error"
        return JSONResponse(error_body(error, kind, code), status_code=status)

    @app.exception_handler(RequestError)
    async def refused(_request: Request, error: RequestError) -> JSONResponse:
        return answer(400, str(error), error.code)

    @app.exception_handler(UnknownModelError)
    async def unknown(_request: Request, error: UnknownModelError) -> JSONResponse:
        return answer(404, str(error), "model_not_found")

    @app.exception_handler(EngineError)
    async def closing(_request: Request, error: EngineError) -> JSONResponse:
        return answer(503, str(error), error.code)

    @app.exception_handler(RequestFailedError)
    async def failed(_request: Request, error: RequestFailedError) -> JSONResponse:
        return answer(500, str(error), "failed")

    @app.exception_handler(RequestValidationError)
    async def not_json(_request: Request, error: RequestValidationError) -> JSONResponse:
        return answer(400, "the body must be a JSON object", "bad_body")

    @app.exception_handler(HTTPException)
    async def other(_request: Request, error: HTTPException) -> JSONResponse:
        return answer(error.status_code, str(error.detail), "not_served")

    @app.exception_handler(Exception)
    async def broken(_request: Request, error: Exception) -> JSONResponse:
        return answer(500, "the server has failed; its log says why", "internal")


def _add_metrics(app: FastAPI, metrics: EngineMetrics) -> None:
    registry = CollectorRegistry()
    registry.register(metrics)

    @app.get("/metrics")
    async def read_metrics() -> Response:
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")
