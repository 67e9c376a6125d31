"""The file of saved prefixes: bytes of pages and what they are the state of, nothing that runs.

It is a safetensors file (https://huggingface.co/docs/safetensors): eight bytes that say how long the header is, the
header in JSON, tensors. These are ``pages``, the bytes of all pages, each different one once; ``places``, for each
prefix and group, where in them its pages begin, those that a request needs to go on; ``tokens``, the token ids of all
prefixes; ``prefixes``, a JSON list of what else there is to say of each: of an input, its keyed hash
(``kvframe.cache.keys``), by which nobody finds out what it was of who has not the secret.

The header's metadata have a checksum of each tensor (BLAKE2b, 256 bits), one of themselves, and what of the model, its
cache and the secret has to be the same. All else in the header follows from them: a reader makes it anew and compares.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.cache.inputs import InputSequence
from kvframe.errors import PrefixFileError

FORMAT, VERSION = "kvframe.prefixes", 2
MAX_HEADER_BYTES = 1 << 20
MAX_LIST_BYTES = 4 << 20
"""Of the list of prefixes: what is read of a file at once is bounded, however large it says that it is."""
PIECE_BYTES = 1 << 20
_LENGTH_BYTES, _ALIGNMENT = 8, 64
_TENSORS: Mapping[str, tuple[str, int]] = {
    "pages": ("U8", 1),
    "places": ("U64", 8),
    "tokens": ("U32", 4),
    "prefixes": ("U8", 1),
}
_MAX_SIZE = 2**63 - 1

Places = npt.NDArray[np.uint64]
"""``[num_pages], uint64, host``: where pages begin, in bytes from the first one."""


@attrs.frozen(kw_only=True)
class FilePrefix:
    """What a file says of one prefix.

    Attributes:
        num_tokens: Its tokens.
        salt: Whom it was shared with.
        inputs: What its requests brought beside their tokens, as a cache sees it.
        num_pages: Per group, the pages that a request needs to go on behind it.
    """

    num_tokens: int
    salt: str
    inputs: Mapping[str, InputSequence]
    num_pages: tuple[int, ...]


@attrs.frozen
class _Contents:
    """What a header says: of the model and its cache, and of the tensors."""

    origin: Mapping[str, Any]
    sizes: Mapping[str, int]
    checksums: Mapping[str, str]

    def to_json(self) -> str:
        return _dump({"origin": self.origin, "sizes": self.sizes, "checksums": self.checksums})

    def header(self) -> bytes:
        """Return the header, padded to a length that its sizes and checksums do not change."""
        as_if = attrs.evolve(
            self, sizes=dict.fromkeys(_TENSORS, _MAX_SIZE), checksums=dict.fromkeys(_TENSORS, "0" * 64)
        )
        longest = len(as_if._header())
        return self._header().ljust(-(-longest // _ALIGNMENT) * _ALIGNMENT)

    def _header(self) -> bytes:
        contents = self.to_json()
        checksum = hashlib.blake2b(contents.encode(), digest_size=32).hexdigest()
        metadata = {"format": FORMAT, "version": str(VERSION), "contents": contents, "checksum": checksum}
        header: dict[str, Any] = {"__metadata__": metadata}
        start = 0
        for name, (dtype, item_bytes) in _TENSORS.items():
            size = self.sizes[name]
            header[name] = {"dtype": dtype, "shape": [size // item_bytes], "data_offsets": [start, start + size]}
            start += size
        return _dump(header).encode()


# --- writing ----------------------------------------------------------------------------------------------------------


class PrefixFileWriter:
    """Writes a file beside its place, and puts it there when it is whole: until then, what was there stays.

    A context: left without ``finish``, nothing is left behind.
    """

    def __init__(self, path: Path, origin: Mapping[str, Any]) -> None:
        """Begin.

        Args:
            path: Where the file is to be.
            origin: What has to be the same where it is loaded, as values of JSON.

        Raises:
            PrefixFileError: Nothing can be written there, or the origin is too long.
        """
        self._path = path.resolve()
        self._origin = origin
        self._digests = {name: hashlib.blake2b(digest_size=32) for name in _TENSORS}
        self._sizes = dict.fromkeys(_TENSORS, 0)
        self._known: dict[bytes, int] = {}
        self._places: list[Places] = []
        self._tokens: list[npt.NDArray[np.uint32]] = []
        self._prefixes: list[dict[str, Any]] = []
        if len(self._contents().header()) > MAX_HEADER_BYTES:
            raise PrefixFileError(
                f"{path} would have a header of more than {MAX_HEADER_BYTES} bytes", code="unwritable"
            )
        try:
            handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
            self._temporary: Path | None = Path(name)
            self._file: IO[bytes] = os.fdopen(handle, "wb")
            self._file.seek(_LENGTH_BYTES + len(self._contents().header()))
        except OSError as error:
            raise self._cannot(error) from error

    def add(
        self, token_ids: Sequence[int], salt: str, inputs: Mapping[str, InputSequence], pages: Sequence[Iterator[bytes]]
    ) -> None:
        """Add a prefix.

        Args:
            token_ids: Its tokens.
            salt: Whom it is shared with.
            inputs: What its requests bring beside their tokens.
            pages: Per group, the bytes of its pages.

        Raises:
            PrefixFileError: They cannot be written.
        """
        num_pages = []
        for of_group in pages:
            places = [self._place(page) for page in of_group]
            self._places.append(np.array(places, dtype=np.uint64))
            num_pages.append(len(places))
        self._tokens.append(np.array(token_ids, dtype=np.uint32))
        named = {name: {"num_tokens": each.num_tokens, "key": each.key.hex()} for name, each in inputs.items()}
        self._prefixes.append({"num_tokens": len(token_ids), "salt": salt, "inputs": named, "num_pages": num_pages})

    def _place(self, page: bytes) -> int:
        """Return where a page begins in the file, where it is written unless an equal one is."""
        key = hashlib.blake2b(page, digest_size=32).digest()
        place = self._known.get(key)
        if place is None:
            place = self._known[key] = self._sizes["pages"]
            self._write("pages", page)
        return place

    def finish(self) -> None:
        """Put the file in its place.

        Raises:
            PrefixFileError: It cannot be written; what was there is as it was.
        """
        for name, parts in (("places", self._places), ("tokens", self._tokens)):
            for part in parts:
                self._write(name, part.astype(part.dtype.newbyteorder("<")).tobytes())
        listed = _dump(self._prefixes).encode()
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
            self._file.write(len(header).to_bytes(_LENGTH_BYTES, "little") + header)
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
            # What is left to flush of a file that is given up may fail again.
            with contextlib.suppress(OSError):
                self._file.close()
            self._temporary.unlink(missing_ok=True)

    @property
    def num_bytes(self) -> int:
        """Bytes that the file has so far, its header included."""
        return _LENGTH_BYTES + len(self._contents().header()) + sum(self._sizes.values())

    def _contents(self) -> _Contents:
        return _Contents(self._origin, self._sizes, {name: each.hexdigest() for name, each in self._digests.items()})

    def _write(self, tensor: str, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise self._cannot(error) from error
        self._digests[tensor].update(data)
        self._sizes[tensor] += len(data)

    def _cannot(self, error: OSError) -> PrefixFileError:
        return PrefixFileError(f"{self._path} cannot be written: {error.strerror or error}", code="unwritable")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# --- reading ----------------------------------------------------------------------------------------------------------


class PrefixFileReader:
    """Reads a file, after it has checked that it is whole and that what it says of itself is so. A context.

    It believes nothing that the file says before it has seen that it is so, and has a few MiB of it in memory at most.

    Attributes:
        path: The file.
        origin: What has to be the same where it is loaded.
        prefixes: Its prefixes.
    """

    def __init__(self, path: Path) -> None:
        """Open a file, and read what it says of itself.

        Args:
            path: The file.

        Raises:
            PrefixFileError: It is no whole file of saved prefixes of this version.
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
            # Where each prefix's own begin: of a file with many, nothing is counted again for each.
            self._first_tokens = [0, *accumulate(each.num_tokens for each in self.prefixes)]
            self._first_places = [0, *accumulate(sum(each.num_pages) for each in self.prefixes)]
        except BaseException:
            self._file.close()
            raise

    def check(self) -> None:
        """Read all of it once; raises ``PrefixFileError`` where a bit is not as it was written."""
        for name in _TENSORS:
            digest = hashlib.blake2b(digest_size=32)
            for start in range(0, self._contents.sizes[name], PIECE_BYTES):
                digest.update(self._tensor(name, start, min(PIECE_BYTES, self._contents.sizes[name] - start)))
            if digest.hexdigest() != self._contents.checksums[name]:
                raise self._damaged(f"the checksum of its {name} is another")

    def tokens(self, index: int) -> npt.NDArray[np.uint32]:
        """Return the token ids of a prefix, ``[num_tokens], uint32, host``."""
        num_tokens = self.prefixes[index].num_tokens
        return self._numbers("tokens", "<u4", self._first_tokens[index], num_tokens).astype(np.uint32)

    def places(self, index: int) -> list[Places]:
        """Return per group the places of a prefix's pages."""
        start = self._first_places[index]
        found = []
        for count in self.prefixes[index].num_pages:
            found.append(self._numbers("places", "<u8", start, count).astype(np.uint64))
            start += count
        return found

    def read_page(self, place: int, into: memoryview) -> None:
        """Read a page.

        Args:
            place: Where it begins.
            into: Where to, as long as a page.

        Raises:
            PrefixFileError: The file has changed since it was checked.
        """
        self._file.seek(self._start + place)
        if self._file.readinto(into) != len(into):  # type: ignore[attr-defined]
            raise self._damaged("it became shorter while it was read")

    @property
    def num_page_bytes(self) -> int:
        """Bytes of its pages."""
        return self._contents.sizes["pages"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _read_header(self) -> tuple[int, _Contents]:
        num_bytes = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._read(_LENGTH_BYTES), "little")
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
        start = _LENGTH_BYTES + length
        if start + sum(contents.sizes.values()) != num_bytes:
            raise self._damaged(
                f"it has {num_bytes} bytes, and its header tells of {start + sum(contents.sizes.values())}"
            )
        return start, contents

    def _as_contents(self, text: object) -> _Contents:
        contents = self._parse(text.encode(errors="replace"), "header") if isinstance(text, str) else None
        if not (isinstance(contents, dict) and contents.keys() == {"origin", "sizes", "checksums"}):
            raise self._damaged("its header is not as it was written")
        origin, sizes, checksums = contents["origin"], contents["sizes"], contents["checksums"]
        if not (
            isinstance(origin, dict)
            and isinstance(sizes, dict)
            and isinstance(checksums, dict)
            and sizes.keys() == checksums.keys() == _TENSORS.keys()
            and all(_is_count(size) and size % _TENSORS[name][1] == 0 for name, size in sizes.items())
            and all(isinstance(each, str) for each in checksums.values())
        ):
            raise self._damaged("its header is not as it was written")
        return _Contents(origin, sizes, checksums)

    def _read_list(self) -> list[FilePrefix]:
        size = self._contents.sizes["prefixes"]
        if size > MAX_LIST_BYTES:
            raise self._damaged(f"its list of prefixes has {size} bytes, more than {MAX_LIST_BYTES}")
        listed = self._parse(self._tensor("prefixes", 0, size), "list of prefixes")
        prefixes = [_as_prefix(each) for each in listed] if isinstance(listed, list) else [None]
        known = [each for each in prefixes if each is not None]
        if len(known) < len(prefixes):
            raise self._damaged("its list of prefixes is not as it was written")
        if 4 * sum(each.num_tokens for each in known) != self._contents.sizes["tokens"]:
            raise self._damaged("its prefixes have other numbers of tokens than it holds")
        if 8 * sum(sum(each.num_pages) for each in known) != self._contents.sizes["places"]:
            raise self._damaged("its prefixes have other numbers of pages than it holds")
        return known

    def _tensor(self, name: str, start: int, num_bytes: int) -> bytes:
        """Return a part of a tensor."""
        offset = self._start
        for other in _TENSORS:
            if other == name:
                break
            offset += self._contents.sizes[other]
        self._file.seek(offset + start)
        return self._read(num_bytes)

    def _numbers(self, name: str, dtype: str, start: int, count: int) -> npt.NDArray[Any]:
        item_bytes = _TENSORS[name][1]
        return np.frombuffer(self._tensor(name, item_bytes * start, item_bytes * count), dtype=dtype)

    def _read(self, num_bytes: int) -> bytes:
        parts, left = [], num_bytes
        while left:
            try:
                part = self._file.read(left)
            except OSError as error:
                why = error.strerror or error
                raise PrefixFileError(f"{self.path} cannot be read: {why}", code="unreadable") from error
            if not part:
                raise self._damaged("it ends too early")
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def _parse(self, data: bytes, what: str) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self._other(f"its {what} is no JSON") from error

    def _other(self, why: str) -> PrefixFileError:
        return PrefixFileError(f"{self.path} is no file of saved prefixes, or is damaged: {why}", code="damaged")

    def _damaged(self, why: str) -> PrefixFileError:
        return PrefixFileError(f"{self.path} is damaged: {why}", code="damaged")


