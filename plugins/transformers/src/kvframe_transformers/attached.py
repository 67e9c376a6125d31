"""What an engine attaches its layers to: a transformers model, or a part of one, that computes by them in a step."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import nn
from transformers import PreTrainedModel

from kvframe.contract import AttachedLayers, LayerDescription, LoadedModel, ModelDescription, ModelError, ModelIdentity
from kvframe_transformers.apart import unfolding_apart, unfolds
from kvframe_transformers.by_content import ByContent
from kvframe_transformers.calls import path_of
from kvframe_transformers.compiled import CompiledBody
from kvframe_transformers.decoder_hooks import DecoderHooks
from kvframe_transformers.direct_attention import attends_directly
from kvframe_transformers.discovery import takes_positions
from kvframe_transformers.hidden_states import HiddenStates
from kvframe_transformers.latents import Latents
from kvframe_transformers.mixers import MixerDriver
from kvframe_transformers.packed import PackedLinears, packable
from kvframe_transformers.probe import Probe, value_size
from kvframe_transformers.relative_bias import PARAMETER, tables_of
from kvframe_transformers.routing import Route, Routes, direct_forward, routes_by_module, running_step
from kvframe_transformers.skipping import RowCutter, blocks_from
from kvframe_transformers.states import OpaqueForward, own_forward
from kvframe_transformers.step_mode import StepMode
from kvframe_transformers.stored_weights import weights_for_all_ranks
from kvframe_transformers.temperature import Temperatures

_SERVING: WeakKeyDictionary[nn.Module, ReferenceType[AttachedModel]] = WeakKeyDictionary()
"""The models that serve an engine, each with what runs it for that engine."""


class AttachedModel(LoadedModel):
    """Lets a transformers model compute packed batches by an engine's layers.

    Invariant: the model computes by the engine's layers only inside a step. At any other time it computes as
    transformers made it, while it is attached too: only hooks are left, which act in a step.

    Attributes:
        compiled: The compiled model; None if it is not compiled.
        packs_weights: Whether linear layers on a CPU multiply by packed copies of their weights.
    """

    def __init__(
        self, model: PreTrainedModel, description: ModelDescription, folder: Path | None = None, first_position: int = 0
    ) -> None:
        """Take a model in evaluation mode.

        Args:
            model: The model, with its weights, on its device.
            description: Its layers, as planned. If the model does not generate, its body runs without the head.
            folder: The folder that it was loaded from; None if there is none.
            first_position: The model's number for the position of a prompt's first token.
        """
        self.description = description
        self.model: Any = model
        self._folder = folder
        self._body: Any = model if description.generates else _body_of(model)
        self._first_position = first_position
        parameters = inspect.signature(self._body.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters
        self._takes_positions = takes_positions(self._body)
        self._takes_token_types = "token_type_ids" in parameters
        self._layers: AttachedLayers | None = None
        self._routes: Routes = {}
        self._mode: StepMode | None = None
        self._drivers: dict[nn.Module, MixerDriver] = {}
        self._cutter: RowCutter | None = None
        self.compiled: CompiledBody | None = None
        self._noted: HiddenStates | None = None
        self._hooks: DecoderHooks | None = None
        self.packs_weights = False
        self._joined: list[tuple[nn.Linear, ...]] = []

    def identity(self) -> ModelIdentity:
        """Return the config, without its path and transformers' version, and all parameters and buffers.

        If transformers has divided the model over ranks, the weights of the checkpoint replace the divided ones.
        """
        config = self.model.config.to_dict()
        for key in ("_name_or_path", "transformers_version"):
            config.pop(key, None)
        weights = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return ModelIdentity(
            config=json.dumps(config, sort_keys=True, default=str),
            weights=weights_for_all_ranks(weights, self._folder, self.model.config),
        )

    def can_skip(self, layers: Sequence[str]) -> bool:
        """Return whether the blocks from the first of these layers on can compute only some rows.

        Args:
            layers: The names of attention layers, in the order they run.
        """
        return self._blocks_from(layers) is not None

    def attach(self, layers: AttachedLayers) -> None:
        """Route the model's attention through ``layers``.

        Args:
            layers: The run-time layers, by the names of the description.

        Raises:
            ModelError: The model is attached already, a layer was not called, or a layer cannot leave rows out.
        """
        self.claim()
        try:
            modules = self._modules()
            temperatures = Temperatures(modules.values())
            direct = {
                module: direct_forward(module, own_forward(module))
                for module in modules.values()
                if attends_directly(module)
            }
            by_content = ByContent(self.description.layers, self.model, layers.entries)
            mode = self._mode = StepMode(self.model, temperatures, self._latents_of(modules), direct, by_content)
            self._drivers = {
                modules[name]: MixerDriver(name, modules[name], own_forward(modules[name]), state)
                for name, state in layers.states.items()
                if name in modules
            }
            if {layer.kind for layer in self.description.layers} == {"encoder_only"}:
                mode.apart = self._probe.find_apart(self._body, modules.values())
                unfolding = {module: forward for module, forward in mode.direct.items() if unfolds(module)}
                mode.direct |= {module: unfolding_apart(forward) for module, forward in unfolding.items()}
            self._joined = self._probe.check_calls(packable(self._body) if self.packs_weights else ())
            mode.forwards = self._drivers
            if layers.skipped:
                self._leave_rows_out(layers.skipped)
            routes = {
                layer.name: Route.of(
                    layer, layers[layer.name], temperatures.of.get(modules[layer.name]), layer.name in layers.skipped
                )
                for layer in self._attending
            }
            self._routes = routes_by_module(routes, modules)
            self._layers = layers
            if not self._takes_positions:
                self._hooks = DecoderHooks(self.model, dict.fromkeys(modules.values()))
            self.weights_changed()
        except BaseException:
            self.detach()
            raise

    def claim(self) -> None:
        """Note that the model serves an engine, until ``detach``; raise ``ModelError`` if it serves another one."""
        serving = _SERVING.get(self.model)
        if serving is not None and serving() is not None:
            raise ModelError(f"{self.description.name} serves another engine already; close that engine first")
        _SERVING[self.model] = ref(self)

    def weights_version(self) -> int | None:
        """Return a number of the parameters' memory and of torch's count of changes; None for a checkpoint's model."""
        if self._folder is not None:
            return None
        try:
            return hash(tuple((weight._version, weight.data_ptr()) for weight in self.model.parameters()))
        except RuntimeError:  # torch counts no changes of tensors that were made in its inference mode
            return None

    def weights_changed(self) -> None:
        """Give the attached layers the tensors that were made of the weights, and pack the weights again.

        Raises:
            ModelError: A module expands its latents otherwise than by its weights.
        """
        if self._layers is None or self._mode is None:
            return
        for name, tensors in self._mode.latents.parameters().items():
            self._layers[name].bind(tensors)
        for layer, table in tables_of(self.description.layers, self._modules(), self.model):
            self._layers[layer.name].bind({PARAMETER: table.detach()})
        if self.packs_weights:
            self._pack(self._mode)

    def compile(self, backend: Any = "inductor") -> None:
        """Compile the model around its attention, and run a few tokens through it.

        Args:
            backend: The compiler: a name that torch knows, or a callable as ``torch.compile`` takes it.

        Raises:
            ModelError: torch cannot compile it.
        """
        if self._mode is not None and (self._mode.direct or self._mode.apart or self._mode.by_content):
            reason = "computes attention itself, outside of transformers' attention interface"
            if self._mode.by_content:
                reason = "chooses tokens by content for each request of a step"
            elif not self._mode.direct:
                reason = (
                    f"has parts that mix tokens outside of attention ({type(next(iter(self._mode.apart))).__name__})"
                )
            raise ModelError(
                f"{self.description.name} {reason}, so it cannot be compiled; leave compile out", code="not_compiled"
            )
        if self._mode is not None:
            self._mode.opaque = {
                module: OpaqueForward(driver.form, driver) for module, driver in self._drivers.items() if driver.form
            }
        modules = self._modules()
        repeated_name = next((layer.name for layer in self._attending if path_of(layer.name) != layer.name), None)
        if repeated_name is not None:
            raise ModelError(
                f"layer {path_of(repeated_name)!r} of {self.description.name} attends several times in a forward, so "
                "the model cannot be compiled; leave compile out",
                code="not_compiled",
            )
        sizes = {modules[layer.name]: value_size(layer) for layer in self._attending}
        self.compiled = CompiledBody(self._body, sizes, backend, self._cutter)
        self._probe.check_compiled([self.compiled], self._cutter)

    def detach(self) -> None:
        """Remove what an engine needs of the model. Safe to call twice."""
        serving = _SERVING.get(self.model)
        if serving is not None and serving() is self:
            del _SERVING[self.model]
        if self.compiled is not None:
            self.compiled.remove()
        self.compiled = None
        if self._noted is not None:
            self._noted.remove()
        self._noted = None
        if self._cutter is not None:
            self._cutter.remove()
        self._cutter = None
        if self._hooks is not None:
            self._hooks.remove()
        self._hooks = None
        self._mode = None
        self._drivers = {}
        self._routes = {}
        self._layers = None

    def _run(self, input_ids: torch.Tensor, positions: torch.Tensor | None, **inputs: Any) -> torch.Tensor:
        if self._takes_positions:
            if positions is not None and self._first_position:
                positions = positions + self._first_position
            inputs["position_ids"] = None if positions is None else positions.unsqueeze(0)
        output = self._running_body(input_ids=input_ids.unsqueeze(0), use_cache=False, **inputs)
        rows: torch.Tensor = (output.logits if self.description.generates else output.last_hidden_state)[0]
        return rows

    @property
    def _running_body(self) -> Any:
        """What computes a step: the compiled model, if it can."""
        step = running_step()
        # Plain runs use the model as it was loaded.
        if self.compiled is None or step is None:
            return self._body
        return self.compiled if step.kept_rows is None else self.compiled.keeping(step.kept_rows)

    @property
    def _probe(self) -> Probe:
        assert self._mode is not None
        return Probe(
            description=self.description,
            model=self.model,
            modules=self._modules(),
            mode=self._mode,
            drivers=self._drivers,
            run=self._run,
            takes_rows=self._keeps_logits,
        )

    def _latents_of(self, modules: Mapping[str, nn.Module]) -> Latents:
        return Latents({layer.name: layer for layer in self.description.layers}, modules, self.description.name)

    def _modules(self) -> dict[str, nn.Module]:
        modules = dict(self.model.named_modules())
        paths = {layer.name: path_of(layer.name) for layer in self.description.layers}
        return {name: modules[path] for name, path in paths.items() if path in modules}

    @property
    def _attending(self) -> list[LayerDescription]:
        return [layer for layer in self.description.layers if layer.query]

    def _pack(self, mode: StepMode) -> None:
        """Pack the weights; layers that get the same input share a copy, if the model can compute with its parts."""
        mode.packed = PackedLinears(self._body, self._joined)
        if not self._joined or self.compiled is not None:  # a compiled model ran with them already
            return
        try:
            self._probe.count_rows(2, None)
        except RuntimeError:  # the model needs the rows of a layer's output side by side in memory
            self._joined = []
            mode.packed = PackedLinears(self._body)

    def _leave_rows_out(self, skipped_names: Sequence[str]) -> None:
        """Hook the blocks that leave rows out, and check that they do."""
        blocks = self._blocks_from(skipped_names)
        model_class, first_name = type(self.model).__name__, skipped_names[0]
        refusal = f"{self.description.name} ({model_class}) cannot leave rows out from layer {first_name!r} on"
        if blocks is None:
            raise ModelError(f"{refusal}; turn prefill skipping off for it")
        self._cutter = RowCutter(blocks)
        self._probe.check_rows_left_out(skipped_names, refusal)

    def _blocks_from(self, skipped_names: Sequence[str]) -> tuple[nn.Module, ...] | None:
        return blocks_from(self.model, [layer.name for layer in self.description.layers], skipped_names)


def _body_of(model: Any) -> Any:
    """Return the part of a model that gives its last hidden states."""
    body = model.base_model
    if body is not model or model.get_output_embeddings() is None:
        return body
    # transformers looks for the body under a name that this model does not use.
    return next((part for part in model.children() if isinstance(part, PreTrainedModel)), body)
