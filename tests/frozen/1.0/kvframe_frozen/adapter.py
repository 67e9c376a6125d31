"""Reads and serves models of this package: a folder with ``config.json`` and ``weights.pt``."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch

from kvframe.contract import (
    AttachedLayers,
    LayerDescription,
    LoadedModel,
    ModelAdapter,
    ModelDescription,
    ModelError,
)
from kvframe_frozen.model import Model, attend_alone

KEYS = {"vocab_size", "size", "num_heads", "num_layers", "max_model_len"}


def describe(config: dict[str, int], name: str) -> ModelDescription:
    """Return the layers of a model, named as its modules are, from the config alone."""
    num_heads, head_size = config["num_heads"], config["size"] // config["num_heads"]
    layers = tuple(
        LayerDescription(
            name=f"layers.{index}",
            kind="full_attention",
            options={"num_kv_heads": num_heads, "head_size": head_size},
            query={"num_heads": num_heads, "head_size": head_size, "scale": head_size**-0.5},
        )
        for index in range(config["num_layers"])
    )
    longest, vocab_size = config["max_model_len"], config["vocab_size"]
    return ModelDescription(name=name, layers=layers, max_model_len=longest, vocab_size=vocab_size)


class FrozenModel(LoadedModel):
    """Runs a model on packed batches."""

    def __init__(self, model: Model, description: ModelDescription) -> None:
        """Take the model, with its weights."""
        self.model = model
        self.description = description
        self.layers: AttachedLayers | None = None

    def attach(self, layers: AttachedLayers) -> None:
        """Let every layer call the engine's attention of its name."""
        self.layers = layers
        self._route({name: layers[name] for name in self._names()})

    def detach(self) -> None:
        """Put the model's own attention back. Safe to call twice."""
        self._route(dict.fromkeys(self._names(), attend_alone))

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        """Run one packed step; the attention layers already hold the step's metadata."""
        with torch.inference_mode():
            logits: torch.Tensor = self.model(input_ids, positions, logits_indices)
        return logits

    def self_check(self, run_packed: Any) -> None:
        """Compare a packed batch with the model's own forward of each prompt."""
        prompts = [[1, 2, 3], [5, 6, 7, 8, 9]]
        packed = run_packed(prompts)
        self.detach()
        # The engine may take fewer tokens of a prompt.
        tokens = [torch.tensor(prompt[: len(logits)]) for prompt, logits in zip(prompts, packed, strict=True)]
        with torch.inference_mode():
            alone = [self.model(each, torch.arange(len(each))) for each in tokens]
        assert self.layers is not None
        self.attach(self.layers)
        for ours, theirs in zip(packed, alone, strict=True):
            if not torch.allclose(ours, theirs, atol=1e-4):
                raise ModelError(f"{self.description.name} gives other logits in a packed batch than alone")

    def _names(self) -> list[str]:
        return [layer.name for layer in self.description.layers]

    def _route(self, attention: dict[str, Any]) -> None:
        for name, attend in attention.items():
            self.model.get_submodule(name).attend = attend


class FrozenAdapter(ModelAdapter):
    """Reads such folders."""

    def recognises(self, path: Path) -> bool:
        """Return whether the folder's config is one of these. Cheap: called for every path that a user gives."""
        try:
            return set(self._config(path)) == KEYS
        except (OSError, ValueError):
            return False

    def describe(self, path: Path) -> ModelDescription:
        """Read the layers from the config alone."""
        return describe(self._config(path), path.name)

    def load(self, path: Path, *, device: str, dtype: str) -> LoadedModel:
        """Load the weights."""
        config = self._config(path)
        model = Model(**config).to(device=device, dtype=getattr(torch, dtype)).eval()
        try:
            model.load_state_dict(torch.load(path / "weights.pt", map_location=device, weights_only=True))
        except (OSError, RuntimeError, pickle.UnpicklingError) as error:
            raise ModelError(f"the weights in {path} cannot be read: {error}") from error
        return FrozenModel(model, describe(config, path.name))

    def _config(self, path: Path) -> dict[str, int]:
        file = path / "config.json" if path.is_dir() else path
        found: dict[str, int] = json.loads(file.read_text(encoding="utf-8"))
        return found
