"""Cache salts: only requests with the same salt share a cached prefix."""

from __future__ import annotations

from collections.abc import Sequence

from kvframe.cache.arguments import check_salt as check_salt
from kvframe.contract.errors import RequestError


def salt_of_each(cache_salt: str | Sequence[str], num_requests: int) -> Sequence[str]:
    """Return a salt for each request of a batch.

    Args:
        cache_salt: One for all, or one for each.
        num_requests: The number of requests.

    Raises:
        RequestError: There are more or fewer salts than requests (``bad_salt``).
    """
    if isinstance(cache_salt, str) or not isinstance(cache_salt, Sequence):
        return [cache_salt] * num_requests
    if len(cache_salt) != num_requests:
        raise RequestError(f"{num_requests} requests have {len(cache_salt)} values of cache_salt", code="bad_salt")
    return cache_salt
