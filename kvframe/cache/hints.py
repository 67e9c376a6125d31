"""What senders hint of their requests: how urgent they are, and for how long their cached pages are needed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.contract.errors import RequestError, shown

MAX_PRIORITY = 2**31 - 1
"""The greatest amount of a priority."""

MAX_KEEP_SECONDS = 10**9
"""Longer times for which a prefix is needed count as this one."""

MAX_SESSION_LENGTH = 1024
"""The most characters of a session's id."""

_NOT_USED, _NOT_NEEDED, _UNKNOWN = -2.0, -1.0, 0.0
"""In place of the time until which a page is needed: no request used it yet, none needs it, no request says more."""
_NO_LEVEL = int(np.iinfo(np.int64).max)
_MS = 1000.0


def bad_hints(message: str) -> RequestError:
    """Return the error for a wrong hint."""
    return RequestError(message, code="bad_hints")


def _check_priority(instance: object, attribute: attrs.Attribute[int], value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or abs(int(value)) > MAX_PRIORITY:
        raise bad_hints(f"priority must be a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}, not {shown(value)}")


def _check_seconds(instance: object, attribute: attrs.Attribute[float | None], value: Any) -> None:
    if value is None:
        return
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:
        raise bad_hints(f"keep_seconds must be a number of seconds, at least 0, or None, not {shown(value)}")


def _check_session(instance: object, attribute: attrs.Attribute[str], value: Any) -> None:
    if not isinstance(value, str) or len(value) > MAX_SESSION_LENGTH:
        raise bad_hints(f"session_id must be a string of at most {MAX_SESSION_LENGTH:,} characters, not {shown(value)}")


@attrs.frozen(kw_only=True)
class Hints:
    """What the sender of a request knows of it. Hints change no token; policies decide what they do with them.

    Attributes:
        priority: A request with a smaller number is more urgent, as in vLLM.
        keep_seconds: For how long after the request's end its prefix will be needed: such as the time in which the next
            turn of a chat comes. 0: the prefix is not needed again, as for a prompt that is sent once. None: that is
            not known.
        session_id: The chat or the agent that sends it; empty for none. The newest request of an owner's session
            replaces the earlier ones: what only these used is not needed again, and their hints no longer count.
    """

    priority: int = attrs.field(default=0, validator=_check_priority)
    keep_seconds: float | None = attrs.field(default=None, validator=_check_seconds)
    session_id: str = attrs.field(default="", validator=_check_session)


NO_HINTS = Hints()
"""The hints of a request whose sender gives none."""


@attrs.frozen
class KeptLimit:
    """How much requests keep by hints.

    Attributes:
        share: The share of the pool that the requests of one owner may keep.
        now: Returns the seconds of a clock that never goes back.
    """

    share: float
    now: Callable[[], float]


class HintedPages:
    """What the requests that used each page hint of it, by the page's index in the pool.

    A page is needed for as long as any of its requests says, and as urgent as the most urgent one. So the beginning of
    a prefix is worth as much as its end at least. The pages that one owner's requests keep have a limit: a request that
    would exceed it keeps nothing.

    A page that only requests of one session used is needed as the newest one of them says.

    Invariant: ``_kept_bytes`` counts exactly the pages whose ``_owner`` is not 0.
    """

    def __init__(self, is_used: npt.NDArray[np.bool_], now: Callable[[], float], max_kept_bytes: int) -> None:
        """Start without hints.

        Args:
            is_used: ``[n], bool, host``: whether a request used each page already.
            now: Returns the seconds of a clock that never goes back.
            max_kept_bytes: The most bytes that requests of one owner keep.
        """
        self.now = now
        self.max_kept_bytes = max_kept_bytes
        self._until = np.where(is_used, _UNKNOWN, _NOT_USED)
        self._level = np.where(is_used, 0, _NO_LEVEL)
        self._owner, self._bytes = np.zeros((2, len(is_used)), dtype=np.int64)
        self._numbers: dict[str, int] = {}
        self._kept_bytes: Counter[int] = Counter()
        # The session whose requests alone used each page, and its block id; None if no request named a session.
        self._session: npt.NDArray[np.int64] | None = None
        self._block_ids = np.zeros(0, dtype=np.int32)

    def kept_bytes(self, owner: str) -> int:
        """Return the bytes of the pages that an owner's requests keep."""
        return self._kept_bytes[self._numbers.get(owner, 0)]

    def use(
        self,
        block_ids: npt.NDArray[np.int32],
        pool_indices: npt.NDArray[np.intp],
        num_bytes: npt.NDArray[np.int64],
        hints: Hints,
        owner: str,
    ) -> npt.NDArray[np.int32]:
        """Record the hints of a request that used some pages, each once, of these sizes.

        Returns:
            The block ids of other pages, which only earlier requests of its session used: they are not needed again.
        """
        replaced = self._use_in_session(block_ids, pool_indices, hints.session_id, owner)
        now, keep = self.now(), hints.keep_seconds
        keep = None if keep is None else float(min(keep, MAX_KEEP_SECONDS))
        until = self._until[pool_indices]
        is_over = (until > 0) & (until <= now)
        if np.count_nonzero(is_over):
            self._end(pool_indices[is_over])
            until[is_over] = _UNKNOWN
        new = _UNKNOWN if keep is None else now + keep if keep else _NOT_NEEDED
        if new > 0:
            number = self._numbers.setdefault(owner, len(self._numbers) + 1)
            is_later = until < new
            indices, sizes = pool_indices[is_later], num_bytes[is_later]
            num_more = int(sizes[self._owner[indices] != number].sum())
            if self._kept_bytes[number] + num_more > self.max_kept_bytes:
                new = _UNKNOWN
            else:
                self._end(indices)
                self._owner[indices], self._bytes[indices] = number, sizes
                self._kept_bytes[number] += int(sizes.sum())
        self._until[pool_indices] = np.maximum(until, new)
        self._level[pool_indices] = np.minimum(self._level[pool_indices], hints.priority)
        return replaced

    def _use_in_session(
        self, block_ids: npt.NDArray[np.int32], pool_indices: npt.NDArray[np.intp], session_id: str, owner: str
    ) -> npt.NDArray[np.int32]:
        """Drop the hints of a session's earlier requests; return the blocks that only these used."""
        if self._session is None:
            if not session_id:
                return block_ids[:0]
            self._session = np.zeros(len(self._until), dtype=np.int64)
            self._block_ids = np.zeros(len(self._until), dtype=np.int32)
        # The hash of strings has a secret, so no client finds the number of another session.
        number = (hash((owner, session_id)) or 1) if session_id else 0
        is_first = self._until[pool_indices] == _NOT_USED
        is_only = is_first | (self._session[pool_indices] == number)
        earlier = np.flatnonzero(self._session == number) if number else pool_indices[:0]
        self._end(earlier)
        self._until[earlier], self._level[earlier] = _NOT_NEEDED, _NO_LEVEL
        self._session[pool_indices] = np.where(is_only, number, 0)
        self._block_ids[pool_indices] = block_ids
        return self._block_ids[np.setdiff1d(earlier, pool_indices, assume_unique=True)]

    def _end(self, pool_indices: npt.NDArray[np.intp] | slice) -> None:
        """Count pages as kept by no owner."""
        owners = self._owner[pool_indices]
        for number in np.unique(owners[owners != 0]).tolist():
            self._kept_bytes[number] -= int(self._bytes[pool_indices][owners == number].sum())
        self._owner[pool_indices] = 0

    def forget(self, pool_indices: npt.NDArray[np.intp] | slice) -> None:
        """Drop the hints of pages whose content ended."""
        self._end(pool_indices)
        self._until[pool_indices], self._level[pool_indices] = _NOT_USED, _NO_LEVEL
        if self._session is not None:
            self._session[pool_indices] = 0

    def resize(self, num_new: int, max_kept_bytes: int) -> None:
        """Add entries for more pages, and set another limit."""
        self.max_kept_bytes = max_kept_bytes
        self._until = np.append(self._until, np.full(num_new, _NOT_USED))
        self._level = np.append(self._level, np.full(num_new, _NO_LEVEL))
        self._owner, self._bytes = (np.append(each, np.zeros(num_new, np.int64)) for each in (self._owner, self._bytes))
        if self._session is not None:
            self._session = np.append(self._session, np.zeros(num_new, np.int64))
            self._block_ids = np.append(self._block_ids, np.zeros(num_new, np.int32))

    # --- what policies and tiers are given ----------------------------------------------------------------------------

    def may_be_needed(self, pool_indices: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """Return whether each page may be needed: not if a request says that it is not, and none says more."""
        may_be: npt.NDArray[np.bool_] = self._until[pool_indices] != _NOT_NEEDED
        return may_be

    def levels(self, pool_indices: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
        """Return the smallest priority of the requests that used each page; 0 without a request."""
        levels = self._level[pool_indices]
        return np.where(levels == _NO_LEVEL, 0, levels)

    def seconds_left(self, pool_indices: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
        """Return for how many seconds each page is needed; 0 if it is not, NaN if no request says, or time is over."""
        until = self._until[pool_indices]
        seconds = np.maximum(until - self.now(), 0.0)
        seconds[(seconds == 0.0) & (until != _NOT_NEEDED)] = math.nan
        return seconds

    def ends(self, pool_indices: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
        """Return until when each page is needed, in milliseconds; 0 for pages that are not."""
        until = self._until[pool_indices]
        return np.where(until > self.now(), np.ceil(until * _MS), 0).astype(np.int64)

    def now_ms(self) -> int:
        """Return the time as in ``ends``."""
        return int(self.now() * _MS)

    def stop(self, pool_indices: npt.NDArray[np.intp]) -> None:
        """Record that the time is over for which pages were needed."""
        self._end(pool_indices)
        self._until[pool_indices] = _UNKNOWN
