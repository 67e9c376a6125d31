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
        else:
            is_right = name in NUMBERS and isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not is_right:
            raise StackError(
                f"[plugin.serve] takes {', '.join(NUMBERS)}, each a whole number of at least 1, and answers, a name; "
                f"not {name} = {value!r}"
            )
