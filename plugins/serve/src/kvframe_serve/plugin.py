"""The manifest: it reads the server's limits from ``[plugin.serve]`` of the stack file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvframe.contract import StackError, hookimpl

DEFAULTS: Mapping[str, int] = {"max_requests": 256, "max_new_tokens": 4096, "max_body_bytes": 4 << 20}
"""The default limits: requests at once, generated tokens of a request, bytes of its body."""

_SETTINGS: dict[str, Any] = {}
"""The settings of the stack that was loaded last."""


@hookimpl
def kvframe_configure(settings: Mapping[str, Any]) -> None:
    """Read the limits from ``[plugin.serve]``.

    Raises:
        StackError: There is another key, or a limit is not a positive whole number.
    """
    _SETTINGS.clear()
    _SETTINGS.update(settings)
    limits()


def limits() -> Mapping[str, int]:
    """Return the limits of the stack that was loaded last.

    Raises:
        StackError: As for ``kvframe_configure``. An engine runs without a plugin whose settings are wrong; this server
            cannot.
    """
    for name, value in _SETTINGS.items():
        if name not in DEFAULTS or isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise StackError(
                f"[plugin.serve] takes {', '.join(DEFAULTS)}, each a whole number of at least 1, not {name} = {value!r}"
            )
    return {**DEFAULTS, **_SETTINGS}
