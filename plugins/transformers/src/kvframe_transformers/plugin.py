"""The plugin's manifest: a name and an import string, nothing heavy."""

from __future__ import annotations

from kvframe.contract import Register, hookimpl


@hookimpl
def kvframe_register_model_adapters(register: Register) -> None:
    """Register the adapter for Hugging Face checkpoints."""
    register("transformers", "kvframe_transformers.adapter:TransformersAdapter")
