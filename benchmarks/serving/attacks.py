"""Hostile clients of an HTTP server: what each of their connections sends, and whether it reads."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

import attrs

HOSTILE_KEY, FRIENDLY_KEY = "hostile", "friendly"


def request(body: Mapping[str, Any] | bytes, path: str = "/v1/completions") -> bytes:
    """Return an HTTP request with a body."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {HOSTILE_KEY}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    ).encode() + content


LONG_ANSWER = {"prompt": "x", "max_tokens": 480, "ignore_eos": True, "temperature": 1, "stream": True}
CHAT = "/v1/chat/completions"


def _chat(**message: Any) -> bytes:
    return request({"messages": [message]}, CHAT)


def _nested(depth: int) -> dict[str, Any]:
    return {"name": "f", "arguments": "[" * depth}


@attrs.frozen(kw_only=True)
class Attack:
    """Connections that are opened together.

    Attributes:
        what: What they do, in words.
        connections: How many there are.
        data: Returns what a connection sends, given its index.
        reads: Whether it reads what the server sends.
        resets: Whether it resets the connection after the first byte of the answer.
    """

    what: str
    connections: int
    data: Callable[[int], bytes]
    reads: bool = True
    resets: bool = False


ATTACKS: Mapping[str, Attack] = {
    "silent": Attack(what="send nothing", connections=300, data=lambda _: b""),
    "half a head": Attack(
        what="send half of the headers", connections=300, data=lambda _: request(b"")[: len(request(b"")) // 2]
    ),
    "half a body": Attack(
        what="send half of a body", connections=300, data=lambda _: request(b'{"prompt": "a"}' + b" " * 99)[:-50]
    ),
    "noise": Attack(what="send random bytes", connections=300, data=lambda index: random.Random(index).randbytes(4096)),
    "deep": Attack(what="send 1,000,000 brackets as the body", connections=100, data=lambda _: request(b"[" * 10**6)),
    "nested call": Attack(
        what="send a call whose arguments are 100,000 brackets",
        connections=100,
        data=lambda _: _chat(
            role="assistant", tool_calls=[{"id": "c", "type": "function", "function": _nested(100_000)}]
        ),
    ),
    "long prompt": Attack(
        what="send a prompt of 4,000,000 bytes", connections=40, data=lambda _: request({"prompt": "a" * 4_000_000})
    ),
    "many messages": Attack(
        what="send a chat of 100,000 messages",
        connections=20,
        data=lambda _: request({"messages": [{"role": "user", "content": "x"}] * 100_000}, CHAT),
    ),
    "resets": Attack(
        what="ask for a stream of 480 tokens, reset at the first byte",
        connections=300,
        data=lambda _: request(LONG_ANSWER),
        resets=True,
    ),
    "takes all": Attack(
        what="ask for 128 samples of 480 tokens, and read them",
        connections=8,
        data=lambda _: request({**LONG_ANSWER, "n": 128}),
    ),
    "unread": Attack(
        what="ask for 16 samples of 480 tokens with 20 log-probabilities each, read nothing",
        connections=200,
        data=lambda _: request({**LONG_ANSWER, "n": 16, "logprobs": 20}),
        reads=False,
    ),
}


@attrs.frozen(kw_only=True)
class Connected:
    """What became of one connection: the bytes that it sent, and the status of its answer, if it read one."""

    num_bytes: int
    status: str


async def attack(port: int, attack: Attack, index: int, gone: asyncio.Event) -> Connected:
    """Open one of an attack's connections; return when the server has closed it.

    Args:
        port: The server's port.
        attack: What the connection does.
        index: Which of its connections this is.
        gone: Set when the server holds nothing of the attack any more: a client that does not read cannot see it.
    """
    data = attack.data(index)
    connection = socket.socket()
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12 if not attack.reads else 1 << 17)
    loop = asyncio.get_running_loop()
    answer = b""
    try:
        await loop.sock_connect(connection, ("127.0.0.1", port))
        await loop.sock_sendall(connection, data)
        if not attack.reads:
            await gone.wait()
        while part := await loop.sock_recv(connection, 1 << 16):
            answer = answer or part
            if attack.resets:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                break
        status = answer.split(b" ", 2)[1].decode() if answer.startswith(b"HTTP") else "closed"
    except OSError:
        status = answer.split(b" ", 2)[1].decode() if answer.startswith(b"HTTP") else "reset"
    finally:
        connection.close()
    return Connected(num_bytes=len(data), status=status)
