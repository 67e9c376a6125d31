"""A page store without a mistake, a file for each record, and stores that each have one."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs

from kvframe.contract import OpenPageStore, PageStore

MIB = 2**20


class OpenFolder(OpenPageStore):
    """Writes a record to a file of a temporary name, and renames it; removes the oldest files of a full folder."""

    def __init__(self, store: Folder) -> None:
        self.folder, self.size = Path(store.path), store.size
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, key: bytes) -> Path:
        return self.folder / key.hex()

    def has(self, key: bytes) -> bool:
        return self.path(key).exists()

    def find(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return [self.has(key) for key in keys]

    def get(self, key: bytes) -> bytes | None:
        try:
            return self.path(key).read_bytes()
        except FileNotFoundError:
            return None

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> Sequence[bool]:
        return [self.read_one(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def read_one(self, key: bytes, buffer: memoryview) -> bool:
        record = self.get(key)
        if record is None or len(record) != len(buffer):
            return False
        buffer[:] = record
        return True

    def put(self, key: bytes, record: memoryview) -> None:
        draft = self.folder / f"draft-{secrets.token_hex(8)}"
        draft.write_bytes(record)
        draft.rename(self.path(key))

    def write(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> int:
        for key, record in zip(keys, records, strict=True):
            if len(record) <= self.size:
                self.put(key, record)
        self.clean()
        return sum(map(self.has, keys))

    def clean(self) -> None:
        files = []
        for entry in os.scandir(self.folder):
            try:
                files.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
            except FileNotFoundError:
                continue
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self.size:
                break
            Path(path).unlink(missing_ok=True)
            total -= size

    def forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.path(key).unlink(missing_ok=True)

    def close(self) -> None:
        pass


@attrs.frozen(kw_only=True)
class Folder(PageStore):
    """The store without a mistake; its subclasses open another one."""

    name: ClassVar[str] = "folder"
    opens: ClassVar[type[OpenFolder]] = OpenFolder
    path: str
    size: int = 4 * MIB

    def open(self, origin: str) -> OpenPageStore:
        return self.opens(self)

    @property
    def capacity(self) -> int | None:
        return self.size


# --- declarations -----------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True, eq=False)
class DifferentThoughEqual(Folder):
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


@attrs.frozen(kw_only=True)
class ListAsOption(Folder):
    servers: list[str] = attrs.field(factory=list)


@attrs.frozen(kw_only=True)
class NoSize(Folder):
    @property
    def capacity(self) -> int | None:
        return 0


@attrs.frozen(kw_only=True)
class ShortSecret(Folder):
    def local_secret(self) -> bytes | None:
        return b"secret"


@attrs.frozen(kw_only=True)
class OtherSecret(Folder):
    def local_secret(self) -> bytes | None:
        return secrets.token_bytes(32)


@attrs.frozen(kw_only=True)
class OpensNothing(Folder):
    def open(self, origin: str) -> Any:
        return {}


@attrs.frozen(kw_only=True)
class OnlyInTheMainThread(Folder):
    def open(self, origin: str) -> OpenPageStore:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        return super().open(origin)


# --- answers ----------------------------------------------------------------------------------------------------------


class FindsAll(OpenFolder):
    def find(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return [True for _ in keys]


class FindsAsASet(OpenFolder):
    def find(self, keys: Sequence[bytes]) -> Any:
        return {key for key in keys if self.has(key)}


class FindsAsBefore(OpenFolder):
    """Says again what it said before."""

    def __init__(self, store: Folder) -> None:
        super().__init__(store)
        self.answers: dict[bytes, bool] = {}

    def has(self, key: bytes) -> bool:
        if key not in self.answers:
            self.answers[key] = super().has(key)
        return self.answers[key]


class FailsForNothing(OpenFolder):
    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> Sequence[bool]:
        largest = max(len(buffer) for buffer in buffers)
        return super().read(keys, buffers) if largest else []


class FailsForUnknown(OpenFolder):
    def forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.path(key).unlink()


class FailsForDuplicates(OpenFolder):
    def put(self, key: bytes, record: memoryview) -> None:
        with self.path(key).open("xb") as file:
            file.write(record)


class CountsItsOwn(OpenFolder):
    def write(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> int:
        num_known = sum(map(self.has, keys))
        return super().write(keys, records) - num_known


class ReturnsNoCount(OpenFolder):
    def write(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> Any:
        super().write(keys, records)


class KeepsNothing(OpenFolder):
    def put(self, key: bytes, record: memoryview) -> None:
        pass


class KeepsOneOfFour(OpenFolder):
    def put(self, key: bytes, record: memoryview) -> None:
        if key[0] % 4 == 0:
            super().put(key, record)


class ForgetsNothing(OpenFolder):
    def forget(self, keys: Sequence[bytes]) -> None:
        pass


class ForgetsForItself(OpenFolder):
    """Forgets until it is opened again."""

    def __init__(self, store: Folder) -> None:
        super().__init__(store)
        self.forgotten: set[bytes] = set()

    def has(self, key: bytes) -> bool:
        return key not in self.forgotten and super().has(key)

    def get(self, key: bytes) -> bytes | None:
        return super().get(key) if self.has(key) else None

    def put(self, key: bytes, record: memoryview) -> None:
        self.forgotten.discard(key)
        super().put(key, record)

    def forget(self, keys: Sequence[bytes]) -> None:
        self.forgotten.update(keys)


class ClosesForEver(OpenFolder):
    def close(self) -> None:
        shutil.rmtree(self.folder)


# --- bytes ------------------------------------------------------------------------------------------------------------


class AnySize(OpenFolder):
    """Fills what the record lacks by zeros."""

    def read_one(self, key: bytes, buffer: memoryview) -> bool:
        record = self.get(key)
        if record is None:
            return False
        buffer[:] = record[: len(buffer)].ljust(len(buffer), b"\0")
        return True


class Text(OpenFolder):
    """Ends a record at the zeros after it."""

    def put(self, key: bytes, record: memoryview) -> None:
        super().put(key, memoryview(bytes(record).rstrip(b"\0") + b"\0" * (len(record) % 2)))

    def read_one(self, key: bytes, buffer: memoryview) -> bool:
        record = self.get(key)
        if record is None or len(record) > len(buffer):
            return False
        buffer[:] = record.rjust(len(buffer), b"\0")
        return True


class ShortKeys(OpenFolder):
    def path(self, key: bytes) -> Path:
        return self.folder / key[:31].hex()


class FewLetters(OpenFolder):
    def path(self, key: bytes) -> Path:
        return self.folder / "".join(f"{byte % 32:02x}" for byte in key)


class InOrder(OpenFolder):
    """Answers in the order of the keys' bytes."""

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> Sequence[bool]:
        return super().read(sorted(keys), buffers)


