"""The open store: an index of the folder's batch files, and what is read, written and removed."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from kvframe.contract import OpenPageStore
from kvframe_disk.batch_file import BatchFile, file_bytes, on_disk, read_record, read_table, write_records
from kvframe_disk.folder import Folder, read_version, write_version

_MOST_BYTES_OF_A_FILE = 64 * 2**20
"""A larger batch is written as several files, unless a record alone is larger."""

_FILES_OF_A_FOLDER = 16
"""A batch is also written as several files if it has more than such a part of the bound."""

_FREED = 32
"""If the folder is full, such a part of the bound is freed at once, so that not every write has to clean."""

_CLEAN_EVERY = 60.0
"""Seconds from one look for unused files to the next."""


class OpenDiskStore(OpenPageStore):
    """The folder as one process sees it.

    The invariant: the index has the records of the folder's files in the version of the folder that was seen last.
    Each change gives the folder another version, and then the folder is listed again.
    """

    def __init__(self, folder: Folder, origin: str, *, max_bytes: int, max_unused_seconds: float) -> None:
        if re.fullmatch("[0-9a-f]{32}", origin) is None:
            raise ValueError(f"an origin has 32 hexadecimal digits, not {origin!r}")
        self._folder = folder
        self._origin = origin
        self._max_bytes = max_bytes
        self._max_unused_seconds = max_unused_seconds
        self._max_file_bytes = min(_MOST_BYTES_OF_A_FILE, max_bytes // _FILES_OF_A_FOLDER)
        self._files: dict[str, BatchFile] = {}
        self._index: dict[bytes, tuple[BatchFile, int]] = {}
        self._num_bytes = 0
        self._version: bytes | None = None
        self._is_changed = False
        self._cleaned_at = time.monotonic()
        folder.make()
        with folder.explained("cannot be used"), self._locked():
            self._clean(0, is_first=True)

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether its record is in the folder."""
        self._refresh()
        return [key in self._index for key in keys]

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Copy records to buffers; the files that have them count as used now."""
        self._refresh()
        are_read = [False] * len(keys)
        wanted: dict[BatchFile, list[tuple[int, int]]] = {}
        for position, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            batch, index = self._index.get(key, (None, 0))
            if batch is not None and batch.size_of(index) == buffer.nbytes:
                wanted.setdefault(batch, []).append((position, index))
        with self._folder.explained("cannot be read"):
            for batch, records in wanted.items():
                try:
                    file = os.open(self._folder.records / batch.name, os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:
                    self._drop(batch)
                    continue
                try:
                    for position, index in records:
                        are_read[position] = read_record(file, batch, index, buffers[position])
                    # The time of a file is when it was last used. Another user's file keeps its time.
                    with suppress(PermissionError):
                        os.utime(file)
                finally:
                    os.close(file)
        return are_read

    def write(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> int:
        """Keep the records that the folder does not have yet; if it is full, remove the least recently used files."""
        self._refresh()
        absent = {key: record for key, record in zip(keys, records, strict=True) if key not in self._index}
        with self._folder.explained("cannot be written"):
            for batch in self._split(absent):
                self._write(batch)
        return sum(key in self._index for key in keys)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Remove the files that have a record of these keys, with the other records in them."""
        wrong = frozenset(keys)
        with self._folder.explained("cannot be changed"), self._locked():
            for batch in [batch for batch in self._files.values() if not wrong.isdisjoint(batch.keys)]:
                self._remove(batch)

    def close(self) -> None:
        """Release the index; no file is open between two calls."""
        self._files, self._index, self._num_bytes, self._version = {}, {}, 0, None

    # --- the index ----------------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        """List the folder if it has changed."""
        with self._folder.explained("cannot be read"):
            version = self._folder.version()
            if version is None:
                self.close()
            elif version != self._version:
                self._list()
                self._version = version

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder's lock, with an index that is up to date; what is changed gives the folder a version."""
        with self._folder.locked() as lock:
            version = read_version(lock)
            if version != self._version:
                self._list()
            self._version, self._is_changed = version, False
            try:
                yield
            finally:
                if self._is_changed:
                    self._version = write_version(lock)

    def _list(self) -> None:
        names = {*os.listdir(self._folder.records)}
        for name in self._files.keys() - names:
            self._drop(self._files[name])
        for name in names - self._files.keys():
            with suppress(FileNotFoundError):
                self._add(self._read_table(name))

    def _read_table(self, name: str) -> BatchFile:
        path = self._folder.records / name
        if not name.startswith(f"{self._origin}-"):
            return BatchFile(name, on_disk(path.stat().st_size))
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return read_table(file, name)
        finally:
            os.close(file)

    def _add(self, batch: BatchFile) -> None:
        self._files[batch.name] = batch
        self._num_bytes += batch.num_bytes
        self._index.update((key, (batch, index)) for index, key in enumerate(batch.keys))

    def _drop(self, batch: BatchFile) -> None:
        del self._files[batch.name]
        self._num_bytes -= batch.num_bytes
        for key in batch.keys:
            if self._index.get(key, (None,))[0] is batch:
                del self._index[key]

    # --- files --------------------------------------------------------------------------------------------------------

    def _split(self, records: Mapping[bytes, memoryview]) -> Iterator[dict[bytes, memoryview]]:
        """Yield the records of each file, without records that the folder cannot hold."""
        part: dict[bytes, memoryview] = {}
        num_bytes = 0
        for key, record in records.items():
            if on_disk(file_bytes([record.nbytes])) > self._max_bytes:
                continue
            if part and num_bytes + record.nbytes > self._max_file_bytes:
                yield part
                part, num_bytes = {}, 0
            part[key] = record
            num_bytes += record.nbytes
        if part:
            yield part

    def _write(self, records: Mapping[bytes, memoryview]) -> None:
        """Write a file under a temporary name, then make it findable."""
        name = f"{self._origin}-{secrets.token_hex(8)}"
        path = self._folder.writing / name
        # The lock of the file itself says that its writer lives. It is taken before any cleaning can look at the file.
        with self._locked():
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            batch = write_records(file, name, records)
            with self._locked():
                self._clean(batch.num_bytes)
                os.rename(path, self._folder.records / name)
                self._is_changed = True
                self._add(batch)
        except BaseException:
            with suppress(OSError):
                os.unlink(path)
            raise
        finally:
            os.close(file)

    def _clean(self, num_bytes: int, *, is_first: bool = False) -> None:
        """Remove files so that a file of ``num_bytes`` fits; the lock is held."""
        self._remove_unfinished()
        is_full = self._num_bytes + num_bytes > self._max_bytes
        now = time.monotonic()
        if not is_full and now - self._cleaned_at < _CLEAN_EVERY and not is_first:
            return
        self._cleaned_at = now
        # A writer that was killed after it renamed a file has given the folder no version.
        self._list()
        used_at = {}
        for batch in [*self._files.values()]:
            try:
                used_at[batch] = os.stat(self._folder.records / batch.name).st_mtime
            except FileNotFoundError:
                self._drop(batch)
        total = sum(batch.num_bytes for batch in used_at) + num_bytes
        bound = self._max_bytes - self._max_bytes // _FREED if total > self._max_bytes else self._max_bytes
        oldest_use = time.time() - self._max_unused_seconds
        for batch in sorted(used_at, key=used_at.__getitem__):
            if total <= bound and used_at[batch] >= oldest_use:
                break
            self._remove(batch)
            total -= batch.num_bytes

    def _remove_unfinished(self) -> None:
        """Remove the files of writers that ended before the file was complete."""
        for name in os.listdir(self._folder.writing):
            path = self._folder.writing / name
            with suppress(FileNotFoundError):
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)
                except BlockingIOError:
                    pass
                finally:
                    os.close(file)

    def _remove(self, batch: BatchFile) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._folder.records / batch.name)
        self._is_changed = True
        self._drop(batch)
