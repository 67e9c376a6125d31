"""The manifest: how kvframe comes to know that YOCO models exist. Installed plugins have one like it."""

from __future__ import annotations

from kvframe.contract import Register, hookimpl


@hookimpl
def kvframe_register_model_adapters(register: Register) -> None:
    """Register the adapter; it is imported when the first model is looked at."""
    register("yoco", "yoco_adapter:YocoAdapter")
