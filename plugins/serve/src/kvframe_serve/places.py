"""Places for samples and for bytes of bodies: how many there are at once, of all clients and of one key."""

from __future__ import annotations

from collections import Counter

from kvframe.contract import KVFrameError


class BusyError(KVFrameError):
    """There are too few free places for a request."""


class Places:
    """Counts what requests hold.

    Invariant: at most ``max_total`` are taken, and at most ``max_per_key`` by one key.

    Attributes:
        num_taken: The places that are taken.
    """

    def __init__(self, unit: str, *, max_total: int, max_per_key: int) -> None:
        """Start with all places free; ``unit`` says in errors what they are for."""
        self.num_taken = 0
        self._unit = unit
        self._max_total = max_total
        self._max_per_key = min(max_per_key, max_total)
        self._of_keys: Counter[str] = Counter()

    def add(self, key: str, count: int) -> None:
        """Take places for a key; nothing is taken if there are too few.

        Raises:
            BusyError: There are too few.
        """
        if self._of_keys[key] + count > self._max_per_key:
            raise BusyError(
                f"{self._of_keys[key]:,} of the {self._max_per_key:,} {self._unit} that one key may have at once are "
                f"in use, and this request has {count:,} more; try again later"
            )
        if self.num_taken + count > self._max_total:
            raise BusyError(
                f"{self.num_taken:,} of {self._max_total:,} {self._unit} are in use, and this request has {count:,} "
                "more; try again later"
            )
        self.num_taken += count
        self._of_keys[key] += count

    def remove(self, key: str, count: int) -> None:
        """Give places of a key back."""
        self.num_taken -= count
        self._of_keys[key] -= count
        if not self._of_keys[key]:
            del self._of_keys[key]


class Place:
    """The places of one request."""

    def __init__(self, places: Places, key: str) -> None:
        """Start without a place."""
        self._places = places
        self._key = key
        self._count = 0

    def grow(self, count: int) -> None:
        """Take further places until there are ``count``.

        Raises:
            BusyError: There are too few. All places are given back: no other request is refused for one that is.
        """
        if count > self._count:
            try:
                self._places.add(self._key, count - self._count)
            except BusyError:
                self.free()
                raise
            self._count = count

    def free(self) -> None:
        """Give all places back. It may be called twice."""
        count, self._count = self._count, 0
        if count:
            self._places.remove(self._key, count)
