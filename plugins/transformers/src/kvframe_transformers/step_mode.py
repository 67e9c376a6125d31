"""Switches a model to the engine's layers for one step, and back after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvframe_transformers.by_content import ByContent
from kvframe_transformers.checkpoint import quiet
from kvframe_transformers.implementations import IMPLEMENTATION, configs_of
from kvframe_transformers.latents import Latents
from kvframe_transformers.packed import PackedLinears
from kvframe_transformers.routing import RUN_TIME, RUN_TIME_DIRECT
from kvframe_transformers.states import Forward, OpaqueForward, replaced_forwards
from kvframe_transformers.temperature import Temperatures

Attributes = dict[str, Any]


class StepMode:
    """Makes a model compute by an engine's layers inside ``on``; outside, it computes as transformers made it.

    Inside ``on``, these differ: the name of the attention implementation, the switches of temperatures, the expansion
    of latents, the forwards of mixers that keep a state and of packed linear layers, and the training mode, which is
    off.

    Attributes:
        temperatures: The temperatures of the attention modules.
        latents: The latent attention modules, which pass their latents on in a step.
        forwards: The forwards of mixers in a step.
        packed: The packed copies of linear layers; None if no layer is packed.
        direct: The forwards in a step of modules that compute attention themselves.
        apart: The forwards in a step of modules that mix the tokens of a batch.
        by_content: The indexers and compressors, which run over the requests of the step; None for none.
        opaque: What a compiled model calls instead of the forwards of its mixers, by module.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        temperatures: Temperatures,
        latents: Latents,
        direct: Mapping[nn.Module, Forward] | None = None,
        by_content: ByContent | None = None,
    ) -> None:
        """Find the configs that name the implementation; the model stays as it is.

        Args:
            model: The model.
            temperatures: The temperatures of its attention modules.
            latents: Its latent attention modules.
            direct: The forwards in a step of its modules that compute attention themselves.
            by_content: Its indexers and compressors; None for none.
        """
        self.by_content = by_content
        self.direct = dict(direct or {})
        self.temperatures = temperatures
        self.latents = latents
        self.forwards: Mapping[nn.Module, Forward] = {}
        self.packed: PackedLinears | None = None
        self.apart: Mapping[nn.Module, Forward] = {}
        self.opaque: Mapping[nn.Module, OpaqueForward] = {}
        # Attributes are read and written where they are kept: the classes of modules and configs look at every name.
        self._modules = [vars(module) for module in model.modules()]
        configs = [vars(config) for config in configs_of(model)]
        implementations = [config[IMPLEMENTATION] for config in configs]
        try:
            with quiet():
                model.set_attn_implementation(RUN_TIME)
            self._in_step = [
                (
                    config,
                    RUN_TIME_DIRECT if self.direct or (by_content and by_content.indexers) else config[IMPLEMENTATION],
                )
                for config in configs
            ]
        finally:
            _set_implementations(zip(configs, implementations, strict=True))

    @contextmanager
    def on(self, forwards: Mapping[nn.Module, Forward] | None = None) -> Iterator[None]:
        """Make the model compute by the engine's layers inside the block.

        Args:
            forwards: The forwards of mixers inside the block; None for those of the attribute.
        """
        training = [module for module in self._modules if module["training"]]
        implementations = [(config, config[IMPLEMENTATION]) for config, _ in self._in_step]
        with replaced_forwards(self._in_operators(self.forwards if forwards is None else forwards)):
            try:
                _set_implementations(self._in_step)
                _set_training(training, False)
                self.temperatures.switch_off()
                self.latents.switch_on()
                if self.by_content:
                    self.by_content.switch_on(noting=forwards is not None)
                if self.packed is not None:
                    self.packed.switch_on()
                yield
            finally:
                if self.packed is not None:
                    self.packed.switch_off()
                if self.by_content:
                    self.by_content.switch_off()
                self.latents.switch_off()
                self.temperatures.switch_on()
                _set_training(training, True)
                _set_implementations(implementations)

    def _in_operators(self, forwards: Mapping[nn.Module, Forward]) -> Mapping[nn.Module, Forward]:
        """Return the forwards; those that a compiled model calls through operators are replaced by these operators."""
        all_forwards = {**self.direct, **self.apart, **forwards}
        for module, opaque in self.opaque.items():
            opaque.target, all_forwards[module] = forwards[module], opaque.forward
        return all_forwards

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let the model compute as transformers made it inside the block, in evaluation mode."""
        training = [module for module in self._modules if module["training"]]
        try:
            _set_training(training, False)
            yield
        finally:
            _set_training(training, True)


def _set_training(modules: Iterable[Attributes], value: bool) -> None:
    for module in modules:
        module["training"] = value


def _set_implementations(implementations: Iterable[tuple[Attributes, Any]]) -> None:
    for config, implementation in implementations:
        config[IMPLEMENTATION] = implementation
