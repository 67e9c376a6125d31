"""Connections that no client can hold for ever: their number and the time that they wait for a client are bounded."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

_SPARE_FILES = 16
"""File descriptors that connections leave free."""


class ClientTooSlowError(ConnectionError):
    """A client does not read what is sent to it."""


class Connections:
    """The open connections of a server.

    Invariant: at most ``max_connections`` are open; ``_waiting`` holds those that wait for their clients, the one that
    has waited for longest first. Those that wait for a request have a timer; the application limits the time of a body.

    Attributes:
        client_seconds: How long a connection may be idle, or its client may not read.
    """

    def __init__(self, *, max_connections: int, client_seconds: float) -> None:
        """Start with none; there are never more than the process can have file descriptors."""
        self.client_seconds = client_seconds
        self._max_connections = min(max_connections, _free_descriptors())
        self._open: set[Connection] = set()
        self._waiting: dict[Connection, asyncio.TimerHandle | None] = {}

    def make(self, **arguments: Any) -> Connection:
        """Return a connection; uvicorn calls this for each one that it accepts."""
        return Connection(self, **arguments)

    def opened(self, connection: Connection) -> None:
        """Record a connection. If there are too many, the one that has waited for its client for longest is closed."""
        if len(self._open) >= self._max_connections:
            if not self._waiting:
                connection.transport.abort()
                return
            oldest = next(iter(self._waiting))
            self.closed(oldest)  # its transport is closed in the next turn of the event loop
            oldest.transport.abort()
        self._open.add(connection)
        self.idle(connection)

    def idle(self, connection: Connection) -> None:
        """Record that a connection has no running request."""
        if connection in self._open:
            loop = asyncio.get_running_loop()
            self._waiting[connection] = loop.call_later(self.client_seconds, connection.transport.abort)

    def receiving(self, connection: Connection) -> None:
        """Record that a connection has a request whose body may not be there yet."""
        self.busy(connection)
        if connection in self._open:
            self._waiting[connection] = None

    def busy(self, connection: Connection) -> None:
        """Record that a connection has a whole request."""
        timer = self._waiting.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def closed(self, connection: Connection) -> None:
        """Record that a connection is closed."""
        self.busy(connection)
        self._open.discard(connection)

    def abort(self) -> None:
        """Close all connections at once, unsent bytes or not."""
        for connection in list(self._open):
            connection.transport.abort()


class Connection(H11Protocol):
    """One connection. Only methods of ``asyncio.Protocol`` and the application are replaced."""

    def __init__(self, connections: Connections, **arguments: Any) -> None:
        """Take uvicorn's arguments."""
        super().__init__(**arguments)
        self._connections = connections
        self._application: Callable[..., Awaitable[None]] = self.app
        self.app = self._run

    def connection_made(self, transport: Any) -> None:
        """Count the connection."""
        super().connection_made(transport)
        self._connections.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count the connection no longer."""
        self._connections.closed(self)
        super().connection_lost(exc)

    async def _run(self, scope: Any, receive: Any, send: Any) -> None:
        """Run the application for one request."""

        async def receive_and_record() -> Any:
            message = await receive()
            if not message.get("more_body", False):
                self._connections.busy(self)
            return message

        async def send_in_time(message: Any) -> None:
            try:
                async with asyncio.timeout(self._connections.client_seconds):
                    await send(message)
            except TimeoutError:
                self.transport.abort()
                raise ClientTooSlowError("the client does not read its answer") from None

        self._connections.receiving(self)
        try:
            with suppress(ClientTooSlowError):
                await self._application(scope, receive_and_record, send_in_time)
        finally:
            self._connections.idle(self)


def _free_descriptors() -> int:
    """Let this process have as many file descriptors as it may, and return how many connections can be open."""
    try:
        import resource
    except ImportError:  # no such limit on this system
        return 1 << 20
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft < hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 20), hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = Path("/proc/self/fd")
    num_open = len(os.listdir(descriptors)) if descriptors.is_dir() else 64
    return max(1, soft - num_open - _SPARE_FILES)