class EndsEarly(OpenFolder):
    def put(self, key: bytes, record: memoryview) -> None:
        super().put(key, memoryview(bytes(record[: 64 * 1024 - 1]).ljust(len(record), b"\0")))


class KeepsViews(OpenFolder):
    """Writes at the next call."""

    def __init__(self, store: Folder) -> None:
        super().__init__(store)
        self.pending: dict[bytes, memoryview] = {}

    def has(self, key: bytes) -> bool:
        return key in self.pending or super().has(key)

    def put(self, key: bytes, record: memoryview) -> None:
        self.pending[key] = record

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> Sequence[bool]:
        for key, record in self.pending.items():
            super().put(key, record)
        self.pending = {}
        return super().read(keys, buffers)


class ReadsLater(OpenFolder):
    """Answers before the bytes are there."""

    def read_one(self, key: bytes, buffer: memoryview) -> bool:
        record = self.get(key)
        if record is None or len(record) != len(buffer):
            return False
        threading.Timer(0.02, buffer.__setitem__, (slice(None), record)).start()
        return True


class ReadsTwice(OpenFolder):
    """Writes the bytes to a buffer once more, later."""

    def read_one(self, key: bytes, buffer: memoryview) -> bool:
        is_read = super().read_one(key, buffer)
        if is_read:
            threading.Timer(0.02, buffer.__setitem__, (slice(None), bytes(buffer))).start()
        return is_read


class MixesOldAndNew(OpenFolder):
    """Writes over a file from its start."""

    def put(self, key: bytes, record: memoryview) -> None:
        if not super().has(key):
            return super().put(key, record)
        with self.path(key).open("r+b") as file:
            file.write(record)
        return None


# --- the bound --------------------------------------------------------------------------------------------------------


class KeepsAll(OpenFolder):
    def clean(self) -> None:
        pass


