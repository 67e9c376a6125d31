"""Check each request before the application gets it: keys, salts and limits; cancel it if its client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
from collections.abc import Callable, Collection
from contextvars import ContextVar
from typing import Any

import attrs

from kvframe.contract import RequestError, shown

SALT_HEADER = "x-cache-salt"
OPEN_PATHS = ("/health", "/metrics")
"""Paths that need no key."""

_DROPPED = 16
"""A body that is too large is read to its end only if it has at most so many times the bytes of the largest one."""


@attrs.define
class Caller:
    """The sender of the running request.

    Attributes:
        salt: The cache salt from the caller's key and header.
        on_end: Functions that are called when the request was answered or its client disconnected.
    """

    salt: str = ""
    on_end: list[Callable[[], None]] = attrs.field(factory=list)

    def salt_for(self, named: Any) -> str:
        """Return the cache salt of the request. The key is part of it, so no caller can name another caller's salt.

        Args:
            named: The salt in the request's body, or None.

        Raises:
            RequestError: The salt is not a string (``bad_salt``).
        """
        if named is not None and not isinstance(named, str):
            raise RequestError(f"cache_salt must be a string, not {shown(named)}", code="bad_salt")
        return f"{self.salt}/{named}" if named else self.salt


CALLER: ContextVar[Caller] = ContextVar("kvframe_serve_caller")
"""The caller of the running request."""


def error_body(message: str, kind: str, code: str) -> dict[str, Any]:
    """Return an error as OpenAI's interface gives it."""
    return {"error": {"message": message, "type": kind, "code": code, "param": None}}


class Access:
    """ASGI middleware around the application.

    It refuses wrong keys (401), bodies that are too large (413) and requests beyond the limit (429). If a client
    disconnects, it cancels the application's work for this client.
    """

    def __init__(self, app: Any, *, keys: Collection[str] = (), max_requests: int, max_body_bytes: int) -> None:
        """Wrap the application.

        Args:
            app: The application.
            keys: The keys that are accepted; without keys, every caller is served.
            max_requests: The most requests at once.
            max_body_bytes: The most bytes of a request's body.
        """
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._max_requests = max_requests
        self._max_body_bytes = max_body_bytes
        self.num_running = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        key = headers.get(b"authorization", b"").removeprefix(b"Bearer ").strip()
        if self._keys and not self._knows(key):
            await _refuse(send, 401, "the key is missing or wrong: send it as `Authorization: Bearer KEY`", "bad_key")
            return
        if self.num_running >= self._max_requests:
            await _refuse(send, 429, f"{self._max_requests} requests run already; try again later", "too_many_requests")
            return
        body = await self._read_body(headers, receive)
        if body is None:
            await _refuse(send, 413, f"the body is larger than {self._max_body_bytes} bytes", "too_large")
            return
        salt = hashlib.blake2b(key, digest_size=16).hexdigest() if key else ""
        named = headers.get(SALT_HEADER.encode(), b"").decode("latin-1")
        caller = Caller(f"{salt}/{named}" if named else salt)
        token = CALLER.set(caller)
        self.num_running += 1
        try:
            await self._run(scope, body, receive, send)
        finally:
            # A stream that waits for its client gets no notice of the disconnection, so the request is ended here.
            for end in caller.on_end:
                end()
            self.num_running -= 1
            CALLER.reset(token)

    def _knows(self, key: bytes) -> bool:
        """Return whether a key is accepted. The comparison takes the same time for each key."""
        found = False
        for each in self._keys:
            found |= hmac.compare_digest(key, each)
        return found

    async def _read_body(self, headers: dict[bytes, bytes], receive: Any) -> bytes | None:
        """Return the whole body; None if it is too large.

        Up to a limit, the rest of such a body is read and dropped, so that its sender can read the answer.
        """
        length = headers.get(b"content-length", b"")
        most, body, num_read, more = self._max_body_bytes, bytearray(), 0, True
        while more and num_read <= _DROPPED * most and not (length.isdigit() and int(length) > _DROPPED * most):
            message = await receive()
            chunk = message.get("body", b"")
            num_read += len(chunk)
            more = message["type"] == "http.request" and message.get("more_body", False)
            if num_read <= most:
                body += chunk
        return bytes(body) if not more and num_read <= most else None

    async def _run(self, scope: Any, body: bytes, receive: Any, send: Any) -> None:
        """Run the application until it has answered or its client has disconnected."""
        pending = [{"type": "http.request", "body": body, "more_body": False}]
        gone = asyncio.Event()

        async def receive_again() -> Any:
            if pending:
                return pending.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()

        work = asyncio.ensure_future(self._app(scope, receive_again, send))
        watching = asyncio.ensure_future(watch())
        try:
            await asyncio.wait([work, watching], return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            if not work.done():
                work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work


async def _refuse(send: Any, status: int, message: str, code: str) -> None:
    body = json.dumps(error_body(message, "invalid_request_error", code)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
