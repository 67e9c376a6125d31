"""The folder in plain numbers: what is found, what is removed first, and what is said if the folder cannot be used."""

from __future__ import annotations

import atexit
import itertools
import multiprocessing
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import pytest
from kvframe_disk.store import DiskStore
from kvframe_testing.suites import PageStoreTests

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


# --- the laws ---------------------------------------------------------------------------------------------------------

FOLDER = tempfile.mkdtemp()
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


class TestSmallDisk(PageStoreTests):
    store = "disk"
    options: ClassVar[Mapping[str, Any]] = {"path": f"{FOLDER}/small", "size": "1MiB"}


class TestDisk(PageStoreTests):
    store = "disk"
    options: ClassVar[Mapping[str, Any]] = {"path": f"{FOLDER}/large", "size": "256MiB", "max_unused_days": None}


# --- what is found ----------------------------------------------------------------------------------------------------


def test_a_store_opened_later_finds_what_an_earlier_one_kept(tmp_path: Path) -> None:
    store = open_store(tmp_path / "pages")
    assert 3 == write(store, [1, 2, 3])
    store.close()
    later = open_store(tmp_path / "pages")
    assert [1, 2, 3] == found(later, [0, 1, 2, 3, 4])
    assert b"\x02" * 5000 == read(later, 2)


def test_stores_that_are_open_at_once_find_each_others_records(tmp_path: Path) -> None:
    store, other = open_store(tmp_path), open_store(tmp_path)
    for number in range(20):
        writer, reader = (store, other) if number % 2 else (other, store)
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


def test_engines_that_start_at_once_agree_on_the_secret(tmp_path: Path) -> None:
    code = f"""
from kvframe_disk.store import DiskStore
print(DiskStore(path={str(tmp_path / "pages")!r}, size="1GiB").local_secret().hex())
"""
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for _ in range(4)]
    assert 1 == len({process.communicate()[0] for process in started})
    assert ["secret"] == [file.name for file in (tmp_path / "pages" / "kvframe-pages-1").glob("secret*")]


def test_a_secret_of_a_wrong_length_is_refused(tmp_path: Path) -> None:
    DiskStore(path=tmp_path, size=MIB).local_secret()
    (tmp_path / "kvframe-pages-1" / "secret").write_bytes(b"short")
    with pytest.raises(OSError, match="has the wrong length: remove it"):
        DiskStore(path=tmp_path, size=MIB).local_secret()


def test_a_secret_behind_a_link_is_refused(tmp_path: Path) -> None:
    DiskStore(path=tmp_path, size=MIB).local_secret()
    secret = tmp_path / "kvframe-pages-1" / "secret"
    secret.rename(tmp_path / "elsewhere")
    secret.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="has no usable secret: Too many levels of symbolic links"):
        DiskStore(path=tmp_path, size=MIB).local_secret()


def test_only_the_owner_can_list_the_records(tmp_path: Path) -> None:
    write(open_store(tmp_path / "pages"), [1])
    for path in [tmp_path / "pages" / "kvframe-pages-1", *(tmp_path / "pages" / "kvframe-pages-1").rglob("*")]:
        assert 0 == stat.S_IMODE(path.stat().st_mode) & 0o077


# --- age --------------------------------------------------------------------------------------------------------------


def grow_older(path: Path, days: float) -> None:
    for file in batch_files(path):
        os.utime(file, (file.stat().st_mtime - days * 86_400,) * 2)


def test_records_that_were_not_used_for_long_are_removed(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_unused_days=2)
    write(store, [1])
    write(store, [2])
    grow_older(tmp_path, 2.1)
    assert read(store, 2) is not None
    assert [2] == found(open_store(tmp_path, max_unused_days=2), [1, 2])
    grow_older(tmp_path, 1000)
    assert [2] == found(open_store(tmp_path, max_unused_days=None), [1, 2])
    assert [] == found(open_store(tmp_path), [1, 2])


# --- files that are not whole -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 7, 8, 15, 16, 40, 95, 96, 97, 15_000, 15_135])
def test_a_shortened_file_has_no_records(tmp_path: Path, length: int) -> None:
    write(open_store(tmp_path), [1, 2, 3])
    (file,) = batch_files(tmp_path)
    assert 15_136 == file.stat().st_size
    os.truncate(file, length)
    store = open_store(tmp_path)
    assert [] == found(store, [1, 2, 3])
    assert 3 == write(store, [1, 2, 3])
    assert bytes([2]) * 5000 == read(store, 2)


