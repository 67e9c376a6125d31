"""A real server for each test file, and one that a test starts with options of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.store_server import MISSING, PROGRAM, StoreServer

Start = Callable[..., StoreServer]


@pytest.fixture(scope="session")
def start_server() -> Iterator[Start]:
    """Return a function that starts a server by ``StoreServer``'s options; all end with the session."""
    if PROGRAM is None:
        pytest.skip(MISSING)
    with ExitStack() as servers:

        def start(*options: str, **settings: Any) -> StoreServer:
            # A path of pytest's may be too long for a socket.
            folder = Path(tempfile.mkdtemp(prefix="kvframe-"))
            servers.callback(shutil.rmtree, folder, ignore_errors=True)
            return servers.enter_context(StoreServer(folder, *options, **settings))

        yield start


@pytest.fixture(scope="session")
def shared_server(start_server: Start) -> StoreServer:
    """Return a server without a password, for tests that do not change it."""
    return start_server()


@pytest.fixture
def server(shared_server: StoreServer) -> StoreServer:
    """Return the shared server, empty."""
    with shared_server.client() as client:
        client.flushall()
    return shared_server


@pytest.fixture
def own_server(start_server: Start) -> Iterator[StoreServer]:
    """Return a server that the test may stop, pause and fill."""
    server = start_server()
    yield server
    server.stop()
