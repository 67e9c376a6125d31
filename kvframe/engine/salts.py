"""Who shares a cached prefix with whom: requests of one salt do, and no others."""

from __future__ import annotations

from collections.abc import Sequence

from kvframe.errors import RequestError, shown

MAX_SALT_CHARS = 4096
"""Characters of a salt: it is read whenever a request starts."""


def check_salt(salt: object) -> None:
    """Refuse a salt that is not Unicode text, or too long, with a ``RequestError`` (``bad_salt``)."""
    if not isinstance(salt, str):
        raise RequestError(f"cache_salt must be a string, not {shown(salt)}", code="bad_salt")
    if len(salt) > MAX_SALT_CHARS:
        raise RequestError(
            f"cache_salt has {len(salt):,} characters, and may have {MAX_SALT_CHARS:,}; give a hash of it",
            code="bad_salt",
        )
    try:
        salt.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"cache_salt is not Unicode text: {error.reason}", code="bad_salt") from error


def salt_of_each(cache_salt: str | Sequence[str], num_requests: int) -> Sequence[str]:
    """Return a salt for each request of a batch.

    Args:
        cache_salt: One for all, or one for each.
        num_requests: How many there are.

    Raises:
        RequestError: There are more or fewer (``bad_salt``).
    """
    if isinstance(cache_salt, str) or not isinstance(cache_salt, Sequence):
        return [cache_salt] * num_requests
    if len(cache_salt) != num_requests:
        raise RequestError(f"{num_requests} requests have {len(cache_salt)} values of cache_salt", code="bad_salt")
    return cache_salt
