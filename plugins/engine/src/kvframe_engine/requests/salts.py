"""Cache salts and owners: which requests share cached prefixes, and which share the engine equally."""

from __future__ import annotations

from collections.abc import Sequence

from kvframe import check_salt as check_salt
from kvframe.contract.errors import RequestError, shown

MAX_OWNER_CHARS = 1024
"""The most characters of an owner's name."""


def check_owner(owner: object) -> None:
    """Refuse an owner that is not a string, or is too long, with a ``RequestError`` (``bad_owner``)."""
    if not isinstance(owner, str) or len(owner) > MAX_OWNER_CHARS:
        raise RequestError(
            f"owner must be a string of at most {MAX_OWNER_CHARS:,} characters, not {shown(owner)}", code="bad_owner"
        )


def salt_of_each(cache_salt: str | Sequence[str], num_requests: int) -> Sequence[str]:
    """Return a salt for each request of a batch.

    Args:
        cache_salt: One for all, or one for each.
        num_requests: The number of requests.

    Raises:
        RequestError: There are more or fewer salts than requests (``bad_salt``).
    """
    return _one_for_each(cache_salt, num_requests, "cache_salt", "bad_salt")


def owner_of_each(owner: str | Sequence[str], num_requests: int) -> Sequence[str]:
    """Return an owner for each request of a batch, as ``salt_of_each`` returns salts (``bad_owner``)."""
    return _one_for_each(owner, num_requests, "owner", "bad_owner")


def _one_for_each(values: str | Sequence[str], num_requests: int, name: str, code: str) -> Sequence[str]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        return [values] * num_requests
    if len(values) != num_requests:
        raise RequestError(f"{num_requests} requests have {len(values)} values of {name}", code=code)
    return values
