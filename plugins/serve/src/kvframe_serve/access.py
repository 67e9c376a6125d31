"""Check each request before the application gets it: its key, its quota, its body; and log it when it is answered."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from typing import Any

import attrs

from kvframe import Hints
from kvframe.contract import RequestError
from kvframe_serve.hinting import ALL_LIMITS, HintLimits, hints_of_headers
from kvframe_serve.quotas import BusyError, Quota, Share
from kvframe_serve.request_log import log_request

SALT_HEADER = b"x-cache-salt"
ID_HEADER = b"x-request-id"
OPEN_PATHS = ("/health", "/metrics")
"""Paths that need no key and no quota."""

_DROPPED = 16
"""A body that is too large is read to its end only if it has at most so many times the bytes of the largest one."""

_MOST_ID_CHARS = 128


@attrs.define
class Caller:
    """The sender of the running request.

    Attributes:
        request_id: The request's id in the log and in the answer's headers.
        owner: Stands for the caller's key; empty without a key.
        salt: The cache salt from the caller's key and header.
        share: What it uses of the quota of samples.
        hints: The hints that the headers give, by name.
        hint_limits: The most that the hints of its requests count for.
        on_end: Functions that are called when the request was answered or its client disconnected.
        logged: What the log says of the request, by name.
    """

    request_id: str
    owner: str
    salt: str
    share: Share
    hints: Mapping[str, Any] = attrs.field(factory=dict)
    hint_limits: HintLimits = ALL_LIMITS
    on_end: list[Callable[[], None]] = attrs.field(factory=list)
    logged: dict[str, Any] = attrs.field(factory=dict)

    def hints_for(self, hints: Mapping[str, Any]) -> Hints:
        """Return the hints of the request, within the caller's limits.

        Args:
            hints: The hints in the request's body, by name.

        Raises:
            RequestError: A hint is wrong (``bad_hints``).
        """
        if not (hints or self.hints):
            return self.hint_limits.limited(Hints())
        limited = self.hint_limits.limited(Hints(**{**self.hints, **hints}))
        self.logged |= {"priority": limited.priority, "keep_seconds": limited.keep_seconds}
        return limited

    def salt_for(self, salt_name: str) -> str:
        """Return the cache salt of the request. The key is part of it, so no caller can name another caller's salt.

        Args:
            salt_name: The salt in the request's body; empty for none.
        """
        return f"{self.salt}/{salt_name}" if salt_name else self.salt


CALLER: ContextVar[Caller] = ContextVar("kvframe_serve_caller")
"""The caller of the running request."""


def error_body(message: str, kind: str, code: str) -> dict[str, Any]:
    """Return an error as OpenAI's interface gives it."""
    return {"error": {"message": message, "type": kind, "code": code, "param": None}}


class ClientGoneError(Exception):
    """The client has closed its connection before it sent the whole body."""


class _Refused(Exception):
    """The request is answered without the application."""

    def __init__(self, status: int, message: str, code: str, *, closes: bool = False) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.closes = status, message, code, closes