class RefusesIfFull(OpenFolder):
    def put(self, key: bytes, record: memoryview) -> None:
        if sum(entry.stat().st_size for entry in os.scandir(self.folder)) + len(record) <= self.size:
            super().put(key, record)


class FailsIfLarge(OpenFolder):
    def write(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> int:
        if any(len(record) > self.size for record in records):
            raise ValueError("a record is too large")
        return super().write(keys, records)


# --- several processes ------------------------------------------------------------------------------------------------


class InParts(OpenFolder):
    """Writes to the file itself."""

    def put(self, key: bytes, record: memoryview) -> None:
        with self.path(key).open("wb", buffering=0) as file:
            file.truncate(len(record))
            for start in range(0, len(record), 4096):
                file.write(record[start : start + 4096])


class InPartsUnderALock(OpenFolder):
    """Writes to the file itself; readers wait for the writer's lock, which ends with the writer."""

    def put(self, key: bytes, record: memoryview) -> None:
        with os.fdopen(os.open(self.path(key), os.O_RDWR | os.O_CREAT), "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.truncate(len(record))
            for start in range(0, len(record), 4096):
                file.write(record[start : start + 4096])

    def get(self, key: bytes) -> bytes | None:
        try:
            with self.path(key).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH)
                return file.read()
        except FileNotFoundError:
            return None


class OneDraft(OpenFolder):
    """Two writers write to one temporary file."""

    def put(self, key: bytes, record: memoryview) -> None:
        draft = self.folder / "draft"
        draft.write_bytes(record)
        try:
            draft.rename(self.path(key))
        except FileNotFoundError:
            return


class LockFile(OpenFolder):
    """Takes a lock that stays if the writer is killed."""

    def put(self, key: bytes, record: memoryview) -> None:
        lock = self.folder / "lock"
        for _ in range(200):
            try:
                lock.touch(exist_ok=False)
                break
            except FileExistsError:
                threading.Event().wait(0.01)
        else:
            raise TimeoutError("another process writes")
        super().put(key, record)
        lock.unlink()


@attrs.frozen(kw_only=True)
class OneProcess(Folder):
    """Is opened only by the process whose number its folder has."""

    def open(self, origin: str) -> OpenPageStore:
        owner = Path(self.path) / "owner"
        if not owner.exists():
            owner.write_text(str(os.getpid()))
        if owner.read_text() != str(os.getpid()):
            raise RuntimeError("another process has it")
        return super().open(origin)


# --- stores without a mistake -----------------------------------------------------------------------------------------

MEMORY: dict[bytes, bytes] = {}


class OpenMemory(OpenPageStore):
    """The records of this process."""

    def find(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return [key in MEMORY for key in keys]

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> Sequence[bool]:
        are_read = [len(MEMORY.get(key, b"")) == len(buffer) for key, buffer in zip(keys, buffers, strict=True)]
        for key, buffer, is_read in zip(keys, buffers, are_read, strict=True):
            if is_read:
                buffer[:] = MEMORY[key]
        return are_read

    def write(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> int:
        MEMORY.update(zip(keys, map(bytes, records), strict=True))
        return len(keys)

    def forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            MEMORY.pop(key, None)

    def close(self) -> None:
        pass


@attrs.frozen(kw_only=True)
class InMemory(PageStore):
    name: ClassVar[str] = "in_memory"

    def open(self, origin: str) -> OpenPageStore:
        return OpenMemory()


@attrs.frozen(kw_only=True)
class Unbounded(Folder):
    size: int = 2**30

    @property
    def capacity(self) -> int | None:
        return None


class OpenSlow(OpenFolder):
    def put(self, key: bytes, record: memoryview) -> None:
        threading.Event().wait(0.05)
        super().put(key, record)


@attrs.frozen(kw_only=True)
class Slow(Folder):
    opens: ClassVar[type[OpenFolder]] = OpenSlow


def opening(opens: type[OpenFolder]) -> type[Folder]:
    """Return the store that opens another class; another process finds it by its name in this module."""
    name = f"Folder{opens.__name__}"
    store_class: type[Folder] = attrs.frozen(kw_only=True)(
        type(name, (Folder,), {"opens": opens, "__module__": __name__})
    )
    return store_class


for open_class in OpenFolder.__subclasses__():
    globals()[f"Folder{open_class.__name__}"] = opening(open_class)
