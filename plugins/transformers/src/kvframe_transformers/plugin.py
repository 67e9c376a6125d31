"""The plugin's manifest: its settings, a name and an import string, nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvframe.contract import Register, StackError, hookimpl

PACK_WEIGHTS = "pack_weights"
SETTINGS = {PACK_WEIGHTS: False}
"""The settings of the stack that was read last, for the whole process."""


@hookimpl
def kvframe_configure(settings: Mapping[str, Any]) -> None:
    """Take ``pack_weights`` from ``[plugin.transformers]``.

    Raises:
        StackError: There is another key, or it is not true or false.
    """
    packs = settings.get(PACK_WEIGHTS, False)
    if settings.keys() - {PACK_WEIGHTS} or not isinstance(packs, bool):
        raise StackError(
            "[plugin.transformers] takes only pack_weights, true or false: whether models on a CPU keep a second copy "
            "of their linear layers' weights, in the order that the processor reads fastest"
        )
    SETTINGS[PACK_WEIGHTS] = packs


@hookimpl
def kvframe_register_model_adapters(register: Register) -> None:
    """Register the adapter for Hugging Face checkpoints."""
    register("transformers", "kvframe_transformers.entry:TransformersAdapter", needs_versions="transformers>=5.20")
