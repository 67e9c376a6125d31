"""What a host gets of a store that keeps pages, fails or lies; secrets, keys and digests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
import torch
from kvframe_stores import (
    PageRecords,
    PageWriter,
    SealedStore,
    StoreCounts,
    choose_secret,
    digest_weights,
    sealed_store,
)

from kvframe import Stack
from kvframe.contract import OpenPageStore, PageStore
from kvframe.contract.errors import StackError

RECORDS = PageRecords(bytes(32), ["weights: a"])
KEYS = [RECORDS.key_of(0, bytes([number]) * 32) for number in range(3)]
PAGES = [np.full(8, number, dtype=np.uint8) for number in range(3)]


@attrs.frozen(kw_only=True)
class Memory(PageStore):
    """A store in memory, in which a test replaces a method by one that misbehaves."""

    name: ClassVar[str] = "memory"
    content: dict[bytes, bytes] = attrs.field(factory=dict)
    wrong: dict[str, Callable[..., Any]] = attrs.field(factory=dict)
    secret: Any = None

    def open(self, origin: str) -> OpenPageStore:
        store = OpenMemory(self.content)
        for name, method in self.wrong.items():
            setattr(store, name, method)
        return store

    def local_secret(self) -> bytes | None:
        if isinstance(self.secret, Exception):
            raise self.secret
        return self.secret  # type: ignore[no-any-return]


class OpenMemory(OpenPageStore):
    def __init__(self, content: dict[bytes, bytes]) -> None:
        self.content = content

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.content for key in keys]

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        for key, buffer in zip(keys, buffers, strict=True):
            if key in self.content:
                buffer[:] = self.content[key]
        return self.find(keys)

    def write(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> int:
        self.content.update(zip(keys, map(bytes, records), strict=True))
        return len(keys)

    def forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.content.pop(key, None)

    def close(self) -> None:
        pass


def fail(*arguments: Any) -> Any:
    raise OSError("the server is away")


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def sealed(memory: Memory) -> SealedStore:
    return SealedStore(memory, StoreCounts())


def numbers(pages: Sequence[Any]) -> list[list[int] | None]:
    return [None if page is None else page.tolist() for page in pages]


# --- a store ----------------------------------------------------------------------------------------------------------


def test_pages_are_found_and_read_as_they_were_written(sealed: SealedStore) -> None:
    sealed.write(RECORDS, KEYS[:2], PAGES[:2])
    assert [True, True, False] == sealed.find(RECORDS, KEYS)
    assert [[0] * 8, [1] * 8, None] == numbers(sealed.read(RECORDS, KEYS, 8))
    assert StoreCounts(pages_found=2, pages_stored=2, bytes_read=16, bytes_written=16) == sealed.counts


def test_pages_that_a_store_has_are_not_written_again(sealed: SealedStore) -> None:
    sealed.write(RECORDS, KEYS[:2], PAGES[:2])
    sealed.write(RECORDS, KEYS, PAGES)
    assert 3 == sealed.counts.pages_stored


@pytest.mark.parametrize("lie", ["another byte", "another record"])
def test_a_page_with_a_wrong_seal_is_refused_and_removed(sealed: SealedStore, memory: Memory, lie: str) -> None:
    sealed.write(RECORDS, KEYS, PAGES)
    record = memory.content[KEYS[0]]
    memory.content[KEYS[0]] = record[:-1] + b"\xff" if lie == "another byte" else memory.content[KEYS[1]]
    assert [None, [1] * 8, [2] * 8] == numbers(sealed.read(RECORDS, KEYS, 8))
    assert (1, {*KEYS[1:]}) == (sealed.counts.pages_refused, {*memory.content})


@pytest.mark.parametrize(
    "answer", [fail, lambda *arguments: [True], lambda *arguments: None], ids=["raises", "one answer", "no answers"]
)
def test_a_wrong_answer_is_a_miss(sealed: SealedStore, memory: Memory, answer: Callable[..., Any]) -> None:
    memory.wrong.update(find=answer, read=answer)
    assert [False] * 3 == sealed.find(RECORDS, KEYS)
    sealed_again = SealedStore(memory, sealed.counts)  # that does not rest
    assert [None] * 3 == sealed_again.read(RECORDS, KEYS, 8)
    assert 2 == sealed.counts.failures


def test_a_store_that_failed_rests_twice_as_long_each_time(
    sealed: SealedStore, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(sealed_store, "monotonic", lambda: now[0])
    memory.wrong.update(find=fail)
    tries = []
    for _ in range(400):
        failures = sealed.counts.failures
        sealed.find(RECORDS, KEYS)
        if sealed.counts.failures > failures:
            tries.append(now[0] - 100)
        now[0] += 0.25
    assert [0, 0.5, 1.5, 3.5, 7.5, 15.5, 31.5, 61.5, 91.5] == tries
    memory.wrong.clear()
    now[0] += 30
    sealed.write(RECORDS, KEYS, PAGES)
    memory.wrong.update(find=fail)
    assert [True] * 3 == sealed.find(RECORDS, KEYS)


def test_pages_that_a_failing_store_does_not_get_are_counted(sealed: SealedStore, memory: Memory) -> None:
    memory.wrong.update(write=fail)
    sealed.write(RECORDS, KEYS, PAGES)
    sealed.write(RECORDS, KEYS, PAGES)  # while it rests
    assert (6, 0, 1) == (sealed.counts.pages_dropped, sealed.counts.pages_stored, sealed.counts.failures)


# --- the writer -------------------------------------------------------------------------------------------------------


def test_a_writer_gives_pages_to_every_store(memory: Memory) -> None:
    stores = [SealedStore(backing_store, StoreCounts()) for backing_store in (memory, Memory())]
    writer = PageWriter(stores)
    writer.put(RECORDS, 0, [bytes([number]) * 32 for number in range(3)], torch.from_numpy(np.stack(PAGES)))
    assert writer.wait(30)
    writer.put(RECORDS, 0, [b"k" * 32], torch.zeros(1, 8, dtype=torch.uint8), max_queued_bytes=0)
    writer.close(30)
    assert [(3, 1), (3, 1)] == [(store.counts.pages_stored, store.counts.pages_dropped) for store in stores]
    assert {*KEYS} == {*memory.content}


# --- keys, seals and digests ------------------------------------------------------------------------------------------


def test_keys_and_seals_depend_on_all_that_they_stand_for() -> None:
    secret, key, page = bytes(32), b"k" * 32, memoryview(b"page")
    records = [PageRecords(secret, ["a", "b"]), PageRecords(secret, ["ab"]), PageRecords(b"s" * 32, ["a", "b"])]
    keys = {
        origin_records.key_of(group, prefix)
        for origin_records in records
        for group in (0, 1)
        for prefix in (key, b"l" * 32)
    }
    assert (12, 3) == (len(keys), len({origin_records.origin for origin_records in records}))
    record = records[0].seal(key, page) + bytes(page)
    assert records[0].is_sound(key, memoryview(record))
    assert not records[0].is_sound(b"l" * 32, memoryview(record))
    assert not records[0].is_sound(key, memoryview(record + b"!"))
    assert not records[2].is_sound(key, memoryview(record))


def test_digests_of_weights_depend_on_names_types_shapes_and_each_byte() -> None:
    weights = torch.arange(15, dtype=torch.float32)
    changed = weights.clone()
    changed[14] = torch.nextafter(changed[14], torch.tensor(100.0))
    others = [{"a": changed}, {"b": weights}, {"a": weights.view(torch.int32)}, {"a": weights.reshape(3, 5)}]
    others += [{"a": weights, "b": weights}, {"a": weights.flip(0)}, {"a": torch.cat([weights, torch.zeros(1)])}]
    assert 8 == len({digest_weights({"a": weights}), *map(digest_weights, others)})
    # A view that begins in the middle of eight bytes, and one that is not contiguous.
    assert digest_weights({"a": weights[1:].clone()}) == digest_weights({"a": weights[1:]})
    spread = torch.stack([weights, weights], dim=1)[:, 0]
    assert digest_weights({"a": weights}) == digest_weights({"a": spread})


# --- secrets ----------------------------------------------------------------------------------------------------------


def stack_of(key: str | None) -> Stack:
    return Stack.from_mapping({"cache": {"key": key}} if key is not None else {})


def test_the_key_of_a_stack_comes_before_the_secret_of_a_store(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("0A" * 32 + "\n")
    stores = [Memory(), Memory(secret=b"s" * 32)]
    assert b"\x0a" * 32 == choose_secret(stack_of(str(tmp_path / "key")), stores)
    assert b"\x0b" * 32 == choose_secret(stack_of("0b" * 32), stores)
    assert b"s" * 32 == choose_secret(stack_of(None), stores)


def test_without_key_and_stores_the_secret_is_random() -> None:
    first, second = (choose_secret(stack_of(None), ()) for _ in range(2))
    assert 32 == len(first) == len(second)
    assert first != second


def test_stores_without_a_usable_secret_need_a_key() -> None:
    with pytest.raises(StackError, match=r"page store 'memory' keeps no secret, .*; set key in \[cache\]"):
        choose_secret(stack_of(None), [Memory()])
    refusing = Memory(secret=PermissionError("other users can read the secret"))
    with pytest.raises(StackError, match=r"^stack: page store 'memory': other users can read the secret$"):
        choose_secret(stack_of(None), [refusing])


@pytest.mark.parametrize("length", [2, 62, 63, 65])
def test_a_key_of_another_length_is_refused_and_not_repeated(length: int, tmp_path: Path) -> None:
    digits = "a" * length
    (tmp_path / "key").write_text(digits)
    for key, says in [(digits, "stack: cache.key has "), (str(tmp_path / "key"), "key' has ")]:
        with pytest.raises(StackError, match=f"{says}{length} hexadecimal digits; a key has 64") as error:
            choose_secret(stack_of(key), ())
        assert digits not in str(error.value) or length == 2


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"not a key"])
def test_a_file_without_a_key_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(StackError, match="has 0 hexadecimal digits"):
        choose_secret(stack_of(str(tmp_path / "key")), ())
    with pytest.raises(StackError, match="nowhere' cannot be read"):
        choose_secret(stack_of(str(tmp_path / "nowhere")), ())


def test_a_secret_is_read_without_torch() -> None:
    code = "import sys; from kvframe_stores import choose_secret; print('torch' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "False\n" == process.stdout