def _as_prefix(value: Any) -> FilePrefix | None:
    """Return what an entry of the list says; None if it is no such thing."""
    if not (isinstance(value, dict) and value.keys() == {"num_tokens", "salt", "inputs", "num_pages"}):
        return None
    num_tokens, salt, given, num_pages = value["num_tokens"], value["salt"], value["inputs"], value["num_pages"]
    if not (
        _is_count(num_tokens)
        and isinstance(salt, str)
        and _is_unicode(salt)
        and isinstance(given, dict)
        and isinstance(num_pages, list)
        and all(map(_is_count, num_pages))
    ):
        return None
    inputs = {name: _as_input(each) for name, each in given.items()}
    known = {name: each for name, each in inputs.items() if each is not None}
    if len(known) < len(inputs):
        return None
    return FilePrefix(num_tokens=num_tokens, salt=salt, inputs=known, num_pages=tuple(num_pages))


def _as_input(value: Any) -> InputSequence | None:
    if not (isinstance(value, dict) and value.keys() == {"num_tokens", "key"}):
        return None
    num_tokens, key = value["num_tokens"], value["key"]
    if not (_is_count(num_tokens) and num_tokens and isinstance(key, str)):
        return None
    try:
        return InputSequence(num_tokens, bytes.fromhex(key))
    except ValueError:
        return None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_SIZE


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= each <= "\udfff" for each in text)


def _dump(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
