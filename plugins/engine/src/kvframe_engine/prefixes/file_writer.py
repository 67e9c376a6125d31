"""Writes a file of saved prefixes, and replaces an older file only when the new one is complete."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from kvframe import InputSequence
from kvframe.contract.errors import FileError
from kvframe.contract.files import exists
from kvframe_engine.contract.errors import PrefixFileError
from kvframe_engine.prefixes.file_format import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    MAX_LIST_BYTES,
    TENSORS,
    Contents,
    FilePrefix,
    Offsets,
    dump,
    is_prefix_file,
)


def check_prefix_path(path: Path) -> None:
    """Raise ``PrefixFileError`` if prefixes cannot be saved to a path: only a file of prefixes may be replaced."""
    try:
        _check_path(path)
    except FileError as error:
        raise PrefixFileError(f"{path} {error}", code="unwritable") from error
    if not path.absolute().parent.is_dir():
        raise PrefixFileError(f"{path} cannot be written: there is no folder {path.parent}", code="unwritable")


def _check_path(path: Path) -> None:
    """Raise ``FileError`` if no file can be written at a path, or if another kind of file than of prefixes is there."""
    folder = path.absolute().parent
    if exists(path):
        if path.is_dir():
            raise FileError("cannot be written: it is a folder")
        if not path.is_file():
            raise FileError("cannot be written: it is a device or a pipe, not a file")
        if path.stat().st_size > 0 and not is_prefix_file(path):
            raise FileError("exists already and is another kind of file; name another file, or remove it first")
    while not exists(folder):
        folder = folder.parent
    if not folder.is_dir():
        raise FileError(f"cannot be written: {folder} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FileError(f"cannot be written: nothing can be written in {folder}")


def _umask() -> int:
    """Return the permissions that this process's files do not get."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


class PrefixFileWriter:
    """Writes a temporary file next to the path, and renames it when it is complete.

    It is a context manager: without ``finish``, the temporary file is removed at the end.
    """

    def __init__(self, path: Path, origin: Mapping[str, Any]) -> None:
        """Begin.

        Args:
            path: The file to write.
            origin: What must be equal in the cache that loads the file, as JSON values.

        Raises:
            PrefixFileError: The file cannot be written, another kind of file is there, or the origin is too long.
        """
        check_prefix_path(path)
        self._path = path.resolve()
        self._origin = origin
        self._digests = {name: hashlib.blake2b(digest_size=32) for name in TENSORS}
        self._sizes = dict.fromkeys(TENSORS, 0)
        self._known: dict[bytes, int] = {}
        self._offsets: list[Offsets] = []
        self._tokens: list[npt.NDArray[np.uint32]] = []
        self._prefixes: list[FilePrefix] = []
        if len(self._contents().header()) > MAX_HEADER_BYTES:
            raise PrefixFileError(
                f"{path} would have a header of more than {MAX_HEADER_BYTES} bytes", code="unwritable"
            )
        try:
            handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
            self._temporary: Path | None = Path(name)
            self._file: IO[bytes] = os.fdopen(handle, "wb")
            self._file.seek(LENGTH_BYTES + len(self._contents().header()))
        except OSError as error:
            raise self._cannot(error) from error

    def add(
        self,
        token_ids: Sequence[int],
        salt: str,
        inputs: Mapping[str, InputSequence],
        pages: Sequence[Iterator[bytes]],
    ) -> None:
        """Add a prefix.

        Args:
            token_ids: Its tokens.
            salt: The salt of the requests that share it.
            inputs: The inputs of these requests, by name.
            pages: Per group, the bytes of its pages.

        Raises:
            PrefixFileError: They cannot be written.
        """
        num_pages = []
        for group_pages in pages:
            offsets = [self._offset_of(page) for page in group_pages]
            self._offsets.append(np.array(offsets, dtype=np.uint64))
            num_pages.append(len(offsets))
        self._tokens.append(np.array(token_ids, dtype=np.uint32))
        self._prefixes.append(
            FilePrefix(num_tokens=len(token_ids), salt=salt, inputs=inputs, num_pages=tuple(num_pages))
        )

    def _offset_of(self, page: bytes) -> int:
        """Return a page's offset; write the page if no equal page was written before."""
        key = hashlib.blake2b(page, digest_size=32).digest()
        offset = self._known.get(key)
        if offset is None:
            offset = self._known[key] = self._sizes["pages"]
            self._write("pages", page)
        return offset

    def finish(self) -> None:
        """Complete the file, and rename it to its path.

        Raises:
            PrefixFileError: It cannot be written. An older file is unchanged.
        """
        for name, parts in (("offsets", self._offsets), ("tokens", self._tokens)):
            for part in parts:
                self._write(name, part.astype(part.dtype.newbyteorder("<")).tobytes())
        listed = dump([prefix.entry() for prefix in self._prefixes]).encode()
        if len(listed) > MAX_LIST_BYTES:
            raise PrefixFileError(
                f"{self._path} would have a list of prefixes of {len(listed)} bytes, more than {MAX_LIST_BYTES}; save "
                "fewer prefixes in one file",
                code="unwritable",
            )
        self._write("prefixes", listed)
        header = self._contents().header()
        assert self._temporary is not None
        try:
            self._file.seek(0)
            self._file.write(len(header).to_bytes(LENGTH_BYTES, "little") + header)
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.chmod(self._temporary, 0o666 & ~_umask())
            os.replace(self._temporary, self._path)
        except OSError as error:
            raise self._cannot(error) from error
        self._temporary = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._temporary is not None:
            # Flushing the rest of an abandoned file may fail again.
            with contextlib.suppress(OSError):
                self._file.close()
            self._temporary.unlink(missing_ok=True)

    @property
    def num_bytes(self) -> int:
        """Bytes of the file so far, with its header."""
        return LENGTH_BYTES + len(self._contents().header()) + sum(self._sizes.values())

    def _contents(self) -> Contents:
        return Contents(self._origin, self._sizes, {name: digest.hexdigest() for name, digest in self._digests.items()})

    def _write(self, tensor: str, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise self._cannot(error) from error
        self._digests[tensor].update(data)
        self._sizes[tensor] += len(data)

    def _cannot(self, error: OSError) -> PrefixFileError:
        return PrefixFileError(f"{self._path} cannot be written: {error.strerror or error}", code="unwritable")
