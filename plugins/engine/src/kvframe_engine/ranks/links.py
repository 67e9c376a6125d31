"""The connections between rank 0 and every other rank, which carry values and show when a rank ends or stops.

The operating system closes a process's connections when the process ends, even if it was killed. One thread per
connection receives, so it finds at once that a rank has ended, also while the main thread waits for that rank in a
collective operation. A process that is stopped keeps its connections open. Each end therefore sends a beat every
``BEAT_SECONDS``, and counts as lost if the other end receives nothing for ``MAX_SILENT_BEATS`` beats.
"""

from __future__ import annotations

import hmac
import os
import pickle
import selectors
import socket
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import attrs

from kvframe.contract.errors import listed
from kvframe.contract.foreign import safe_reason
from kvframe_engine.contract.errors import EngineError

RANK_FAILED_EXIT_CODE = 71
"""Exit code of a process that ends because another rank failed; ``EX_OSERR`` of sysexits.h."""

END = ("end", ())
"""Rank 0's last command: the engine was closed."""

BEAT_SECONDS = 2.0
"""The time between two beats of a connection."""

MAX_SILENT_BEATS = 15
"""The beats without any message after which the other process counts as lost. They are counted one by one: if all
processes are stopped together and continue later, none has missed more than one."""

_LENGTH = struct.Struct("!Q")
_BEAT = _LENGTH.pack(0)
_KEEPALIVE = (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 5))
_SECRET_BYTES = 16
_CONNECTING_SECONDS = 60


@attrs.frozen
class Failure:
    """A rank's message that it failed.

    Attributes:
        sentence: Why, in one sentence.
    """

    sentence: str


@attrs.frozen
class Aside:
    """A value for a thread that waits for page stores, while the main thread computes steps.

    Attributes:
        value: The value.
    """

    value: Any


class _LostError(Exception):
    """The other process is there, but no value can be read from it; the message is the reason."""


