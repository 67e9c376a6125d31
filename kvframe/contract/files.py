"""Reads the files that a user names, with bounded time and memory.

For anything at a path (nothing, a folder, an endless device, bytes, JSON that is nested a million times), a function of
this module returns or raises ``FileError``. The sentence of the error lacks its subject; the caller puts the file's
name before it.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from kvframe.contract.errors import FileError

MAX_BYTES = 64 << 20
"""The most bytes that are read from a file."""

MAX_TOML_BYTES = 1 << 20
"""The most bytes that are read from a TOML file: the parser takes time quadratic in the size of a table."""

MAX_DEPTH = 64
"""The deepest nesting of tables and lists."""

MAX_BITS = 64
"""The most bits of a whole number: TOML's own limit, and more than any size or token id needs."""

_PART = r"""[\w"'-]++[ \t]*+"""
_DEEP_KEY = re.compile(rf"""(?<![\w"'-])(?:{_PART}\.[ \t]*+){{{MAX_DEPTH}}}""")


def exists(path: Path) -> bool:
    """Return whether ``path`` exists; raise ``FileError`` if it cannot be a path."""
    try:
        return path.exists()
    except (OSError, ValueError) as error:  # for example, the name is too long
        raise FileError(f"cannot be read: {reason_of(error)}") from error


def read_bytes(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a file, of at most ``max_bytes``; raise ``FileError`` if it cannot be read, or is longer.

    It may also be a device, or a pipe: one that no process has open for writing is empty.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            os.set_blocking(file.fileno(), True)
            return read_stream(file, max_bytes)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise FileError(f"cannot be read: {reason_of(error)}") from error


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting: a blocking open of a pipe waits until a process opens it for writing."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_stream(file: BinaryIO, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the rest of an open file; raise ``FileError`` if it is longer than ``max_bytes``."""
    content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise FileError(f"holds more than {max_bytes >> 20} MiB")
    return content


def reason_of(error: OSError | ValueError) -> str:
    """Return why a file cannot be opened, without the file's name."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def as_text(content: bytes) -> str:
    """Return bytes as UTF-8 text, without a byte order mark; raise ``FileError`` if they are not UTF-8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(f"is not UTF-8 text: {error.reason} at byte {error.start}") from error


def parse_json(text: str) -> Any:
    """Return the value of a JSON text; raise ``FileError`` if it is invalid or nested too deeply."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise FileError(f"is not valid JSON: it is nested more than {MAX_DEPTH} times") from error
    except ValueError as error:
        raise FileError(f"is not valid JSON: {_without_advice(error)}") from error
    _check_values(value)
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """Return the table of a TOML text; raise ``FileError`` if it is invalid or nested too deeply."""
    try:
        if _DEEP_KEY.search(text):
            raise RecursionError
        value = tomllib.loads(text)
    except RecursionError as error:
        raise FileError(f"is not valid TOML: it is nested more than {MAX_DEPTH} times") from error
    except ValueError as error:
        raise FileError(f"is not valid TOML: {_without_advice(error)}") from error
    _check_values(value)
    return value


def read_json(path: Path) -> Any:
    """Return the value in a JSON file; raise ``FileError`` if the file cannot be read or is invalid."""
    return parse_json(as_text(read_bytes(path)))


def read_toml(path: Path) -> dict[str, Any]:
    """Return the table in a TOML file; raise ``FileError`` if the file cannot be read or is invalid."""
    return parse_toml(as_text(read_bytes(path, MAX_TOML_BYTES)))


def _without_advice(error: ValueError) -> str:
    """Return a parser's message without Python's advice to programmers about numbers with thousands of digits."""
    message = str(error)
    return "a number has thousands of digits" if "set_int_max_str_digits" in message else message


def _check_values(value: Any) -> None:
    """Raise for values that recursive code, or a print of them, could not handle."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise FileError(f"is nested more than {MAX_DEPTH} times")
        inner: list[Any] = []
        for item in level:
            if isinstance(item, Mapping):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
            elif isinstance(item, int) and item.bit_length() > MAX_BITS:
                raise FileError(f"holds a whole number of {item.bit_length():,} bits; {MAX_BITS} are the most")
        level = inner
