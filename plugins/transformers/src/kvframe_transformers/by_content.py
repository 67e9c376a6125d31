"""The modules of a model whose attention reads the past by content: its indexers and its compressors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from kvframe.contract import AttachedEntry, LayerDescription
from kvframe_transformers.compressors import Compressors
from kvframe_transformers.indexers import Indexers


class ByContent:
    """Lets indexers and compressors run over the engine's steps, inside ``switch_on`` and ``switch_off``.

    Attributes:
        indexers: They choose the tokens that attention reads.
        compressors: They make entries that attention reads beside a window.
    """

    def __init__(
        self, layers: Sequence[LayerDescription], model: nn.Module, entries: Mapping[str, AttachedEntry]
    ) -> None:
        """Find them; they stay as they are.

        Args:
            layers: The layers and their entries.
            model: The model.
            entries: The attached entries, by their full names.
        """
        modules = dict(model.named_modules())
        self.indexers = Indexers(layers, modules, entries)
        self.compressors = Compressors(layers, modules, entries)

    def __bool__(self) -> bool:
        return bool(self.indexers or self.compressors)

    def switch_on(self, *, noting: bool) -> None:
        """Let them run over the running step.

        Args:
            noting: Whether the step has no cache, and only the calls of layers are noted.
        """
        self.indexers.switch_on(noting=noting)
        self.compressors.switch_on(noting=noting)

    def switch_off(self) -> None:
        """Restore them. Safe to call twice."""
        self.indexers.switch_off()
        self.compressors.switch_off()
