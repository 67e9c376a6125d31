"""A batch file: the records of one write, which one request mostly needs together.

Small records in a file each cost more than their bytes. So a file holds a batch: a header, a table of keys and sizes,
then the records. A file has its final name only if it is complete; its length says that too. It is never changed.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from itertools import accumulate

import attrs

MAGIC = b"kvframe1"
_HEADER = struct.Struct("<8sQ")
_ENTRY = struct.Struct("<32sQ")
_DISK_BLOCK = 4096
_MAX_PARTS = 512
"""Buffers that one system call takes; the least limit of systems is 1,024."""
_MAX_RECORDS = 2**24


@attrs.frozen(eq=False)
class BatchFile:
    """What is known of a batch file; a file of another origin or another content has no keys.

    Attributes:
        name: The file's name.
        num_bytes: What it takes on the disk.
        keys: The keys of its records.
        starts: Where each record starts, and where the last one ends.
    """

    name: str
    num_bytes: int
    keys: tuple[bytes, ...] = ()
    starts: tuple[int, ...] = (0,)

    def size_of(self, index: int) -> int:
        """Return the bytes of a record."""
        return self.starts[index + 1] - self.starts[index]


def on_disk(num_bytes: int) -> int:
    """Return what a file of so many bytes takes on the disk."""
    return -(-num_bytes // _DISK_BLOCK) * _DISK_BLOCK


def file_bytes(record_sizes: list[int]) -> int:
    """Return the length of a file of records."""
    return _HEADER.size + _ENTRY.size * len(record_sizes) + sum(record_sizes)


def write_records(file: int, name: str, records: Mapping[bytes, memoryview]) -> BatchFile:
    """Write all of a batch to an open file, and return what a reader will know of it."""
    sizes = [record.nbytes for record in records.values()]
    entries = b"".join(map(_ENTRY.pack, records, sizes))
    head = _HEADER.pack(MAGIC, len(sizes)) + entries
    parts = [memoryview(head), *(record.cast("B") for record in records.values() if record.nbytes)]
    while parts:
        written = os.writev(file, parts[:_MAX_PARTS])
        done = 0
        while done < len(parts) and written >= parts[done].nbytes:
            written -= parts[done].nbytes
            done += 1
        parts = parts[done:]
        if written:
            parts[0] = parts[0][written:]
    starts = tuple(accumulate(sizes, initial=len(head)))
    return BatchFile(name, on_disk(starts[-1]), tuple(records), starts)


def read_table(file: int, name: str) -> BatchFile:
    """Return what an open file has; no keys if it is not a complete batch file."""
    length = os.fstat(file).st_size
    unknown = BatchFile(name, on_disk(length))
    head = os.pread(file, _HEADER.size, 0)
    if len(head) != _HEADER.size:
        return unknown
    magic, num_records = _HEADER.unpack(head)
    table_bytes = num_records * _ENTRY.size
    if magic != MAGIC or num_records > _MAX_RECORDS or _HEADER.size + table_bytes > length:
        return unknown
    table = os.pread(file, table_bytes, _HEADER.size)
    if len(table) != table_bytes:
        return unknown
    entries = list(_ENTRY.iter_unpack(table))
    starts = tuple(accumulate((size for _, size in entries), initial=_HEADER.size + table_bytes))
    if starts[-1] != length:
        return unknown
    return attrs.evolve(unknown, keys=tuple(key for key, _ in entries), starts=starts)


def read_record(file: int, batch: BatchFile, index: int, buffer: memoryview) -> bool:
    """Copy a record to a buffer of its size; return whether the file had all of it."""
    start, left = batch.starts[index], buffer.cast("B")
    while left:
        num_read = os.preadv(file, [left], start)
        if num_read == 0:
            return False
        start, left = start + num_read, left[num_read:]
    return True
