"""Records in a real server: round trips, expiry, origins, what other clients store, many keys."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence

import pytest
from kvframe_valkey.records import BATCH_BYTES, BATCH_KEYS, batches
from kvframe_valkey.store import ValkeyStore

from kvframe.contract import OpenPageStore
from tests.support.store_server import StoreServer

ORIGIN, OTHER_ORIGIN = "0123456789abcdef" * 2, "fedcba9876543210" * 2
PREFIX = b"kvframe:1:" + ORIGIN.encode() + b":"


@pytest.fixture
def store(server: StoreServer) -> Iterator[OpenPageStore]:
    opened = ValkeyStore(url=server.url, expiry=100, timeout=60).open(ORIGIN)
    yield opened
    opened.close()


def make_keys(count: int) -> list[bytes]:
    return [index.to_bytes(4, "big") + b"\r\n$-1\r\n\x00\xff" + bytes(19) for index in range(count)]


def write(store: OpenPageStore, keys: Sequence[bytes], records: Sequence[bytes]) -> int:
    return store.write(keys, [memoryview(bytearray(record)) for record in records])


def read(store: OpenPageStore, keys: Sequence[bytes], sizes: Sequence[int]) -> list[bytes | None]:
    buffers = [bytearray(size) for size in sizes]
    are_read = store.read(keys, [memoryview(buffer) for buffer in buffers])
    return [bytes(buffer) if is_read else None for buffer, is_read in zip(buffers, are_read, strict=True)]


def test_what_is_written_is_found_and_read(store: OpenPageStore) -> None:
    keys = make_keys(4)
    records = [b"\r\n", os.urandom(5999), os.urandom(70_000)]
    assert 3 == write(store, keys[:3], records)
    assert [True, True, True, False] == store.find(keys)
    assert [*records, None] == read(store, keys, [2, 5999, 70_000, 8])


def test_no_keys_are_nothing(store: OpenPageStore) -> None:
    store.forget([])
    assert ([], [], 0) == (store.find([]), store.read([], []), store.write([], []))


def test_a_buffer_of_any_items_is_filled_by_bytes(store: OpenPageStore) -> None:
    (key,) = make_keys(1)
    record = os.urandom(64)
    assert 1 == store.write([key], [memoryview(bytearray(record)).cast("d", [2, 4])])
    buffer = bytearray(64)
    assert [True] == store.read([key], [memoryview(buffer).cast("f")])
    assert record == buffer


def test_a_record_that_is_written_again_is_one_of_both(store: OpenPageStore) -> None:
    (key,) = make_keys(1)
    write(store, [key], [b"first"])
    write(store, [key, key], [b"other", b"third"])
    assert [b"third", b"third"] == read(store, [key, key], [5, 5])


def test_a_forgotten_record_is_not_found(store: OpenPageStore) -> None:
    keys = make_keys(3)
    write(store, keys[:2], [b"a", b"b"])
    store.forget([keys[0], keys[2]])
    assert [False, True, False] == store.find(keys)


def test_records_of_other_origins_are_not_found(store: OpenPageStore, server: StoreServer) -> None:
    (key,) = make_keys(1)
    other = ValkeyStore(url=server.url, timeout=60).open(OTHER_ORIGIN)
    write(store, [key], [b"mine"])
    assert [False] == other.find([key])
    assert [None] == read(other, [key], [4])
    other.forget([key])
    write(other, [key], [b"else"])
    assert [b"mine"] == read(store, [key], [4])
    other.close()


def test_engines_of_one_origin_share_records(store: OpenPageStore, server: StoreServer) -> None:
    (key,) = make_keys(1)
    write(store, [key], [b"mine"])
    other = ValkeyStore(url=f"unix://{server.socket}", timeout=60).open(ORIGIN)
    assert [b"mine"] == read(other, [key], [4])
    other.close()


def test_databases_are_apart(store: OpenPageStore, server: StoreServer) -> None:
    (key,) = make_keys(1)
    write(store, [key], [b"mine"])
    for url in (f"{server.url}/3", f"unix://{server.socket}?db=3"):
        other = ValkeyStore(url=url, timeout=60).open(ORIGIN)
        assert [False] == other.find([key])
        other.close()


def test_the_server_sees_keys_of_a_version_an_origin_and_a_time_to_live(
    store: OpenPageStore, server: StoreServer
) -> None:
    (key,) = make_keys(1)
    write(store, [key], [b"page"])
    with server.client() as client:
        assert [PREFIX + key] == client.keys()
        assert b"page" == client.get(PREFIX + key)
        assert 90 < client.ttl(PREFIX + key) <= 100


def test_reading_a_record_lets_it_live_longer_and_finding_it_does_not(
    store: OpenPageStore, server: StoreServer
) -> None:
    (key,) = make_keys(1)
    write(store, [key], [b"page"])
    with server.client() as client:
        client.expire(PREFIX + key, 5)
        store.find([key])
        assert client.ttl(PREFIX + key) <= 5
        assert [b"page"] == read(store, [key], [4])
        assert 90 < client.ttl(PREFIX + key) <= 100


def test_an_expired_record_is_not_found(server: StoreServer) -> None:
    (key,) = make_keys(1)
    store = ValkeyStore(url=server.url, expiry=1, timeout=60).open(ORIGIN)
    write(store, [key], [b"page"])
    for _ in range(600):
        if store.find([key]) == [False]:
            break
        threading.Event().wait(0.1)
    assert [False] == store.find([key])
    assert [None] == read(store, [key], [4])
    store.close()


# --- what another client stores under the store's keys ----------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"pag", b"page!", b"x" * 10_000])
def test_a_record_of_another_size_is_none(content: bytes, store: OpenPageStore, server: StoreServer) -> None:
    keys = make_keys(2)
    write(store, keys, [b"page", b"next"])
    with server.client() as client:
        client.set(PREFIX + keys[0], content)
    assert [None, b"next"] == read(store, keys, [4, 4])
    # It is removed, so that an engine writes the record again.
    assert [False, True] == store.find(keys)


def test_of_a_value_that_is_too_long_one_byte_more_than_the_record_is_sent(
    store: OpenPageStore, server: StoreServer
) -> None:
    (key,) = make_keys(1)
    with server.client() as client:
        # As long as a value can be.
        client.setrange(PREFIX + key, 100 * 2**20, b"x")
        before = client.info("stats")["total_net_output_bytes"]
        assert [None] == read(store, [key], [1000])
        # The server's answer to info has some kilobytes.
        assert client.info("stats")["total_net_output_bytes"] - before < 50_000


def test_other_bytes_of_the_same_size_are_read_because_the_engine_checks_its_seal(
    store: OpenPageStore, server: StoreServer
) -> None:
    (key,) = make_keys(1)
    write(store, [key], [b"page"])
    with server.client() as client:
        client.set(PREFIX + key, b"evil")
    assert [b"evil"] == read(store, [key], [4])


def test_a_value_of_another_type_is_none_and_is_replaced(store: OpenPageStore, server: StoreServer) -> None:
    keys = make_keys(4)
    with server.client() as client:
        client.rpush(PREFIX + keys[0], "a", "b")
        client.hset(PREFIX + keys[1], "a", "b")
        client.xadd(PREFIX + keys[2], {"a": "b"})
    write(store, keys[3:], [b"page"])
    assert [False, False, False, True] == store.find(keys)
    assert [None, None, None, b"page"] == read(store, keys, [4] * 4)
    with server.client() as client:
        assert [PREFIX + keys[3]] == client.keys()
        client.rpush(PREFIX + keys[0], "a")
    assert 2 == write(store, keys[:2], [b"one.", b"two."])
    store.forget(keys[1:])
    assert [True, False, False, False] == store.find(keys)


# --- many keys --------------------------------------------------------------------------------------------------------


def test_a_call_moves_as_many_records_as_fit_and_at_least_one() -> None:
    half = BATCH_BYTES // 2
    assert [] == [*batches([])]
    assert [range(2), range(2, 3)] == [*batches([half, half, 1])]
    assert [range(1), range(1, 2), range(2, 4)] == [*batches([half + 1, half + 1, half, half])]
    assert [range(1), range(1, 2)] == [*batches([10 * BATCH_BYTES, 1])]
    assert [range(BATCH_KEYS), range(BATCH_KEYS, BATCH_KEYS + 1)] == [*batches([0] * (BATCH_KEYS + 1))]


def test_many_keys_are_found_written_read_and_forgotten(store: OpenPageStore) -> None:
    keys = make_keys(5000)
    records = [os.urandom(1 + index % 50) for index in range(4000)]
    assert 4000 == write(store, keys[:4000], records)
    assert [True] * 4000 + [False] * 1000 == store.find(keys)
    assert records + [None] * 1000 == read(store, keys, [*map(len, records), *[9] * 1000])
    store.forget(keys[1:])
    assert [True] + [False] * 4999 == store.find(keys)


def test_large_records_are_written_and_read(store: OpenPageStore) -> None:
    keys = make_keys(5)
    large = os.urandom(2 * BATCH_BYTES + 7)
    records = [large, b"small", large[::-1], large[: BATCH_BYTES // 2], large[: BATCH_BYTES // 2 + 1]]
    assert 5 == write(store, keys, records)
    assert records == read(store, keys, [*map(len, records)])
