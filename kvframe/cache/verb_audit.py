"""Debug mode: a cache manager that is audited after every verb, at the cost of time in proportion to the pool."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

READERS = frozenset(("audit", "block_ids", "find", "has_room", "missing_inputs", "published", "row"))
"""Public methods of the manager that change nothing; all others are verbs."""


class Audited(Protocol):
    """What has verbs, and can say whether it is whole."""

    def audit(self) -> None:
        """Check that it is.

        Raises:
            AssertionError: It is not.
        """


def audit_each_verb(manager: Audited) -> None:
    """Let every verb of a manager end with an audit, whether it returns or raises.

    The verbs are replaced on this one manager, so that others pay nothing.

    Args:
        manager: A cache manager. From now on its verbs raise ``AssertionError`` where it is not as it must be; the
            text names the verb that was the last.
    """
    kind = type(manager)
    for name in dir(kind):
        if not name.startswith("_") and name not in READERS and callable(getattr(kind, name)):
            setattr(manager, name, _audited(manager, name, getattr(manager, name)))


def _audited(manager: Audited, name: str, verb: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(verb)
    def audited(*args: Any, **kwargs: Any) -> Any:
        try:
            return verb(*args, **kwargs)
        finally:
            try:
                manager.audit()
            except AssertionError as error:
                raise AssertionError(f"the cache is broken after {name!r}: {error}") from error

    return audited
