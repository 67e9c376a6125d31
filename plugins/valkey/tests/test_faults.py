"""Servers that are unreachable, slow, stopped, restarted, full, or no servers at all: quick errors, and later hits."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest
from kvframe_valkey.link import ServerError
from kvframe_valkey.store import ValkeyStore

from kvframe.contract import OpenPageStore
from tests.support.ports import free_port
from tests.support.store_server import StoreServer

ORIGIN, KEY, OTHER = "0123456789abcdef" * 2, bytes(32), b"\x01" * 32
LIMIT = 0.5
ENDLESS = 60
"""Seconds after which a call is said not to end."""


@pytest.fixture
def store(own_server: StoreServer) -> Iterator[OpenPageStore]:
    """Return a store that waits as long as a busy machine may need."""
    with closing(ValkeyStore(url=own_server.url, timeout=60).open(ORIGIN)) as opened:
        yield opened


@contextmanager
def impatient(server: StoreServer, port: int | None = None) -> Iterator[OpenPageStore]:
    """Return a store that waits for a short time only."""
    url = server.url if port is None else f"valkey://127.0.0.1:{port}"
    with closing(ValkeyStore(url=url, timeout=LIMIT).open(ORIGIN)) as opened:
        yield opened


def read(store: OpenPageStore, size: int, key: bytes = KEY) -> bytes | None:
    buffer = bytearray(size)
    return bytes(buffer) if store.read([key], [memoryview(buffer)])[0] else None


def write(store: OpenPageStore, record: bytes, key: bytes = KEY) -> int:
    return store.write([key], [memoryview(record)])


def failure_of(call: Callable[[], Any]) -> str:
    """Return the error of a call that ends."""
    failures: list[str] = []

    def run() -> None:
        try:
            call()
        except ServerError as error:
            failures.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(ENDLESS)
    assert not thread.is_alive()
    (failure,) = failures
    return failure


CALLS: dict[str, Callable[[OpenPageStore], Any]] = {
    "find": lambda store: store.find([KEY]),
    "read": lambda store: read(store, 4),
    "write": lambda store: write(store, b"page"),
    "forget": lambda store: store.forget([KEY]),
}


def test_an_unreachable_server_is_an_error_in_one_sentence() -> None:
    port = free_port()
    with pytest.raises(ServerError, match=rf"^valkey://127.0.0.1:{port} cannot be reached: .*Connection refused"):
        ValkeyStore(url=f"valkey://127.0.0.1:{port}").open(ORIGIN)
    with pytest.raises(ServerError, match=r"^unix:///not/there cannot be reached: .*No such file or directory"):
        ValkeyStore(url="unix:///not/there").open(ORIGIN)
    with pytest.raises(ServerError, match=r"^valkey://no.such.host.invalid:6379 cannot be reached: "):
        ValkeyStore(url="valkey://no.such.host.invalid").open(ORIGIN)


def test_a_server_that_is_restarted_between_calls_costs_records_and_no_error(
    store: OpenPageStore, own_server: StoreServer
) -> None:
    write(store, b"page")
    own_server.stop()
    own_server.start()
    assert [False] == store.find([KEY])
    assert 1 == write(store, b"page")
    assert b"page" == read(store, 4)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_fails_while_the_server_is_down_and_works_when_it_is_back(
    name: str, store: OpenPageStore, own_server: StoreServer
) -> None:
    own_server.stop()
    for _ in range(2):
        with pytest.raises(ServerError, match=r"cannot be reached: .*Connection refused"):
            CALLS[name](store)
    own_server.start()
    CALLS[name](store)


@pytest.mark.parametrize("name", CALLS)
def test_a_connection_that_the_server_closed_is_opened_again(
    name: str, store: OpenPageStore, own_server: StoreServer
) -> None:
    write(store, b"page")
    with own_server.client() as client:
        client.client_kill_filter(_type="normal", skipme=True)
    assert {"find": [True], "read": b"page", "write": 1, "forget": None}[name] == CALLS[name](store)


@pytest.mark.parametrize("name", CALLS)
def test_a_stopped_server_ends_a_call_within_the_timeout(name: str, own_server: StoreServer) -> None:
    with impatient(own_server) as store:
        own_server.pause()
        assert f"{own_server.url} did not answer within 0.5 s" == failure_of(lambda: CALLS[name](store))
        own_server.resume()
        answer_of_a_busy_machine(lambda: CALLS[name](store))


def answer_of_a_busy_machine(call: Callable[[], Any]) -> Any:
    """Return what a call returns when it does not fail, as an engine asks again."""
    for _ in range(100):
        with suppress(ServerError):
            return call()
    return call()


def test_a_stopped_server_cannot_be_connected(own_server: StoreServer) -> None:
    own_server.pause()
    store = ValkeyStore(url=own_server.url, timeout=LIMIT)
    assert f"{own_server.url} did not answer within 0.5 s" == failure_of(lambda: store.open(ORIGIN))


@pytest.mark.parametrize("name", ["read", "write", "forget"])
def test_a_server_that_pauses_its_clients_ends_a_call_within_the_timeout(name: str, own_server: StoreServer) -> None:
    with impatient(own_server) as store, own_server.client() as client:
        # Commands that write; reading a record writes its time to live.
        client.client_pause(60_000, all=False)
        assert f"{own_server.url} did not answer within 0.5 s" == failure_of(lambda: CALLS[name](store))
        client.client_unpause()
        answer_of_a_busy_machine(lambda: CALLS[name](store))


def test_a_call_that_is_interrupted_leaves_no_reply_for_the_next_one(
    store: OpenPageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, b"page")
    connection = store._link._connection  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:

        def interrupt(**options: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(connection, "read_response", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.find([OTHER])
    assert b"page" == read(store, 4)


# --- a network between the store and the server -----------------------------------------------------------------------


@contextmanager
def network(server: StoreServer, answer: Callable[[socket.socket, bytes], None]) -> Iterator[int]:
    """Yield a port that leads to a server; ``answer`` passes on what the server sends to the store's socket."""
    listener = socket.create_server(("127.0.0.1", 0))
    sockets = [listener]

    def forward(source: socket.socket, send: Callable[[bytes], None]) -> None:
        with suppress(OSError):
            while data := source.recv(2**16):
                send(data)

    def accept() -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                sockets.append(near)
                try:
                    far = socket.create_connection(("127.0.0.1", server.port))
                except ConnectionRefusedError:
                    near.shutdown(socket.SHUT_RDWR)
                    continue
                sockets.append(far)
                for source, send in ((near, far.sendall), (far, lambda data, near=near: answer(near, data))):
                    threading.Thread(target=forward, args=(source, send), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        for client in sockets:
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
            client.close()


def test_a_server_that_sends_a_few_bytes_at_a_time_ends_a_read_within_the_timeout(
    store: OpenPageStore, own_server: StoreServer
) -> None:
    write(store, os.urandom(10_000))

    def trickle(near: socket.socket, data: bytes) -> None:
        for index, byte in enumerate(data):
            near.sendall(bytes([byte]))
            # The answers to what opens the store are shorter.
            if index > 20:
                threading.Event().wait(LIMIT / 10)

    with network(own_server, trickle) as port, impatient(own_server, port) as slow:
        assert failure_of(lambda: read(slow, 10_000)).endswith("did not answer within 0.5 s")


def test_a_server_that_is_killed_in_the_middle_of_a_read_costs_the_record(
    store: OpenPageStore, own_server: StoreServer
) -> None:
    record = os.urandom(4 * 2**20)
    write(store, record)
    num_bytes = 0

    def kill_in_the_middle(near: socket.socket, data: bytes) -> None:
        nonlocal num_bytes
        near.sendall(data)
        num_bytes += len(data)
        if num_bytes > len(record) // 2:
            own_server.stop()
            near.shutdown(socket.SHUT_RDWR)

    with network(own_server, kill_in_the_middle) as port:
        reader = ValkeyStore(url=f"valkey://127.0.0.1:{port}", timeout=60).open(ORIGIN)
        with closing(reader), pytest.raises(ServerError, match="cannot be reached"):
            read(reader, len(record))
        assert len(record) // 2 < num_bytes < len(record)
    own_server.start()
    assert [False] == store.find([KEY])
    assert 1 == write(store, record)
    assert record == read(store, len(record))


def test_a_connection_that_is_cut_in_the_middle_of_a_read_is_opened_again_and_all_is_read(
    store: OpenPageStore, own_server: StoreServer
) -> None:
    records = [os.urandom(2**20), os.urandom(2**20)]
    store.write([KEY, OTHER], [memoryview(record) for record in records])
    num_cuts = num_bytes = 0

    def cut_once(near: socket.socket, data: bytes) -> None:
        nonlocal num_cuts, num_bytes
        near.sendall(data)
        num_bytes += len(data)
        if num_bytes > 1.5 * 2**20 and num_cuts == 0:
            num_cuts = 1
            near.shutdown(socket.SHUT_RDWR)

    with network(own_server, cut_once) as port:
        reader = ValkeyStore(url=f"valkey://127.0.0.1:{port}", timeout=60).open(ORIGIN)
        buffers = [bytearray(2**20), bytearray(2**20)]
        with closing(reader):
            assert [True, True] == reader.read([KEY, OTHER], [memoryview(buffer) for buffer in buffers])
    assert (1, records) == (num_cuts, buffers)


WRITER = """
import sys
from kvframe_valkey.store import ValkeyStore
store = ValkeyStore(url=sys.argv[1], timeout=60).open(sys.argv[2])
for first in range(0, 2**16, 8):
    keys = [index.to_bytes(32, "big") for index in range(first, first + 8)]
    store.write(keys, [memoryview(key * 2**13) for key in keys])
    print(first, flush=True)
"""


@pytest.mark.parametrize("num_batches", [1, 2, 3, 5, 8])
def test_a_writer_that_is_killed_leaves_whole_records_only(
    num_batches: int, store: OpenPageStore, own_server: StoreServer
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", WRITER, own_server.url, ORIGIN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as writer:
        assert writer.stdout is not None
        for _ in range(num_batches):
            writer.stdout.readline()
        writer.kill()
        num_written = 8 * (num_batches + len(writer.stdout.readlines()))
    with own_server.client() as client:
        # The server has taken all that the writer sent when it has closed its connection.
        for _ in range(1000):
            if len(client.client_list(_type="normal")) == 2:
                break
            threading.Event().wait(0.02)
        assert 2 == len(client.client_list(_type="normal"))
    keys = [index.to_bytes(32, "big") for index in range(num_written + 16)]
    records = [read(store, 2**18, key) for key in keys]
    assert [key * 2**13 for key in keys[:num_written]] == records[:num_written]
    assert all(record in (None, key * 2**13) for key, record in zip(keys, records, strict=True))
    assert [record is not None for record in records] == store.find(keys)


# --- a full server, and one that takes no records ---------------------------------------------------------------------


def limit_memory(server: StoreServer, num_bytes: int, policy: str) -> None:
    with server.client() as client:
        used_memory = client.info("memory")["used_memory"]
        client.config_set("maxmemory-policy", policy)
        client.config_set("maxmemory", used_memory + num_bytes)


def test_a_full_server_refuses_records_with_a_sentence_and_serves_those_it_has(
    store: OpenPageStore, own_server: StoreServer
) -> None:
    limit_memory(own_server, 4 * 2**20, "noeviction")
    keys = [bytes([index]) * 32 for index in range(16)]
    record = os.urandom(2**20)
    with pytest.raises(ServerError, match=rf"^{own_server.url} is full: .*'maxmemory'.*allkeys-lru would evict"):
        store.write(keys, [memoryview(record)] * 16)
    are_found = store.find(keys)
    assert 0 < sum(are_found) < 16
    assert record == read(store, 2**20, keys[are_found.index(True)])
    store.forget(keys)
    assert 1 == write(store, b"page")


def test_a_full_server_that_evicts_keeps_the_newest_records(store: OpenPageStore, own_server: StoreServer) -> None:
    limit_memory(own_server, 6 * 2**20, "allkeys-lru")
    keys = [bytes([index]) * 32 for index in range(32)]
    for key in keys:
        assert 1 == write(store, os.urandom(2**20), key)
    assert sum(store.find(keys)) < 16
    assert [True] == store.find(keys[-1:])


def test_a_replica_refuses_records_with_a_sentence(store: OpenPageStore, own_server: StoreServer) -> None:
    write(store, b"page")
    with own_server.client() as client:
        client.replicaof("127.0.0.1", str(free_port()))
    with pytest.raises(ServerError, match="refuses a command of the store: You can't write against a read only"):
        write(store, b"page")
    assert [True] == store.find([KEY])


# --- not a server -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not answer as a Valkey or Redis server does"),
        (b":not a number\r\n", "does not answer as a Valkey or Redis server does"),
        (b"*1\r\n" * 100_000, "does not answer as a Valkey or Redis server does"),
        (b"-UNKNOWN \x1b[2J" + b"x" * 10_000 + b"\r\n", "refuses a command of the store: UNKNOWN  [2J"),
        (b"-LOADING Redis is loading the dataset in memory\r\n", "is starting: Redis is loading"),
        (b"$5\r\nab", "cannot be reached"),
        (b"", "cannot be reached"),
    ],
)
def test_a_listener_that_is_no_such_server_is_an_error(answer: bytes, reason: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            near, _ = listener.accept()
            with near, suppress(OSError):
                near.recv(2**16)
                near.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(ServerError) as failure:
            ValkeyStore(url=f"valkey://127.0.0.1:{listener.getsockname()[1]}", timeout=30).open(ORIGIN)
        thread.join()
    assert reason in str(failure.value)
    assert len(str(failure.value)) < 400
    assert str(failure.value).isprintable()
