"""Quotas of samples and of bytes of bodies: how many all clients, and one key, may use at once."""

from __future__ import annotations

from collections import Counter

from kvframe.contract import KVFrameError


class BusyError(KVFrameError):
    """A quota has too little left for a request."""


class Quota:
    """Counts what requests use.

    Invariant: at most ``max_total`` are in use, and at most ``max_per_key`` by one key.

    Attributes:
        num_used: How many are in use.
    """

    def __init__(self, unit: str, *, max_total: int, max_per_key: int) -> None:
        """Start with nothing in use; ``unit`` says in errors what is counted."""
        self.num_used = 0
        self._unit = unit
        self._max_total = max_total
        self._max_per_key = min(max_per_key, max_total)
        self._of_keys: Counter[str] = Counter()

    def add(self, key: str, count: int) -> None:
        """Count more for a key; nothing is counted if there are too few.

        Raises:
            BusyError: There are too few.
        """
        if self._of_keys[key] + count > self._max_per_key:
            raise BusyError(
                f"{self._of_keys[key]:,} of the {self._max_per_key:,} {self._unit} that one key may have at once are "
                f"in use, and this request has {count:,} more; try again later"
            )
        if self.num_used + count > self._max_total:
            raise BusyError(
                f"{self.num_used:,} of {self._max_total:,} {self._unit} are in use, and this request has {count:,} "
                "more; try again later"
            )
        self.num_used += count
        self._of_keys[key] += count

    def remove(self, key: str, count: int) -> None:
        """Count less for a key."""
        self.num_used -= count
        self._of_keys[key] -= count
        if not self._of_keys[key]:
            del self._of_keys[key]


class Share:
    """What one request uses of a quota."""

    def __init__(self, quota: Quota, key: str) -> None:
        """Start with nothing."""
        self._quota = quota
        self._key = key
        self._count = 0

    def grow(self, count: int) -> None:
        """Use more, until it is ``count``.

        Raises:
            BusyError: There are too few. Everything is given back: no other request is refused for one that is.
        """
        if count > self._count:
            try:
                self._quota.add(self._key, count - self._count)
            except BusyError:
                self.free()
                raise
            self._count = count

    def free(self) -> None:
        """Give everything back. It may be called twice."""
        count, self._count = self._count, 0
        if count:
            self._quota.remove(self._key, count)
