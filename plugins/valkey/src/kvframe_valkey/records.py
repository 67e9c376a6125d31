"""Records in a server: one key each, with a time to live."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from valkey.exceptions import ResponseError

from kvframe.contract import OpenPageStore
from kvframe_valkey.link import Command, Link, Reply

VERSION = 1
"""Of the keys below."""

BATCH_BYTES = 8 * 2**20
"""The most bytes of records that one call moves, unless one record has more."""

BATCH_KEYS = 1024
"""The most keys of one call."""


class OpenValkeyStore(OpenPageStore):
    """Records of one origin in a server, under the keys ``kvframe:VERSION:ORIGIN:KEY``, where ``KEY`` is 32 bytes."""

    def __init__(self, link: Link, origin: str, expiry: int) -> None:
        """Keep the connection.

        Args:
            link: The connection, which the store closes.
            origin: What the keys of other models and plans do not begin with.
            expiry: The seconds after which the server removes a record that nobody reads or writes.
        """
        self._link = link
        self._prefix = f"kvframe:{VERSION}:{origin}:".encode()
        self._expiry = expiry

    def find(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Return for each key whether the server has a record; values of other types are none."""
        lengths = [
            self._value(reply)
            for batch in batches([0] * len(keys))
            for reply in self._link.call([("STRLEN", self._prefix + keys[index]) for index in batch])
        ]
        return [isinstance(length, int) and length > 0 for length in lengths]

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> Sequence[bool]:
        """Copy records to buffers, let them live longer, and remove values of other sizes and types."""
        are_read = [False] * len(keys)
        wrong: list[bytes] = []
        for batch in batches([buffer.nbytes for buffer in buffers]):
            commands: list[Command] = []
            for index in batch:
                # One byte more than the record has, and no more, shows a value that is too long.
                commands.append(("GETRANGE", self._prefix + keys[index], 0, buffers[index].nbytes))
                commands.append(("EXPIRE", self._prefix + keys[index], self._expiry))
            replies = [self._value(reply) for reply in self._link.call(commands)]
            for index, value, exists in zip(batch, replies[::2], replies[1::2], strict=True):
                if isinstance(value, bytes) and 0 < len(value) == buffers[index].nbytes:
                    buffers[index].cast("B")[:] = value
                    are_read[index] = True
                elif exists:
                    wrong.append(keys[index])
        # Otherwise an engine that finds them would not write the records.
        self.forget(wrong)
        return are_read

    def write(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> int:
        """Store records; those that the server has are replaced."""
        num_written = 0
        for batch in batches([record.nbytes for record in records]):
            commands: list[Command] = [
                ("SET", self._prefix + keys[index], records[index].cast("B"), "EX", self._expiry) for index in batch
            ]
            num_written += sum(self._value(reply) == b"OK" for reply in self._link.call(commands))
        return num_written

    def forget(self, keys: Sequence[bytes]) -> None:
        """Remove records."""
        for batch in batches([0] * len(keys)):
            for reply in self._link.call([("UNLINK", *(self._prefix + keys[index] for index in batch))]):
                self._value(reply)

    def close(self) -> None:
        """Close the connection."""
        self._link.close()

    def _value(self, reply: Reply) -> Reply:
        """Return a reply; None if the key has a value of another type. Raise ``ServerError`` for another error."""
        if isinstance(reply, ResponseError):
            if str(reply).startswith("WRONGTYPE"):
                return None
            raise self._link.refuse(reply)
        return reply


def batches(sizes: Sequence[int]) -> Iterator[range]:
    """Yield the indices of records that one call moves, in order: as many as fit, and at least one."""
    start = num_bytes = 0
    for index, size in enumerate(sizes):
        if index > start and (num_bytes + size > BATCH_BYTES or index - start == BATCH_KEYS):
            yield range(start, index)
            start, num_bytes = index, 0
        num_bytes += size
    if start < len(sizes):
        yield range(start, len(sizes))
