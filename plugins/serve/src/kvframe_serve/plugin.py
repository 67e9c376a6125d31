"""The manifest: it checks the server's limits from ``[plugin.serve]`` of the stack file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvframe.contract import StackError, hookimpl

NUMBERS = (
    "max_requests",
    "max_requests_per_key",
    "max_new_tokens",
    "max_logprobs",
    "max_body_bytes",
    "max_connections",
    "client_seconds",
    "read_seconds",
    "read_memory_mb",
)
"""The keys whose values are whole numbers; ``answers`` is a name. ``limits.Limits`` describes all of them."""

HINT_LIMITS = ("min_priority", "max_keep_seconds")
"""The keys that limit hints: whole numbers, the second one not negative; and those of each table in ``key_limits``."""

SETTINGS: dict[str, Any] = {}
"""The settings of the stack that was loaded last."""


@hookimpl
def kvframe_configure(settings: Mapping[str, Any]) -> None:
    """Read the limits from ``[plugin.serve]``.

    Raises:
        StackError: There is another key, or a value is wrong.
    """
    SETTINGS.clear()
    SETTINGS.update(settings)
    check_settings()


def check_settings() -> None:
    """Check the settings.

    Raises:
        StackError: There is another key, or a value is wrong.
    """
    for name, value in SETTINGS.items():
        if name == "answers":
            is_right = isinstance(value, str) and value != ""
        elif name in HINT_LIMITS:
            is_right = _is_hint_limit(name, value)
        elif name == "key_limits":
            is_right = isinstance(value, Mapping) and all(map(_is_key_limit, value.items()))
        else:
            is_right = name in NUMBERS and isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not is_right:
            raise StackError(
                f"[plugin.serve] takes {', '.join(NUMBERS)}, each a whole number of at least 1; answers, a name; "
                "min_priority, a whole number; max_keep_seconds, one of at least 0; and key_limits, tables of the last "
                f"two by the first 8 digits of a key's hash, as the log says them; not {name} = {value!r}"
            )


def _is_hint_limit(name: str, value: object) -> bool:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return is_whole and (name == "min_priority" or value >= 0)  # type: ignore[operator]


def _is_key_limit(item: tuple[str, object]) -> bool:
    key, limits = item
    is_key = len(key) == 8 and set(key) <= set("0123456789abcdef")
    return (
        is_key
        and isinstance(limits, Mapping)
        and all(name in HINT_LIMITS and _is_hint_limit(name, value) for name, value in limits.items())
    )
