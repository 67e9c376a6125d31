"""A connection to a server that sends commands in one piece, and ends at a deadline whatever the server does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import valkey
from valkey.exceptions import AuthenticationError, BusyLoadingError, NoPermissionError, OutOfMemoryError, ResponseError

from kvframe.contract.errors import KVFrameError, shorten

Command: TypeAlias = tuple["str | bytes | int | memoryview", ...]
Reply: TypeAlias = "int | bytes | ResponseError | None"
"""What a server answers to one command; an error belongs to that command only."""

READ_BYTES = 2**18
"""The most bytes that are taken from the socket at once."""


Connection: TypeAlias = Any
"""A connection of the client, over TCP, TLS or a Unix socket; its methods have no types."""


class ServerError(KVFrameError):
    """A server cannot be used now, and why, in one sentence without a secret."""


class Link:
    """A connection to a server, made when it is needed, and made again after it failed.

    Invariant: no reply of an earlier call is left in a connection that is used. A connection that failed is closed.
    """

    def __init__(self, connect: Callable[..., Connection], address: str, timeout: float) -> None:
        """Connect to nothing yet.

        Args:
            connect: Makes a connection of the client, without opening it; it takes further options.
            address: What errors call the server.
            timeout: The most seconds of a call, and of opening a connection to one IP address.
        """
        self._address = address
        self._timeout = timeout
        self._deadline = 0.0
        self._connection = connect(
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            socket_read_size=READ_BYTES,
            # A name in the server's list of clients takes two more answers, and permissions.
            lib_name=None,
            lib_version=None,
            valkey_connect_func=self._begin,
        )
        self._is_open = False

    def call(self, commands: Sequence[Command]) -> list[Reply]:
        """Send commands in one piece, and return their replies.

        Raises:
            ServerError: The server does not answer, refuses the user, or speaks another protocol.
        """
        self._deadline = time.monotonic() + self._timeout
        try:
            try:
                return self._exchange(commands)
            except valkey.ConnectionError as error:
                # Servers close connections that are not used for long, and all when they are restarted.
                if type(error) is not valkey.ConnectionError or not self._was_open:
                    raise
            return self._exchange(commands)
        except Exception as error:
            raise ServerError(self._sentence(error)) from error

    def refuse(self, error: ResponseError) -> ServerError:
        """Return the error to raise for a command's reply."""
        return ServerError(self._sentence(error))

    def close(self) -> None:
        """Close the connection; a later call opens another one."""
        self._is_open = False
        self._connection.disconnect()

    def _exchange(self, commands: Sequence[Command]) -> list[Reply]:
        self._was_open, self._is_open = self._is_open, False
        try:
            self._connection.connect()
            self._connection.send_packed_command(self._connection.pack_commands(commands))
            replies = [self._read_reply() for _ in commands]
        except BaseException:
            self._connection.disconnect()
            raise
        self._is_open = True
        return replies

    def _read_reply(self) -> Reply:
        try:
            reply: Reply = self._connection.read_response(disable_decoding=True)
        except ResponseError as error:
            return error
        return reply

    def _begin(self, connection: Any) -> None:
        """Called by the client when a socket is open: let its calls end at the deadline, and authenticate."""
        connection._sock = TimedSocket(connection._sock, self._seconds_left)
        connection.on_connect()

    def _seconds_left(self) -> float:
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the deadline has passed")
        return seconds

    def _sentence(self, error: Exception) -> str:
        reason = shorten("".join(each if each.isprintable() else " " for each in str(error)).strip())
        if isinstance(error, valkey.TimeoutError | TimeoutError):
            return f"{self._address} did not answer within {self._timeout:g} s"
        if isinstance(error, AuthenticationError):
            return f"{self._address} refuses the user or the password: {reason}"
        if isinstance(error, NoPermissionError):
            return f"{self._address} does not permit a command of the store: {reason}"
        if isinstance(error, OutOfMemoryError):
            return f"{self._address} is full: {reason}; maxmemory-policy allkeys-lru would evict old records"
        if isinstance(error, BusyLoadingError):
            return f"{self._address} is starting: {reason}"
        if isinstance(error, valkey.ConnectionError):
            return f"{self._address} cannot be reached: {reason}"
        if isinstance(error, ResponseError):
            return f"{self._address} refuses a command of the store: {reason}"
        return f"{self._address} does not answer as a Valkey or Redis server does: {reason}"


class TimedSocket:
    """An open socket, whose calls together take no longer than the seconds that are left.

    A timeout of a socket is one of each call: without this class, a server that sends a byte a second never times out.
    """

    def __init__(self, socket: Any, seconds_left: Callable[[], float]) -> None:
        self._socket = socket
        self._seconds_left = seconds_left

    def recv(self, size: int) -> bytes:
        """Return the bytes that arrive next."""
        self._socket.settimeout(self._seconds_left())
        data: bytes = self._socket.recv(size)
        return data

    def recv_into(self, buffer: Any) -> int:
        """Copy the bytes that arrive next."""
        self._socket.settimeout(self._seconds_left())
        size: int = self._socket.recv_into(buffer)
        return size

    def sendall(self, data: Any) -> None:
        """Send all bytes."""
        self._socket.settimeout(self._seconds_left())
        self._socket.sendall(data)

    def settimeout(self, timeout: float | None) -> None:
        """Do nothing: each call sets its own timeout."""

    def shutdown(self, how: int) -> None:
        """End the connection."""
        self._socket.shutdown(how)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
