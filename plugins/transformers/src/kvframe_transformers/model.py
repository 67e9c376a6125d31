"""A loaded Hugging Face model whose attention runs through an engine's layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvframe.errors import ModelError
from kvframe.model.adapter import LoadedModel
from kvframe.model.description import LayerDescription, ModelDescription
from kvframe_transformers.checkpoint import quiet
from kvframe_transformers.routing import RUN_TIME, Route, Routes, RunLayer, routed
from kvframe_transformers.self_check import compare_runs

RunPacked = Callable[[list[list[int]]], list[torch.Tensor]]


class TransformersModel(LoadedModel):
    """Runs a transformers model on packed batches, through transformers' attention interface.

    Invariant: outside of ``attach`` … ``detach`` the model is exactly as transformers loaded it, and while it is
    attached nothing but the name of its attention implementation differs.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, description: ModelDescription) -> None:
        """Take a model in evaluation mode.

        Args:
            model: The model, with its weights, on its device.
            tokenizer: Its tokenizer, or None.
            description: Its layers, as planned.
        """
        self.description = description
        self.model: Any = model
        self.tokenizer = tokenizer
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._routes: Routes = {}
        self._original: list[tuple[Any, str | None]] = []

    def attach(self, layers: Mapping[str, RunLayer]) -> None:
        """Route the model's attention through ``layers``.

        Args:
            layers: The run-time layers, by the names of the description.

        Raises:
            ModelError: A layer was not reached, or the model is attached already.
        """
        if self._original:
            raise ModelError(f"{self.description.name} serves another engine already; close that engine first")
        self._original = [(config, config._attn_implementation) for config in _configs(self.model)]
        try:
            with quiet():
                self.model.set_attn_implementation(RUN_TIME)
            modules = self._modules()
            self._check_reached(modules)
            self._routes = {
                modules[layer.name]: Route.of(layer, layers[layer.name]) for layer in self.description.layers
            }
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Give the model its own attention back. Safe to call twice."""
        for config, implementation in self._original:
            config._attn_implementation_internal = implementation
        self._original = []
        self._routes = {}

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        """Run one packed step; the attention layers already hold the step's metadata.

        Args:
            input_ids: ``[num_tokens], int64, device``.
            positions: ``[num_tokens], int64, device``.
            logits_indices: ``[num_generating], int64, device``: rows of the packed batch.

        Returns:
            Logits ``[num_generating, vocab_size], device``.
        """
        with torch.inference_mode(), routed(self._routes):
            if self._keeps_logits:
                logits: torch.Tensor = self._run(input_ids, positions, logits_to_keep=logits_indices)
                return logits
            return self._run(input_ids, positions)[logits_indices]

    def self_check(self, run_packed: RunPacked) -> None:
        """Compare a packed run with the model's own plain forward; raises ``ModelError`` where logits differ.

        Args:
            run_packed: ``run_packed(prompts) -> list[torch.Tensor]``: logits ``[len(prompt), vocab_size]`` of each
                prompt, computed through the attached layers in one batch.
        """
        compare_runs(self.description, self.model, list(self._modules().items()), run_packed, self._run_plain)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, with the special tokens that the tokenizer adds by itself."""
        if self.tokenizer is None:
            raise self._no_tokenizer()
        return list(self.tokenizer(text)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str | None:
        """Return the text of ``token_ids`` without special tokens; None if the model has no tokenizer."""
        if self.tokenizer is None:
            return None
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def _run(self, input_ids: torch.Tensor, positions: torch.Tensor | None, **inputs: Any) -> torch.Tensor:
        position_ids = None if positions is None else positions.unsqueeze(0)
        output = self.model(input_ids=input_ids.unsqueeze(0), position_ids=position_ids, use_cache=False, **inputs)
        logits: torch.Tensor = output.logits[0]
        return logits

    def _run_plain(self, prompt: list[int]) -> torch.Tensor:
        """Return the logits ``[len(prompt), vocab_size]`` of the model's own attention."""
        with torch.inference_mode(), self._own_attention():
            return self._run(torch.tensor(prompt, device=self.model.device), None)

    @contextmanager
    def _own_attention(self) -> Iterator[None]:
        for config, implementation in self._original:
            config._attn_implementation_internal = implementation
        try:
            yield
        finally:
            for config, _ in self._original:
                config._attn_implementation_internal = RUN_TIME

    def _modules(self) -> dict[str, nn.Module]:
        wanted = {layer.name for layer in self.description.layers}
        return {path: module for path, module in self.model.named_modules() if path in wanted}

    def _check_reached(self, modules: Mapping[str, nn.Module]) -> None:
        """Run two tokens through layers that only note that they were called."""
        reached: set[str] = set()
        routes = {}
        for layer in self.description.layers:
            if layer.name not in modules:
                raise ModelError(f"{self.description.name} has no module {layer.name!r}, which its config describes")
            routes[modules[layer.name]] = Route.of(layer, _noting_layer(layer, reached))
        ids = torch.zeros(2, dtype=torch.int64, device=self.model.device)
        with torch.inference_mode(), routed(routes):
            self._run(ids, torch.arange(2, device=self.model.device))
        for layer in self.description.layers:
            if layer.name not in reached:
                raise ModelError(
                    f"layer {layer.name!r} of {self.description.name} ({type(modules[layer.name]).__name__}) does not "
                    "run through transformers' attention interface, so kvframe cannot serve it"
                )


def _configs(model: nn.Module) -> list[Any]:
    """Return every config that a module of ``model`` reads its attention implementation from, each once."""
    found: dict[int, Any] = {}
    pending: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    while pending:
        config = pending.pop()
        if id(config) not in found and hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
            pending += [getattr(config, key) for key in config.sub_configs]
    return list(found.values())


def _noting_layer(layer: LayerDescription, reached: set[str]) -> RunLayer:
    def run(
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        reached.add(layer.name)
        size = layer.options.get("head_size_v", layer.options["head_size"])
        return query.new_zeros(*query.shape[:2], size)

    return run
