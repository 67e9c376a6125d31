"""The manifest: it reads the server's limits from ``[plugin.serve]`` of the stack file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvframe.contract import hookimpl

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
    if SETTINGS:
        from kvframe_serve.limits import read_limits

        read_limits()
