"""The model adapter of a new architecture: its layers, how its attention is replaced, and which rows it can leave out.

A checkpoint is a folder with ``config.json``, the fields of ``YocoConfig`` and ``"architecture": "yoco"``, and
``model.safetensors``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from yoco_model import Attend, Yoco, YocoConfig

from kvframe.contract import AttachedLayers, LayerDescription, LoadedModel, ModelAdapter, ModelDescription, ModelError

ARCHITECTURE = "yoco"
_SELF_CHECK_LENS = (5, 9, 40)


def save_checkpoint(model: Yoco, path: Path) -> None:
    """Write a model's folder.

    Args:
        model: The model.
        path: The folder; made if missing.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = {"architecture": ARCHITECTURE, **attrs.asdict(model.config)}
    (path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file(model.state_dict(), path / "model.safetensors")


def describe(config: YocoConfig, name: str) -> ModelDescription:
    """Return the layers of a model, named as its attention modules are."""
    key_value = {"num_kv_heads": config.num_kv_heads, "head_size": config.head_size}
    query = {"num_heads": config.num_heads, "head_size": config.head_size, "scale": config.head_size**-0.5}
    last = config.num_self_layers - 1
    windowed = {**key_value, "window": config.window}
    layers = [
        *(
            LayerDescription(name=_self_layer(i), kind="sliding_window", options=windowed, query=query)
            for i in range(last)
        ),
        LayerDescription(name=_self_layer(last), kind="full_attention", options=key_value, query=query),
        *(
            LayerDescription(
                name=_cross_layer(i),
                kind="full_attention",
                options=key_value,
                query=query,
                shares_with=_self_layer(last),
            )
            for i in range(config.num_cross_layers)
        ),
    ]
    return ModelDescription(
        name=name, layers=tuple(layers), max_model_len=config.max_model_len, vocab_size=config.vocab_size
    )


def _self_layer(index: int) -> str:
    return f"self_decoder.{index}.attention"


def _cross_layer(index: int) -> str:
    return f"cross_decoder.{index}.attention"


class YocoModel(LoadedModel):
    """Runs the model on packed batches. Its forward leaves rows out of the cross-decoder if the engine says so."""

    def __init__(self, model: Yoco, name: str) -> None:
        """Take a model in evaluation mode.

        Args:
            model: The model, on its device.
            name: For people.
        """
        self.model = model
        self.description = describe(model.config, name)
        self._layers: AttachedLayers | None = None
        self._own: dict[str, Attend] = {}

    def can_skip(self, layers: Sequence[str]) -> bool:
        """Return whether ``layers`` are those of the cross-decoder: rows can be left out from there on only."""
        return layers[0] == _cross_layer(0)

    def attach(self, layers: AttachedLayers) -> None:
        """Put the engine's layers in place of the dense attention."""
        if self._layers is not None:
            raise ModelError(f"{self.description.name} serves another engine already; close that engine first")
        self._own = self._attention()
        self._set_attention({layer.name: layers[layer.name] for layer in self.description.layers})
        self._layers = layers

    def detach(self) -> None:
        """Put the dense attention back. Safe to call twice."""
        self._set_attention(self._own)
        self._own = {}
        self._layers = None

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        """Run one packed step; if rows are skipped, the kept rows are those with logits."""
        assert self._layers is not None
        kept_rows = self._layers.kept_rows
        if kept_rows is not None:
            return self._run(input_ids, positions, cross_rows=kept_rows)
        return self._run(input_ids, positions, logits_rows=logits_indices)

    def self_check(self, run_packed: Callable[..., list[torch.Tensor]]) -> None:
        """Compare packed runs with the dense forward of each prompt: every token, then the last ones as in serving."""
        generator = torch.Generator().manual_seed(0)
        vocab_size = self.model.config.vocab_size
        prompts = [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in _SELF_CHECK_LENS]
        packed = run_packed(prompts)
        alone = [  # of as many tokens as the engine takes
            self._logits_alone(prompt[: len(logits)]) for prompt, logits in zip(prompts, packed, strict=True)
        ]
        self._check_equal(packed, alone)
        self._check_equal(run_packed(prompts, last_only=True), [logits[-1:] for logits in alone])

    def _check_equal(self, packed: list[torch.Tensor], alone: list[torch.Tensor]) -> None:
        for ours, theirs in zip(packed, alone, strict=True):
            if not torch.allclose(ours, theirs, rtol=0.0, atol=torch.finfo(theirs.dtype).eps ** 0.5):
                raise ModelError(f"{self.description.name} gives other logits in a packed batch than alone")

    def _logits_alone(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the logits ``[num_tokens, vocab_size]`` of one sequence by the dense attention."""
        device = self.model.head.weight.device
        attached = self._attention()
        self._set_attention(self._own)
        try:
            return self._run(torch.tensor(token_ids, device=device), torch.arange(len(token_ids), device=device))
        finally:
            self._set_attention(attached)

    def _run(self, input_ids: torch.Tensor, positions: torch.Tensor, **rows: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self.model(input_ids, positions, **rows)
            return logits

    def _attention(self) -> dict[str, Attend]:
        return {layer.name: self._module(layer.name).attend for layer in self.description.layers}

    def _set_attention(self, attention: Mapping[str, Attend]) -> None:
        for name, attend in attention.items():
            self._module(name).attend = attend

    def _module(self, name: str) -> Any:
        return self.model.get_submodule(name)


class YocoAdapter(ModelAdapter):
    """Reads checkpoints as ``save_checkpoint`` writes them."""

    def recognises(self, path: Path) -> bool:
        """Return whether the folder's config names the architecture."""
        try:
            config = _read_config(path)
        except (OSError, ValueError):
            return False
        return isinstance(config, dict) and config.get("architecture") == ARCHITECTURE

    def describe(self, path: Path) -> ModelDescription:
        """Read the layers from the config alone."""
        folder = path if path.is_dir() else path.parent
        return describe(_config_of(path), folder.resolve().name)

    def load(self, path: Path, *, device: str, dtype: str) -> LoadedModel:
        """Load the weights from a folder."""
        model = Yoco(_config_of(path)).to(device=device, dtype=getattr(torch, dtype)).eval()
        try:
            model.load_state_dict(load_file(path / "model.safetensors", device=device))
        except (OSError, SafetensorError, RuntimeError) as error:
            raise ModelError(f"the weights in {path} cannot be read: {error}") from error
        return YocoModel(model, path.resolve().name)


def _read_config(path: Path) -> Any:
    return json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))


def _config_of(path: Path) -> YocoConfig:
    fields = {key: value for key, value in _read_config(path).items() if key != "architecture"}
    try:
        return YocoConfig(**fields)
    except TypeError as error:
        raise ModelError(f"the config in {path} is not that of a YOCO model: {error}") from error
