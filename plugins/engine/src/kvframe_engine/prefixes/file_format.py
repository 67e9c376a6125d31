"""The file format of saved prefixes: pages and what they hold, and nothing executable.

It is a safetensors file (https://huggingface.co/docs/safetensors): eight bytes with the length of the header, the
header in JSON, and four tensors.

- ``pages``: the bytes of all pages; equal pages are stored once.
- ``offsets``: for each prefix and group, the offsets in ``pages`` of the pages that a request needs to continue.
- ``tokens``: the token ids of all prefixes.
- ``prefixes``: a JSON list of everything else. It has the keyed hashes of inputs (``kvframe.cache.events``), from which
  nothing can be learnt without the secret.

The header's metadata hold a checksum of each tensor (BLAKE2b, 256 bits), a checksum of the metadata, and the
properties of the model, its cache and the secret that must be equal in the engine that loads the file. The rest of the
header follows from these: a reader builds the header again and compares.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvframe import InputSequence
from kvframe.contract.errors import FileError
from kvframe.contract.files import as_text, parse_json, reason_of

FORMAT, VERSION = "kvframe.prefixes", 4
MAX_HEADER_BYTES = 1 << 20
MAX_LIST_BYTES = 4 << 20
"""The longest list of prefixes: a reader reads no more at once, even if a file says that the list is longer."""
LENGTH_BYTES = 8
"""The number of bytes before the header; they hold its length."""
_ALIGNMENT = 64
TENSORS: Mapping[str, tuple[str, int]] = {
    "pages": ("U8", 1),
    "offsets": ("U64", 8),
    "tokens": ("U32", 4),
    "prefixes": ("U8", 1),
}
"""The tensors, in their order: the safetensors name of the element type, and the bytes of one element."""
_MAX_SIZE = 2**63 - 1
_ENTRY_KEYS = {"num_tokens", "salt", "inputs", "num_pages"}

Offsets = npt.NDArray[np.uint64]
"""``[num_pages], uint64, host``: the offset of each page, in bytes."""


@attrs.frozen(kw_only=True)
class FilePrefix:
    """A file's description of one prefix.

    Attributes:
        num_tokens: Its number of tokens.
        salt: The salt of the requests that share it.
        inputs: The inputs of these requests, by name.
        num_pages: Per group, the number of pages that a request needs to continue after the prefix.
    """

    num_tokens: int
    salt: str
    inputs: Mapping[str, InputSequence]
    num_pages: tuple[int, ...]

    @classmethod
    def of(cls, value: Any) -> FilePrefix | None:
        """Return the prefix of an entry in a file's list, a parsed JSON value; None if the entry is invalid."""
        if not (isinstance(value, dict) and value.keys() == _ENTRY_KEYS):
            return None
        num_tokens, salt, listed_inputs, num_pages = (
            value["num_tokens"],
            value["salt"],
            value["inputs"],
            value["num_pages"],
        )
        if not (
            _is_count(num_tokens)
            and isinstance(salt, str)
            and _is_unicode(salt)
            and isinstance(listed_inputs, dict)
            and isinstance(num_pages, list)
            and all(map(_is_count, num_pages))
        ):
            return None
        inputs = {name: _as_input(each) for name, each in listed_inputs.items()}
        readable_inputs = {name: each for name, each in inputs.items() if each is not None}
        if len(readable_inputs) < len(inputs):
            return None
        return cls(num_tokens=num_tokens, salt=salt, inputs=readable_inputs, num_pages=tuple(num_pages))

    def entry(self) -> dict[str, Any]:
        """Return its entry in a file's list, as a JSON value."""
        inputs = {
            name: {"num_tokens": sequence.num_tokens, "key": sequence.key.hex()}
            for name, sequence in self.inputs.items()
        }
        return {
            "num_tokens": self.num_tokens,
            "salt": self.salt,
            "inputs": inputs,
            "num_pages": list(self.num_pages),
        }


@attrs.frozen
class Contents:
    """The contents of a header.

    Attributes:
        origin: The properties of the model, its cache and the secret that must be equal, as JSON values.
        sizes: Bytes of each tensor.
        checksums: Of each tensor, in hexadecimal.
    """

    origin: Mapping[str, Any]
    sizes: Mapping[str, int]
    checksums: Mapping[str, str]

    @classmethod
    def of(cls, value: Any) -> Contents | None:
        """Return the contents in a parsed JSON value; None if it is invalid."""
        if not (isinstance(value, dict) and value.keys() == {"origin", "sizes", "checksums"}):
            return None
        origin, sizes, checksums = value["origin"], value["sizes"], value["checksums"]
        if not (
            isinstance(origin, dict)
            and isinstance(sizes, dict)
            and isinstance(checksums, dict)
            and sizes.keys() == checksums.keys() == TENSORS.keys()
            and all(_is_count(size) and size % TENSORS[name][1] == 0 for name, size in sizes.items())
            and all(isinstance(each, str) for each in checksums.values())
        ):
            return None
        return cls(origin, sizes, checksums)

    def to_json(self) -> str:
        """Return the text that the header's checksum covers."""
        return dump({"origin": self.origin, "sizes": self.sizes, "checksums": self.checksums})

    def header(self) -> bytes:
        """Return the header, padded to its longest possible size for any tensor sizes and checksums."""
        as_if = attrs.evolve(self, sizes=dict.fromkeys(TENSORS, _MAX_SIZE), checksums=dict.fromkeys(TENSORS, "0" * 64))
        longest = len(as_if._header())
        return self._header().ljust(-(-longest // _ALIGNMENT) * _ALIGNMENT)

    def _header(self) -> bytes:
        contents = self.to_json()
        checksum = hashlib.blake2b(contents.encode(), digest_size=32).hexdigest()
        metadata = {"format": FORMAT, "version": str(VERSION), "contents": contents, "checksum": checksum}
        header: dict[str, Any] = {"__metadata__": metadata}
        start = 0
        for name, (dtype, item_bytes) in TENSORS.items():
            size = self.sizes[name]
            header[name] = {"dtype": dtype, "shape": [size // item_bytes], "data_offsets": [start, start + size]}
            start += size
        return dump(header).encode()


def is_prefix_file(path: Path) -> bool:
    """Return whether a file begins like one of saved prefixes, complete or not; raise ``FileError`` if unreadable."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            header = parse_json(as_text(file.read(length))) if length <= MAX_HEADER_BYTES else None
    except OSError as error:
        raise FileError(f"cannot be read: {reason_of(error)}") from error
    except FileError:
        return False
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    return isinstance(metadata, dict) and metadata.get("format") == FORMAT


def dump(value: Any) -> str:
    """Return the canonical JSON text of a value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


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
    return not any("\ud800" <= char <= "\udfff" for char in text)