class Access:
    """An ASGI application around another one."""

    def __init__(
        self,
        app: Any,
        quota: Quota,
        *,
        keys: Collection[str],
        max_body_bytes: int,
        client_seconds: float,
        count_refusal: Callable[[str], None] = lambda code: None,
        hint_limits: Callable[[str], HintLimits] = lambda key_name: ALL_LIMITS,
    ) -> None:
        """Wrap the application.

        Args:
            app: The application.
            quota: The quota of samples.
            keys: The keys that are accepted; without keys, every caller is served.
            max_body_bytes: The most bytes of a request's body.
            client_seconds: How long a client may take to send a body.
            count_refusal: Called with the code of each refusal.
            hint_limits: Returns the most that hints count for, by what the log says of the caller's key.
        """
        self._hint_limits = hint_limits
        self._app = app
        self._quota = quota
        self._keys = [key.encode() for key in keys]
        self._max_body_bytes = max_body_bytes
        self._client_seconds = client_seconds
        self._count_refusal = count_refusal
        max_dropped_bytes = _DROPPED * max_body_bytes
        self._bytes = Quota(
            "bytes of bodies",
            max_total=max_dropped_bytes,
            max_per_key=max_dropped_bytes // 2 if self._keys else max_dropped_bytes,
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        start_time, status = time.perf_counter(), 0
        headers = dict(scope["headers"])
        request_id = _request_id(headers.get(ID_HEADER, b""))

        async def send_with_id(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (ID_HEADER, request_id.encode())]
            await send(message)

        log_fields: dict[str, Any] = {}
        try:
            log_fields = await self._serve(scope, headers, request_id, receive, send_with_id)
        except ClientGoneError:
            log_fields = {"gone": "before its body was there"}
        except _Refused as refusal:
            log_fields = {"refused": refusal.code}
            self._count_refusal(refusal.code)
            await _refuse(send_with_id, refusal)
        finally:
            seconds = time.perf_counter() - start_time
            log_request(
                {
                    "id": request_id,
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status or "none",
                    "seconds": seconds,
                    **log_fields,
                }
            )

    async def _serve(
        self, scope: Any, headers: Mapping[bytes, bytes], request_id: str, receive: Any, send: Any
    ) -> dict[str, Any]:
        """Serve a request; return what the log says of it."""
        key = self._key(headers.get(b"authorization", b""))
        owner = hashlib.blake2b(key, digest_size=16).hexdigest() if key else ""
        header = headers.get(SALT_HEADER, b"").decode("latin-1")
        share, body_share = Share(self._quota, owner), Share(self._bytes, owner)
        try:
            hints = hints_of_headers(headers)
        except RequestError as error:
            raise _Refused(400, str(error), error.code, closes=True) from None
        salt = f"{owner}/{header}" if header else owner
        caller = Caller(request_id, owner, salt, share, hints, self._hint_limits(owner[:8]))
        if owner:
            caller.logged["key"] = owner[:8]
        token = CALLER.set(caller)
        try:
            body = await self._read_body(headers, receive, body_share)
            if scope["method"] == "POST":
                try:
                    share.grow(1)  # not before its body is there: halves of bodies use no quota
                except BusyError as error:
                    raise _Refused(429, str(error), "too_many_requests") from None
            await self._run(scope, body, receive, send)
        finally:
            # A stream that waits for its client gets no notice of the disconnection, so the request is ended here.
            for end in caller.on_end:
                end()
            share.free()
            body_share.free()
            CALLER.reset(token)
        return caller.logged

    def _key(self, header: bytes) -> bytes:
        """Return the caller's key. The comparison takes the same time for each key."""
        scheme, _, key = header.partition(b" ")
        key = key.strip() if scheme.lower() == b"bearer" else b""
        is_known = not self._keys
        for known_key in self._keys:
            is_known |= hmac.compare_digest(key, known_key)
        if not is_known:
            raise _Refused(401, "the key is missing or wrong: send it as `Authorization: Bearer KEY`", "bad_key")
        return key

    async def _read_body(self, headers: Mapping[bytes, bytes], receive: Any, body_share: Share) -> bytes:
        """Return the whole body. Up to a limit, one that is too large is read and dropped, so that its sender can read
        the answer.
        """  # noqa: D205
        length, body, num_read, has_more = headers.get(b"content-length", b""), bytearray(), 0, True
        max_bytes, max_dropped_bytes = self._max_body_bytes, _DROPPED * self._max_body_bytes
        try:
            async with asyncio.timeout(self._client_seconds):
                while (
                    has_more
                    and num_read <= max_dropped_bytes
                    and not (length.isdigit() and int(length) > max_dropped_bytes)
                ):
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    chunk = message.get("body", b"")
                    num_read += len(chunk)
                    has_more = message.get("more_body", False)
                    if num_read <= max_bytes:
                        body += chunk
                        body_share.grow(len(body))
        except BusyError as error:
            raise _Refused(429, str(error), "too_many_requests", closes=True) from None
        except TimeoutError:
            raise _Refused(
                408, f"the body did not come within {self._client_seconds:g} seconds", "too_slow", closes=True
            ) from None
        if has_more or num_read > max_bytes:
            raise _Refused(413, f"the body is larger than {max_bytes} bytes", "too_large", closes=True)
        return bytes(body)

    async def _run(self, scope: Any, body: bytes, receive: Any, send: Any) -> None:
        """Run the application until it has answered or its client has disconnected."""
        pending = [{"type": "http.request", "body": body, "more_body": False}]
        client_left = asyncio.Event()

        async def receive_again() -> Any:
            if pending:
                return pending.pop()
            await client_left.wait()
            return {"type": "http.disconnect"}

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            client_left.set()

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


def _request_id(client_id: bytes) -> str:
    """Return the id that a client gave its request, or a fresh one."""
    text = client_id.decode("latin-1")
    is_id = 0 < len(text) <= _MOST_ID_CHARS and text.isascii() and text.isprintable() and " " not in text
    return text if is_id else uuid.uuid4().hex


async def _refuse(send: Any, refusal: _Refused) -> None:
    kind = "rate_limit_error" if refusal.status == 429 else "invalid_request_error"
    body = json.dumps(error_body(refusal.message, kind, refusal.code)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal.status == 429:
        headers.append((b"retry-after", b"1"))
    if refusal.closes:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
