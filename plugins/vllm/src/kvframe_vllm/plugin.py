"""The manifest: it reads ``[plugin.vllm]`` of the stack file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvframe.contract import StackError, hookimpl

SETTINGS: dict[str, Mapping[str, str]] = {}
"""``kinds``: by pattern of layer names, the kind that replaces vLLM's; the first match counts."""


@hookimpl
def kvframe_configure(settings: Mapping[str, Any]) -> None:
    """Read ``kinds`` from ``[plugin.vllm]``.

    Raises:
        StackError: There is another key, or ``kinds`` is not a table of names.
    """
    kinds = settings.get("kinds", {})
    is_table = isinstance(kinds, Mapping) and all(isinstance(kind, str) for kind in kinds.values())
    if settings.keys() - {"kinds"} or not is_table:
        raise StackError(
            "[plugin.vllm] takes only kinds, a table of cache specs by pattern of layer names, such as "
            'kinds = { "model.layers.*" = "sliding_window" }'
        )
    SETTINGS["kinds"] = kinds
