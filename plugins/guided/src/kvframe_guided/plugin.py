"""The manifest: it registers the logits processor of this distribution by import string."""

from __future__ import annotations

from kvframe.contract import Register, hookimpl


@hookimpl
def kvframe_register_logits_processors(register: Register) -> None:
    """Register the processor, which needs the library llguidance."""
    register(
        "guided",
        "kvframe_guided.processor:Guided",
        needs="llguidance",
        install="pip install 'kvframe-guided[llguidance]'",
        needs_versions="llguidance>=1.3",
    )
