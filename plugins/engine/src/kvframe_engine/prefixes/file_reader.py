"""Reads a file of saved prefixes, and checks every part of it before using it."""

from __future__ import annotations

import hashlib
import json
import os
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from kvframe_engine.contract.errors import PrefixFileError
from kvframe_engine.prefixes.file_format import (
    FORMAT,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    MAX_LIST_BYTES,
    TENSORS,
    VERSION,
    Contents,
    FilePrefix,
    Offsets,
)

_READ_BYTES = 1 << 20
"""The bytes of a tensor that one read takes."""


class PrefixFileReader:
    """Reads a file of saved prefixes; a context manager. It has at most a few MiB of the file in memory.

    Attributes:
        path: The file.
        origin: What must be equal in the cache that loads the file.
        prefixes: Its prefixes.
    """

    def __init__(self, path: Path) -> None:
        """Open a file, and read its header and its list of prefixes.

        Args:
            path: The file.

        Raises:
            PrefixFileError: It is not a complete file of saved prefixes of this version.
        """
        self.path = path
        try:
            if not path.is_file():
                raise PrefixFileError(f"there is no file {path}", code="unreadable")
            self._file: IO[bytes] = path.open("rb", buffering=0)
        except OSError as error:
            raise PrefixFileError(f"{path} cannot be read: {error.strerror or error}", code="unreadable") from error
        try:
            self._start, self._contents = self._read_header()
            self.origin = self._contents.origin
            self.prefixes = self._read_list()
            # The first token and the first offset of each prefix.
            self._first_tokens = [0, *accumulate(each.num_tokens for each in self.prefixes)]
            self._first_offsets = [0, *accumulate(sum(each.num_pages) for each in self.prefixes)]
        except BaseException:
            self._file.close()
            raise

    def check(self) -> None:
        """Read all tensors once; raise ``PrefixFileError`` if a checksum differs."""
        for name in TENSORS:
            digest = hashlib.blake2b(digest_size=32)
            for start in range(0, self._contents.sizes[name], _READ_BYTES):
                digest.update(self._tensor(name, start, min(_READ_BYTES, self._contents.sizes[name] - start)))
            if digest.hexdigest() != self._contents.checksums[name]:
                raise self._damaged(f"the checksum of its {name} differs")

    def tokens(self, index: int) -> npt.NDArray[np.uint32]:
        """Return the token ids of a prefix, ``[num_tokens], uint32, host``."""
        num_tokens = self.prefixes[index].num_tokens
        return self._numbers("tokens", "<u4", self._first_tokens[index], num_tokens).astype(np.uint32)

    def offsets(self, index: int) -> list[Offsets]:
        """Return per group the offsets of a prefix's pages."""
        start = self._first_offsets[index]
        offsets_of_groups = []
        for count in self.prefixes[index].num_pages:
            offsets_of_groups.append(self._numbers("offsets", "<u8", start, count).astype(np.uint64))
            start += count
        return offsets_of_groups

    def read_page(self, offset: int, into: memoryview) -> None:
        """Read a page.

        Args:
            offset: Its offset.
            into: A buffer with the size of the page.

        Raises:
            PrefixFileError: The file has changed since it was checked.
        """
        self._file.seek(self._start + offset)
        if self._file.readinto(into) != len(into):  # type: ignore[attr-defined]
            raise self._damaged("it became shorter while it was read")

    @property
    def num_page_bytes(self) -> int:
        """Bytes of all its pages."""
        return self._contents.sizes["pages"]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_header(self) -> tuple[int, Contents]:
        num_bytes = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._read(LENGTH_BYTES), "little")
        if length > MAX_HEADER_BYTES:
            raise self._other("its header is too long")
        raw = self._read(length)
        header = self._parse(raw, "header")
        metadata = header.get("__metadata__") if isinstance(header, dict) else None
        if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
            raise self._other("it is another kind of file")
        if metadata.get("version") != str(VERSION):
            raise PrefixFileError(
                f"{self.path} is of version {metadata.get('version')!r} of the format, and this kvframe reads version "
                f"{VERSION}; save the prefixes again",
                code="version",
            )
        contents = self._as_contents(metadata.get("contents"))
        if contents.header() != raw:
            raise self._damaged("its header is not as it was written")
        start = LENGTH_BYTES + length
        if start + sum(contents.sizes.values()) != num_bytes:
            raise self._damaged(
                f"it has {num_bytes} bytes, and its header gives {start + sum(contents.sizes.values())}"
            )
        return start, contents

    def _as_contents(self, text: object) -> Contents:
        contents = Contents.of(self._parse(text.encode(errors="replace"), "header")) if isinstance(text, str) else None
        if contents is None:
            raise self._damaged("its header is not as it was written")
        return contents

    def _read_list(self) -> list[FilePrefix]:
        size = self._contents.sizes["prefixes"]
        if size > MAX_LIST_BYTES:
            raise self._damaged(f"its list of prefixes has {size} bytes, more than {MAX_LIST_BYTES}")
        listed = self._parse(self._tensor("prefixes", 0, size), "list of prefixes")
        prefixes = [FilePrefix.of(prefix) for prefix in listed] if isinstance(listed, list) else [None]
        readable_prefixes = [prefix for prefix in prefixes if prefix is not None]
        if len(readable_prefixes) < len(prefixes):
            raise self._damaged("its list of prefixes is not as it was written")
        if 4 * sum(prefix.num_tokens for prefix in readable_prefixes) != self._contents.sizes["tokens"]:
            raise self._damaged("its list of prefixes gives another number of tokens than it holds")
        if 8 * sum(sum(prefix.num_pages) for prefix in readable_prefixes) != self._contents.sizes["offsets"]:
            raise self._damaged("its list of prefixes gives another number of pages than it holds")
        return readable_prefixes

    def _tensor(self, name: str, start: int, num_bytes: int) -> bytes:
        """Return a part of a tensor."""
        offset = self._start
        for tensor in TENSORS:
            if tensor == name:
                break
            offset += self._contents.sizes[tensor]
        self._file.seek(offset + start)
        return self._read(num_bytes)

    def _numbers(self, name: str, dtype: str, start: int, count: int) -> npt.NDArray[Any]:
        item_bytes = TENSORS[name][1]
        return np.frombuffer(self._tensor(name, item_bytes * start, item_bytes * count), dtype=dtype)

    def _read(self, num_bytes: int) -> bytes:
        parts, bytes_left = [], num_bytes
        while bytes_left:
            try:
                part = self._file.read(bytes_left)
            except OSError as error:
                why = error.strerror or error
                raise PrefixFileError(f"{self.path} cannot be read: {why}", code="unreadable") from error
            if not part:
                raise self._damaged("it ends too early")
            parts.append(part)
            bytes_left -= len(part)
        return b"".join(parts)

    def _parse(self, data: bytes, what: str) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self._other(f"its {what} is not JSON") from error

    def _other(self, why: str) -> PrefixFileError:
        return PrefixFileError(f"{self.path} is not a file of saved prefixes, or is damaged: {why}", code="damaged")

    def _damaged(self, why: str) -> PrefixFileError:
        return PrefixFileError(f"{self.path} is damaged: {why}", code="damaged")
