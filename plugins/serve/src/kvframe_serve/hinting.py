"""Hints of clients: read from headers, and limited by the caller's key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvframe import Hints
from kvframe.contract import RequestError, shown

PRIORITY_HEADER, KEEP_HEADER, SESSION_HEADER = b"x-request-priority", b"x-keep-seconds", b"x-session-id"


@attrs.frozen(kw_only=True)
class HintLimits:
    """The most that a caller's hints count for.

    Attributes:
        min_priority: The smallest priority: smaller ones count as this one.
        max_keep_seconds: The most seconds for which prefixes are kept; longer times count as these.
    """

    min_priority: int = 0
    max_keep_seconds: int = 3600

    def limited(self, hints: Hints) -> Hints:
        """Return hints that keep the limits."""
        keep = hints.keep_seconds
        if hints.priority >= self.min_priority and (keep is None or keep <= self.max_keep_seconds):
            return hints
        keep = None if keep is None else min(keep, self.max_keep_seconds)
        return attrs.evolve(hints, priority=max(hints.priority, self.min_priority), keep_seconds=keep)


ALL_LIMITS = HintLimits()
"""The limits of a server whose stack says nothing."""


def hints_of_headers(headers: Mapping[bytes, bytes]) -> Mapping[str, Any]:
    """Return the hints that headers give, by name; a hint in the body replaces that of a header.

    Raises:
        RequestError: A header is no number, or too long (``bad_hints``).
    """
    hints: dict[str, Any] = {}
    for name, header, kind in (("priority", PRIORITY_HEADER, int), ("keep_seconds", KEEP_HEADER, float)):
        if (value := headers.get(header)) is not None:
            text = value.decode("latin-1")
            try:
                hints[name] = kind(text)
            except ValueError:
                raise RequestError(
                    f"the header {header.decode()} must be a number, not {shown(text)}", code="bad_hints"
                ) from None
    if (value := headers.get(SESSION_HEADER)) is not None:
        hints["session_id"] = value.decode("latin-1")
    Hints(**hints)
    return hints