def test_a_file_that_is_shortened_while_it_is_known_has_its_first_records(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write(store, [1, 2, 3])
    os.truncate(batch_files(tmp_path)[0], 12_000)
    assert [True, True, False] == [read(store, number) is not None for number in (1, 2, 3)]


@pytest.mark.parametrize("content", [b"", b"kvframe1", b"kvframe1" + b"\xff" * 8, b"kvframe2" + bytes(8), bytes(5000)])
def test_a_foreign_file_is_left_alone_until_the_folder_is_full(tmp_path: Path, content: bytes) -> None:
    store = open_store(tmp_path, MIB)
    foreign = tmp_path / "kvframe-pages-1" / "records" / f"{ORIGIN}-foreign"
    foreign.write_bytes(content)
    write(store, [1])
    assert foreign.exists()
    for number in range(300):
        write(store, [number])
    assert not foreign.exists()


def write_until_killed(path: Path, connection: Connection) -> None:
    store = open_store(path, 64 * MIB)
    for number in itertools.count(step=3):
        write(store, [number, number + 1, number + 2], 100_000)
        connection.send(number)


def test_a_killed_writer_leaves_no_half_record_and_no_file_for_long(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    for num_writes in (1, 10, 30):
        receiver, end = context.Pipe(duplex=False)
        process = context.Process(target=write_until_killed, args=(tmp_path, end))
        process.start()
        assert [3 * index for index in range(num_writes)] == [receiver.recv() for _ in range(num_writes)]
        process.kill()
        process.join()
        store = open_store(tmp_path, 64 * MIB)
        numbers = found(store, range(600))
        assert [*range(3 * num_writes)] == numbers[: 3 * num_writes]
        for number in numbers:
            assert bytes([number % 251]) * 100_000 == read(store, number, 100_000)
        assert [] == [*(tmp_path / "kvframe-pages-1" / "writing").iterdir()]


def test_a_file_that_is_being_written_is_not_removed(tmp_path: Path) -> None:
    """Another process holds the lock of its file while it writes, and that of the folder while it looks for others."""
    import fcntl

    store = open_store(tmp_path)
    living, dead = (tmp_path / "kvframe-pages-1" / "writing" / name for name in ("living", "dead"))
    dead.write_bytes(b"half")
    with living.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write(store, [1])
        assert (True, False) == (living.exists(), dead.exists())
    write(store, [2])
    assert not living.exists()


# --- a folder that cannot be used -------------------------------------------------------------------------------------


def sentence_of(use: Callable[[], object]) -> str:
    with pytest.raises(OSError, match="the folder of stored pages") as caught:
        use()
    return str(caught.value)


def test_a_folder_that_was_removed_is_made_again_when_the_store_is_opened_again(tmp_path: Path) -> None:
    store = open_store(tmp_path / "pages")
    write(store, [1])
    shutil.rmtree(tmp_path / "pages")
    assert [] == found(store, [1])
    assert read(store, 1) is None
    assert "cannot be written: No such file or directory" in sentence_of(lambda: write(store, [1]))
    again = open_store(tmp_path / "pages")
    assert 1 == write(again, [1])
    assert 1 == write(store, [1])


def test_a_file_where_the_folder_should_be_is_said(tmp_path: Path) -> None:
    (tmp_path / "pages").write_text("mine")
    assert "cannot be made: " in sentence_of(lambda: open_store(tmp_path / "pages"))
    assert "cannot be made: " in sentence_of(lambda: open_store(tmp_path / "pages" / "deeper"))
    assert "cannot be made: " in sentence_of(lambda: DiskStore(path=tmp_path / "pages", size=MIB).local_secret())


def test_a_folder_without_permission_is_said(tmp_path: Path) -> None:
    user = os.geteuid()
    tmp_path.chmod(0o500)
    if user == 0:
        # Root may write everywhere.
        os.seteuid(65534)
    try:
        assert "cannot be made: Permission denied" in sentence_of(lambda: open_store(tmp_path / "pages"))
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o700)


def test_a_full_disk_fails_the_write_and_keeps_what_is_there(tmp_path: Path) -> None:
    """A limit of the size of files stands for the full disk: the write stops in the middle of a record."""
    store = open_store(tmp_path, 64 * MIB)
    assert 1 == write(store, [1])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        assert "cannot be written: File too large" in sentence_of(lambda: write(store, range(2, 20)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert [] == [*(tmp_path / "kvframe-pages-1" / "writing").iterdir()]
    assert [1] == found(store, range(20))
    assert 18 == write(store, range(2, 20))


def test_a_file_that_an_operator_removed_is_not_read(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write(store, [1])
    write(store, [2])
    batch_files(tmp_path)[0].unlink()
    assert 1 == sum(read(store, number) is not None for number in (1, 2))
    assert 1 == len(found(store, [1, 2]))
    assert 2 == write(store, [1, 2])


def test_a_write_lists_no_folder_that_only_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    write(store, [0])
    folders: list[str] = []
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: [folders.append(Path(path).name), *listdir(path)][1:])
    for number in range(1, 10):
        write(store, [number])
        assert [number] == found(store, [number])
        assert read(store, number) is not None
    assert {"writing"} == {*folders}
    write(open_store(tmp_path), [10])
    folders.clear()
    assert [10] == found(store, [10])
    assert ["records"] == folders


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": ""}, "path must be the path of a folder, not ''"),
        ({"path": 3}, "path must be the path of a folder, not 3"),
        ({"path": "a\0b"}, "path must be the path of a folder"),
        ({"size": "much"}, "size: 'much' is not a size; write a number of bytes"),
        ({"size": 2**20 - 1}, "size must be at least 1 MiB, not 1048575"),
        ({"max_unused_days": 0}, "max_unused_days must be a number of days above 0, not 0"),
        ({"max_unused_days": True}, "max_unused_days must be a number of days above 0, not True"),
        ({"max_unused_days": float("nan")}, "max_unused_days must be a number of days above 0, not nan"),
    ],
)
def test_wrong_options_are_refused(options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DiskStore(**{"path": "/pages", "size": MIB, **options})


def test_a_home_is_found_and_making_a_store_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    store = DiskStore(path="~/pages", size="1GiB")
    assert (2**30, []) == (store.capacity, [*tmp_path.iterdir()])
    write(store.open(ORIGIN), [1])
    assert 1 == len(batch_files(tmp_path / "pages"))
    with pytest.raises(ValueError, match=r"an origin has 32 hexadecimal digits, not '\.\./evil'"):
        store.open("../evil")
