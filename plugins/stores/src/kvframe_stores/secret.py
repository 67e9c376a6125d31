"""Reads the secret that a stack's ``[cache] key`` gives, or draws a random one."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from kvframe import Stack
from kvframe.contract.errors import FileError, StackError, shown
from kvframe.contract.files import read_bytes
from kvframe.contract.foreign import safe_reason
from kvframe.contract.page_store import PageStore

SECRET_BYTES = 32
_MAX_KEY_FILE = 4096
_DIGITS = re.compile(r"[0-9a-fA-F]+")


def choose_secret(stack: Stack, stores: Sequence[PageStore]) -> bytes:
    """Return the secret of a stack's ``[cache] key``; without a key, that of its page stores, or a random one.

    Raises:
        StackError: The key is wrong; or the stack has page stores and no key, and no store has a secret, or it cannot
            be used.
    """
    if stack.cache.key is None and stores:
        for store in stores:
            try:
                secret = store.local_secret()
            except Exception as error:
                raise StackError(f"{stack.source}: page store {store.name!r}: {safe_reason(error)}") from error
            if secret is not None:
                return secret
        raise StackError(
            f"{stack.source}: page store {stores[0].name!r} keeps no secret, and without one no other engine finds the "
            "pages; set key in [cache] to 64 hexadecimal digits, or to a file of them, the same for all engines"
        )
    return _read_secret(stack.cache.key, stack.source)


def _read_secret(key: str | None, source: str) -> bytes:
    """Return the secret of a stack's ``[cache] key``, or a random one if the stack has no key.

    The key is 64 hexadecimal digits, or a file that holds them. The ``StackError`` for another one does not repeat what
    may be a part of a secret.
    """
    if key is None:
        return secrets.token_bytes(SECRET_BYTES)
    if _DIGITS.fullmatch(key):
        return _secret_of(key, f"{source}: cache.key has")
    try:
        digits = read_bytes(Path(key), _MAX_KEY_FILE).decode("ascii", "replace").strip()
    except FileError as error:
        raise StackError(f"{source}: cache.key: the file {shown(key)} {error}") from error
    return _secret_of(digits if _DIGITS.fullmatch(digits) else "", f"{source}: cache.key: the file {shown(key)} has")


def _secret_of(digits: str, subject: str) -> bytes:
    if len(digits) != 2 * SECRET_BYTES:
        raise StackError(f"{subject} {len(digits)} hexadecimal digits; a key has {2 * SECRET_BYTES}")
    return bytes.fromhex(digits)
