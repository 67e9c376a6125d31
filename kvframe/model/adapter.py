"""The interface of a model adapter: reads a model's layers without weights, runs it on packed batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    import torch

    from kvframe.attention.layer import AttentionLayers


@attrs.frozen(kw_only=True)
class LayerDescription:
    """One attention layer as found in a model: what kind of cache spec it needs, with which options.

    The core turns it into a ``LayerSpec`` by looking ``kind`` up in the registry, so an adapter imports no spec type.

    Attributes:
        name: Unique in the model, the module's path.
        kind: The registered name of the cache spec (``"sliding_window"``).
        options: The spec's own fields, without ``block_size`` and ``dtype`` (``{"num_kv_heads": 1, "window": 64}``).
        query: The query side's fields (``{"num_heads": 4, "head_size": 32, "scale": 0.17}``).
        shares_with: The layer whose cache it reads; None for its own.
    """

    name: str
    kind: str
    options: Mapping[str, Any]
    query: Mapping[str, Any]
    shares_with: str | None = None


@attrs.frozen(kw_only=True)
class ModelDescription:
    """What planning and serving need to know of a model, read without its weights.

    Attributes:
        name: For people: the folder's or file's name.
        layers: Its attention layers, in the order they run.
        max_model_len: The most tokens of a request, prompt and output.
        vocab_size: Token ids are ``[0, vocab_size)``; None if unknown.
        eos_token_ids: Ids that end a request.
    """

    name: str
    layers: tuple[LayerDescription, ...]
    max_model_len: int
    vocab_size: int | None = None
    eos_token_ids: frozenset[int] = frozenset()


class LoadedModel(ABC):
    """A model with its weights, ready to be attached to an engine's attention layers."""

    description: ModelDescription

    @abstractmethod
    def attach(self, layers: AttentionLayers) -> None:
        """Route the model's attention through ``layers``; raises ``ModelError`` if a layer was not reached.

        Args:
            layers: The run-time layers, by the names of the description. Called once, at set-up.
        """

    @abstractmethod
    def self_check(self, run_packed: Any) -> None:
        """Compare a packed run with the model's own plain forward; raises ``ModelError`` where logits differ.

        Args:
            run_packed: ``run_packed(prompts: list[list[int]]) -> list[torch.Tensor]``: logits
                ``[len(prompt), vocab_size]`` of each prompt, computed through the attached layers in one batch.
        """

    @abstractmethod
    def detach(self) -> None:
        """Leave the model as it was before ``attach``. Safe to call twice."""

    @abstractmethod
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        """Run one packed step; the attention layers already hold the step's metadata.

        Args:
            input_ids: ``[num_tokens], int64, device``.
            positions: ``[num_tokens], int64, device``.
            logits_indices: ``[num_generating], int64, device``: rows of the packed batch.

        Returns:
            Logits ``[num_generating, vocab_size], device``.
        """

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``; raises ``ModelError`` if the model has no tokenizer."""
        raise self._no_tokenizer()

    def decode(self, token_ids: Sequence[int]) -> str | None:
        """Return the text of ``token_ids``; None if the model has no tokenizer."""
        return None

    def _no_tokenizer(self) -> Exception:
        from kvframe.errors import ModelError

        return ModelError(f"{self.description.name} has no tokenizer; give token ids instead of text")


class ModelAdapter(ABC):
    """Knows one way in which models lie on disk. Registered by a plugin; an instance is made at set-up."""

    @abstractmethod
    def recognises(self, path: Path) -> bool:
        """Return whether ``path`` (a folder, or a config file) is of this adapter's kind. Cheap: no heavy import."""

    @abstractmethod
    def describe(self, path: Path) -> ModelDescription:
        """Read the layers from the config alone; raises ``ModelError`` for what is no model or not understood."""

    @abstractmethod
    def load(self, path: Path, *, device: str, dtype: str) -> LoadedModel:
        """Load the weights from a folder; raises ``ModelError`` for a corrupt checkpoint."""
