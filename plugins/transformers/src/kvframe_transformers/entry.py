"""The class that the plugin registers, imported after the installed transformers is checked."""

from __future__ import annotations

from kvframe_transformers.names import check_transformers

# The modules of the adapter import names of transformers, which a newer version may not have.
check_transformers()

from kvframe_transformers.adapter import TransformersAdapter  # noqa: E402

__all__ = ["TransformersAdapter"]