class Link:
    """One connection. Any thread may send; a thread of the link receives, and another sends the beats.

    Attributes:
        values: The values that were received and not taken yet, in order.
        asides: The values of ``Aside`` that were received and not taken yet, in order; in the end None.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        on_failure: Callable[[str], None],
        on_lost: Callable[[str | None], None],
    ) -> None:
        """Start to receive.

        Args:
            connection: A connected socket.
            on_failure: Called by the link's thread with the sentence of a rank that failed.
            on_lost: Called by the link's thread when nothing more can be received. It is called with the reason: the
                other process was killed, was silent for too long, or sent a message that cannot be read; or with None
                if the other process said that it ends.
        """
        self.values: SimpleQueue[Any] = SimpleQueue()
        self.asides: SimpleQueue[Any] = SimpleQueue()
        self._connection = connection
        self._on_failure, self._on_lost = on_failure, on_lost
        self._said_end = False
        self._sending, self._is_closed = threading.Lock(), threading.Event()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # If a machine is lost, no one closes its connections.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        threading.Thread(target=self._receive, name="kvframe-link", daemon=True).start()
        threading.Thread(target=self._beat, name="kvframe-beat", daemon=True).start()

    def send(self, message: bytes) -> None:
        """Send what ``packed`` returned; raise ``OSError`` if the other process has ended."""
        with self._sending:
            self._connection.sendall(message)

    def try_send(self, message: bytes) -> None:
        """Send a short message if that is possible without waiting; for a process that ends at once."""
        if self._sending.acquire(blocking=False):
            with suppress(OSError):
                self._connection.send(message, socket.MSG_DONTWAIT)
            self._sending.release()

    def close(self) -> None:
        """Close the connection. What was sent still arrives."""
        self._is_closed.set()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _receive(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                while True:
                    (length,) = _LENGTH.unpack(_read(self._connection, _LENGTH.size, selector))
                    if length:
                        self._take(_read(self._connection, length, selector))
        except _LostError as error:
            self._lose(str(error))
        except (OSError, ValueError):  # ValueError: this process has closed the connection
            self._lose("its process was killed or its machine was lost")

    def _lose(self, reason: str) -> None:
        self.asides.put(None)
        self._on_lost(None if self._said_end else reason)
        self._connection.close()

    def _take(self, message: bytes) -> None:
        try:
            value = pickle.loads(message)
        except Exception as error:
            raise _LostError(
                f"its message cannot be read ({safe_reason(error)}); install the same packages on all machines"
            ) from error
        self._said_end = isinstance(value, Failure) or value == END
        if isinstance(value, Failure):
            self._on_failure(value.sentence)
        elif isinstance(value, Aside):
            self.asides.put(value.value)
        else:
            self.values.put(value)

    def _beat(self) -> None:
        with suppress(OSError):
            while not self._is_closed.wait(BEAT_SECONDS):
                self.send(_BEAT)


def packed(value: Any) -> bytes:
    """Return a value as it is sent."""
    content = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(content)) + content


def _read(connection: socket.socket, num_bytes: int, selector: selectors.BaseSelector | None = None) -> bytes:
    """Return the next bytes of a connection.

    Args:
        connection: The connection.
        num_bytes: How many.
        selector: Waits for the connection; without it, the connection's own timeout holds.

    Raises:
        OSError: The connection ends before them.
        _LostError: Nothing comes for too long.
    """
    content = bytearray()
    while len(content) < num_bytes:
        if selector is not None and not any(selector.select(BEAT_SECONDS) for _ in range(MAX_SILENT_BEATS)):
            raise _LostError(
                f"nothing was heard from it for {BEAT_SECONDS * MAX_SILENT_BEATS:.0f} seconds, so its process is "
                "stopped or its machine hangs"
            )
        part = connection.recv(min(num_bytes - len(content), 1 << 20))
        if not part:
            raise ConnectionError("the other process closed the connection")
        content += part
    return bytes(content)


def end_process(sentence: str | None) -> None:
    """End this process at once, from any thread: the main thread may wait for a rank that is gone.

    Args:
        sentence: The sentence that is printed on stderr; None if another rank prints it.
    """
    if sentence is not None:
        with suppress(OSError, ValueError):
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"kvframe: error: {sentence}\n".encode())
    os._exit(RANK_FAILED_EXIT_CODE)


# --- who connects to whom ---------------------------------------------------------------------------------------------


def listen(num_ranks: int, host: str, secret: bytes, publish: Callable[[int], None]) -> dict[int, socket.socket]:
    """Return a connection to each of the other ranks; for rank 0.

    Pickled values are read from these connections, so each has to begin with the secret.

    Args:
        num_ranks: The number of ranks.
        host: The address to listen at; empty for all addresses.
        secret: ``[16]`` bytes that only the ranks know.
        publish: Called with the port when it is open.

    Raises:
        EngineError: A rank does not connect (``ranks``).
    """
    sockets: dict[int, socket.socket] = {}
    with socket.create_server((host, 0), backlog=num_ranks) as server:
        publish(server.getsockname()[1])
        server.settimeout(_CONNECTING_SECONDS)
        while len(sockets) < num_ranks - 1:
            try:
                connection, _ = server.accept()
            except TimeoutError as error:
                missing_ranks = [rank for rank in range(1, num_ranks) if rank not in sockets]
                raise EngineError(
                    f"of {num_ranks} ranks, {listed(map(str, missing_ranks))} did not connect to rank 0 within "
                    f"{_CONNECTING_SECONDS} seconds; start all ranks with the same command, and let their machines "
                    "reach rank 0's",
                    code="ranks",
                ) from error
            connection.settimeout(10)
            try:
                sent, rank = _read(connection, _SECRET_BYTES), _LENGTH.unpack(_read(connection, _LENGTH.size))[0]
            except OSError:
                connection.close()
                continue
            if not hmac.compare_digest(sent, secret) or not 0 < rank < num_ranks:
                connection.close()
                continue
            connection.settimeout(None)
            sockets[rank] = connection
    return dict(sorted(sockets.items()))


def connect(rank: int, host: str, port: int, secret: bytes) -> socket.socket:
    """Return a connection to rank 0; for the other ranks.

    Args:
        rank: The rank of this process.
        host: The address of rank 0.
        port: Its port.
        secret: As for ``listen``.
    """
    connection = socket.create_connection((host, port))
    connection.sendall(secret + _LENGTH.pack(rank))
    return connection
