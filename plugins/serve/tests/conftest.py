"""A tiny model with a tokenizer and a chat template, and a real server for it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from kvframe_serve.server import Server

from kvframe import Stack
from tests.support.models import save_byte_model
from tests.support.waiting import eventually

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('roles are system, user and assistant') }}{% endif %}"
    "{{ message['role'][0] + ':' + message['content'] + ';' }}{% endfor %}a:{% if loud %}!{% endif %}"
)
CACHE: dict[str, dict[str, Any]] = {"cache": {"memory": "4MiB"}, "limits": {"max_num_batched_tokens": 256}}
STACK = Stack.from_mapping(CACHE)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    save_byte_model(folder, chat_template=TEMPLATE)
    return folder


class Running:
    """A server in a thread with an event loop of its own, and clients for it."""

    def __init__(self, server: Server, grace: float = 0.0) -> None:
        """Start to serve on a free port."""
        self.server = server
        self._clients: list[openai.OpenAI] = []
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=lambda: asyncio.run(server.run(listener, grace=grace)), daemon=True)
        self._thread.start()
        eventually(lambda: self._accepts())

    def _accepts(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port)).close()
        except ConnectionRefusedError:
            return False
        return True

    def client(self, key: str = "any", **options: Any) -> openai.OpenAI:
        """Return a client that retries nothing; it is closed with the server."""
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, **options)
        self._clients.append(client)
        return client

    def close(self) -> None:
        """End the server and close its clients: a connection that an error holds is not closed by itself."""
        for client in self._clients:
            client.close()
        self.server.stop()
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def client(checkpoint: Path) -> Iterator[openai.OpenAI]:
    """Return a client of a server without options, which the tests of a file share."""
    running = Running(Server(checkpoint, stack=STACK))
    yield running.client()
    running.close()


@pytest.fixture
def serve(checkpoint: Path) -> Iterator[Callable[..., Running]]:
    """Return a function that starts a server."""
    with ExitStack() as running:

        def start(
            limits: dict[str, Any] | None = None,
            path: Path = checkpoint,
            engine: dict[str, Any] | None = None,
            cache: dict[str, Any] | None = None,
            **options: Any,
        ) -> Running:
            tables = {
                **CACHE,
                **({"cache": cache} if cache else {}),
                "engine": engine or {},
                "plugin": {"serve": limits or {}},
            }
            stack = Stack.from_mapping(tables)
            started = Running(Server(path, stack=stack, **options))
            running.callback(started.close)
            return started

        yield start
