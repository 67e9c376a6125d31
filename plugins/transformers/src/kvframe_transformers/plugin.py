"""The plugin's manifest: a name and an import string, nothing heavy."""

from __future__ import annotations

from typing import Any

from kvframe.hookspecs import hookimpl


@hookimpl
def kvframe_register_model_adapters(register: Any) -> None:
    """Register the adapter for Hugging Face checkpoints."""
    register("transformers", "kvframe_transformers.adapter:TransformersAdapter")
