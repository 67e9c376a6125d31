"""The paths of the server, and its errors in OpenAI's format."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
from fastapi import FastAPI, Request
from kvframe_engine.contract import EngineError
from prometheus_client import CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from kvframe import API_VERSION
from kvframe.contract import ModelError, RequestError, shown
from kvframe_serve.access import CALLER, error_body
from kvframe_serve.answering import Answerer, Embeddings
from kvframe_serve.generation import RequestFailedError
from kvframe_serve.quotas import BusyError
from kvframe_serve.reading import bodies
from kvframe_serve.reading.process import Readers
from kvframe_serve.reading.reader import UNKNOWN_MODEL

_STATUS = {UNKNOWN_MODEL: 404}
"""The status of refusals by their code; 400 for all others."""

_REFERENCE = "#/components/schemas/{model}"


@attrs.define
class Serving:
    """What the paths use.

    Attributes:
        name: The model's name.
        max_model_len: The most tokens of a request.
        readers: Read the bodies.
        registry: The metrics.
        embeds: Whether the engine makes embeddings.
        health: Returns why requests are not served now; empty if they are.
        count_refusal: Called with the code of each refusal.
        answerers: By path, what answers the questions of its bodies; filled when requests can be run.
        created: When the server started, in seconds since 1970.
    """

    name: str
    max_model_len: int
    readers: Readers
    registry: CollectorRegistry
    embeds: bool
    health: Callable[[], Awaitable[str]]
    count_refusal: Callable[[str], None]
    answerers: dict[str, Answerer | Embeddings] = attrs.field(factory=dict)
    created: int = attrs.field(factory=lambda: int(time.time()))


def make_application(serving: Serving) -> FastAPI:
    """Return the application: its paths and errors."""
    app = FastAPI(title="kvframe", version=API_VERSION, docs_url="/docs", redoc_url=None)
    _add_questions(app, serving)
    _add_tokens(app, serving)
    _add_state(app, serving)
    _add_errors(app, serving)
    _describe(app)
    return app


def _describe(app: FastAPI) -> None:
    """Let the description of the interface (``/openapi.json``) hold the types of bodies too."""
    write_openapi = app.openapi

    def openapi() -> dict[str, Any]:
        if not app.openapi_schema:
            schemas = write_openapi().setdefault("components", {}).setdefault("schemas", {})
            for kind in (bodies.CompletionBody, bodies.ChatBody, bodies.EmbeddingBody, bodies.TokenizeBody):
                schemas |= kind.model_json_schema(ref_template=_REFERENCE).get("$defs", {})
        return write_openapi()

    app.openapi = openapi  # type: ignore[method-assign]


def _body(kind: type[bodies.Body]) -> dict[str, Any]:
    """Return the description of a body: it is read in another process, so FastAPI does not see its type."""
    schema = kind.model_json_schema(ref_template=_REFERENCE)
    schema.pop("$defs", None)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _add_questions(app: FastAPI, serving: Serving) -> None:
    """Add the paths that the engine answers."""
    for path, reading, kind in (
        ("/v1/completions", "completion", bodies.CompletionBody),
        ("/v1/chat/completions", "chat", bodies.ChatBody),
        ("/v1/embeddings", "embedding", bodies.EmbeddingBody),
    ):

        async def answer(request: Request, path: str = path, reading: str = reading) -> Response:
            answerer = serving.answerers.get(path)
            if answerer is None:
                does, task = ("makes embeddings", "generate") if serving.embeds else ("generates tokens", "embed")
                raise RequestError(
                    f"this server {does}; start one with `kvframe serve --task {task}`", code="wrong_task"
                )
            question: Any = await serving.readers.read(reading, await request.body(), CALLER.get().owner)
            return await answerer.answer(question)

        app.add_api_route(path, answer, methods=["POST"], name=reading, openapi_extra=_body(kind), response_model=None)


def _add_tokens(app: FastAPI, serving: Serving) -> None:
    """Add the paths that the tokenizer answers."""

    def answered_by(reading: str) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return JSONResponse(await serving.readers.read(reading, await request.body(), CALLER.get().owner))

        return answer

    for name, kind in (("tokenize", bodies.TokenizeBody), ("detokenize", bodies.DetokenizeBody)):
        app.add_api_route(
            f"/{name}", answered_by(name), methods=["POST"], name=name, openapi_extra=_body(kind), response_model=None
        )


def _add_state(app: FastAPI, serving: Serving) -> None:
    """Add the paths that say what is served, and how it goes."""
    model = {
        "id": serving.name,
        "object": "model",
        "created": serving.created,
        "owned_by": "kvframe",
        "max_model_len": serving.max_model_len,
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        if name != serving.name:
            raise RequestError(
                f"there is no model {shown(name)}; this server serves {serving.name!r}", code=UNKNOWN_MODEL
            )
        return model

    @app.get("/health")
    async def health() -> Response:
        why = await serving.health()
        return JSONResponse({"status": why or "ok"}, status_code=503 if why else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(serving.registry), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_errors(app: FastAPI, serving: Serving) -> None:
    """Answer every error in OpenAI's format, with one sentence."""

    def answer(status: int, error: str, code: str) -> JSONResponse:
        kind = {429: "rate_limit_error"}.get(status, "server_error" if status >= 500 else "invalid_request_error")
        headers = {"retry-after": "1"} if status in (429, 503) else None
        if status < 500:
            serving.count_refusal(code)
        if (caller := CALLER.get(None)) is not None:
            caller.logged.setdefault("refused" if status < 500 else "failed", code)
        return JSONResponse(error_body(error, kind, code), status_code=status, headers=headers)

    @app.exception_handler(RequestError)
    async def refused(_request: Request, error: RequestError) -> JSONResponse:
        return answer(_STATUS.get(error.code, 400), str(error), error.code)

    @app.exception_handler(ModelError)
    async def unable(_request: Request, error: ModelError) -> JSONResponse:
        return answer(400, str(error), "bad_text")

    @app.exception_handler(BusyError)
    async def busy(_request: Request, error: BusyError) -> JSONResponse:
        return answer(429, str(error), "too_many_requests")

    @app.exception_handler(EngineError)
    async def closing(_request: Request, error: EngineError) -> JSONResponse:
        return answer(503 if error.code == "closed" else 500, str(error), error.code)

    @app.exception_handler(RequestFailedError)
    async def failed(_request: Request, error: RequestFailedError) -> JSONResponse:
        return answer(500, str(error), "failed")

    @app.exception_handler(HTTPException)
    async def other(_request: Request, error: HTTPException) -> JSONResponse:
        return answer(error.status_code, str(error.detail), "not_served")

    @app.exception_handler(Exception)
    async def broken(_request: Request, error: Exception) -> JSONResponse:
        return answer(500, "the server has failed; its log says why", "internal")
