"""The manifest: it registers the adapter for YOCO models. Installed plugins have one like it."""

from __future__ import annotations

from kvframe.contract import Register, hookimpl


@hookimpl
def kvframe_register_model_adapters(register: Register) -> None:
    """Register the adapter; it is imported when kvframe first looks for the adapter of a model."""
    register("yoco", "yoco_adapter:YocoAdapter")
