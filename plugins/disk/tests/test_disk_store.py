"""The folder in plain numbers: what is found, what is removed first, and what is said if the folder cannot be used."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from kvframe_disk.store import DiskStore

from kvframe.contract import OpenPageStore

ORIGIN, OTHER_ORIGIN = "0" * 32, "f" * 32
MIB = 2**20


def open_store(path: Path, size: int | str = 4 * MIB, origin: str = ORIGIN, **options: Any) -> OpenPageStore:
    return DiskStore(path=path, size=size, **options).open(origin)


def keys_of(*numbers: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in numbers]


def write(store: OpenPageStore, numbers: Sequence[int], num_bytes: int = 5000) -> int:
    records = [memoryview(bytes([number % 251]) * num_bytes) for number in numbers]
    return store.write(keys_of(*numbers), records)


def read(store: OpenPageStore, number: int, num_bytes: int = 5000) -> bytes | None:
    buffer = bytearray(num_bytes)
    (is_read,) = store.read(keys_of(number), [memoryview(buffer)])
    return bytes(buffer) if is_read else None


def found(store: OpenPageStore, numbers: Sequence[int]) -> list[int]:
    return [number for number, is_found in zip(numbers, store.find(keys_of(*numbers)), strict=True) if is_found]


def batch_files(path: Path) -> list[Path]:
    return sorted((path / "kvframe-pages-1" / "records").iterdir())


def disk_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


# --- what is found ----------------------------------------------------------------------------------------------------


def test_a_store_opened_later_finds_what_an_earlier_one_kept(tmp_path: Path) -> None:
    store = open_store(tmp_path / "pages")
    assert 3 == write(store, [1, 2, 3])
    store.close()
    later = open_store(tmp_path / "pages")
    assert [1, 2, 3] == found(later, [0, 1, 2, 3, 4])
    assert b"\x02" * 5000 == read(later, 2)


def test_stores_that_are_open_at_once_find_each_others_records(tmp_path: Path) -> None:
    one, other = open_store(tmp_path), open_store(tmp_path)
    for number in range(20):
        writer, reader = (one, other) if number % 2 else (other, one)
        write(writer, [number])
        assert [number] == found(reader, [number])
        assert bytes([number]) * 5000 == read(reader, number)


def test_a_write_is_one_file_and_keeps_what_is_there(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert 3 == write(store, [1, 2, 3])
    assert 4 == write(store, [1, 2, 3, 4])
    assert 2 == len(batch_files(tmp_path))
    assert 2 == write(store, [1, 2])
    assert 2 == len(batch_files(tmp_path))


def test_records_of_another_origin_are_not_found_and_count(tmp_path: Path) -> None:
    write(open_store(tmp_path), [1])
    other = open_store(tmp_path, MIB, origin=OTHER_ORIGIN)
    assert [] == found(other, [1])
    for number in range(2, 400):
        write(other, [number])
    assert MIB >= disk_bytes(tmp_path)
    assert [] == found(open_store(tmp_path), [1])


# --- the bound --------------------------------------------------------------------------------------------------------


def test_the_bound_holds_and_the_least_recently_used_go_first(tmp_path: Path) -> None:
    store = open_store(tmp_path, MIB)
    for number in range(100):
        write(store, [number], 40_000)
        assert MIB >= disk_bytes(tmp_path)
        assert read(store, 0, 40_000) is not None
    assert 0 in found(store, range(100))
    assert 99 in found(store, range(100))
    assert 1 not in found(store, range(100))


# --- the secret -------------------------------------------------------------------------------------------------------


def test_the_secret_is_drawn_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    secret = DiskStore(path=tmp_path, size=MIB).local_secret()
    assert 32 == len(secret)
    assert secret == DiskStore(path=tmp_path, size="2MiB").local_secret()
    assert secret != DiskStore(path=tmp_path / "other", size=MIB).local_secret()
    file = tmp_path / "kvframe-pages-1" / "secret"
    assert 0o600 == stat.S_IMODE(file.stat().st_mode)
    file.chmod(0o640)
    with pytest.raises(PermissionError, match="other users can read the secret of stored pages"):
        DiskStore(path=tmp_path, size=MIB).local_secret()
