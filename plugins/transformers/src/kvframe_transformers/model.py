"""A loaded Hugging Face model whose attention runs through an engine's layers."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import attrs
import torch
from torch import nn
from transformers import PreTrainedModel

from kvframe.contract import (
    AttachedLayers,
    LayerDescription,
    LoadedModel,
    ModelDescription,
    ModelError,
    ModelIdentity,
    Pooling,
    PredictionHeads,
)
from kvframe_transformers.apart import LENGTHS, find_apart, unfolding_apart, unfolds
from kvframe_transformers.by_content import ByContent
from kvframe_transformers.calls import path_of
from kvframe_transformers.checkpoint import one_sentence
from kvframe_transformers.compiled import CompiledBody, for_any_size
from kvframe_transformers.decoder_hooks import DecoderHooks
from kvframe_transformers.decoding import decode_as_they_come
from kvframe_transformers.direct_attention import attends_directly
from kvframe_transformers.discovery import takes_positions
from kvframe_transformers.hidden_states import HiddenStates
from kvframe_transformers.latents import Latents
from kvframe_transformers.mixers import MixerDriver
from kvframe_transformers.names import if_untested
from kvframe_transformers.packed import PackedLinears, packable
from kvframe_transformers.relative_bias import PARAMETER, tables_of
from kvframe_transformers.routing import (
    Route,
    Routes,
    RunningStep,
    direct_forward,
    routes_by_module,
    running,
    running_step,
)
from kvframe_transformers.self_check import RunPacked, compare_runs, ordinary_ids, tolerance_of
from kvframe_transformers.sentence_transformers import read_pooling
from kvframe_transformers.shared_inputs import SharedInputs
from kvframe_transformers.skipping import RowCutter, blocks_from
from kvframe_transformers.states import Forward, OpaqueForward, own_forward
from kvframe_transformers.step_mode import StepMode
from kvframe_transformers.stored_weights import weights_for_all_ranks
from kvframe_transformers.temperature import Temperatures

_SERVING: WeakKeyDictionary[nn.Module, ReferenceType[TransformersModel]] = WeakKeyDictionary()
"""The models that serve an engine, each with what runs it for that engine."""


class TransformersModel(LoadedModel):
    """Runs a transformers model on packed batches, through transformers' attention interface.

    Invariant: the model computes by the engine's layers only inside ``forward``. At any other time it computes as
    transformers made it, while it is attached too: only hooks are left, which act in a step.

    Attributes:
        compiled: The compiled model; None if it is not compiled.
        packs_weights: Whether linear layers on a CPU multiply by packed copies of their weights.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        description: ModelDescription,
        folder: Path | None = None,
        first_position: int = 0,
    ) -> None:
        """Take a model in evaluation mode.

        Args:
            model: The model, with its weights, on its device.
            tokenizer: Its tokenizer, or None.
            description: Its layers, as planned. If the model does not generate, its body runs without the head.
            folder: The folder that it was loaded from; None if there is none.
            first_position: The model's number for the position of a prompt's first token.
        """
        self.description = description
        self.model: Any = model
        self.tokenizer = tokenizer
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

    def without_head(self) -> LoadedModel:
        """Return the same model without its head; it gives its last hidden states."""
        if not self.description.generates:
            return self
        description = attrs.evolve(self.description, generates=False)
        headless = TransformersModel(self.model, self.tokenizer, description, self._folder, self._first_position)
        headless.packs_weights = self.packs_weights
        return headless

    def pooling(self) -> Pooling | None:
        """Return the pooling in the checkpoint's files for sentence-transformers; None if it has none."""
        return None if self._folder is None else read_pooling(self._folder)

    def tokenizer_json(self) -> str | None:
        """Return the fast tokenizer as JSON, without padding and truncation; None if there is none."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        copied = type(backend).from_str(backend.to_str())
        copied.no_padding()
        copied.no_truncation()
        return str(copied.to_str())

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
                mode.apart = self._find_apart(modules.values())
                unfolding = {module: forward for module, forward in mode.direct.items() if unfolds(module)}
                mode.direct |= {module: unfolding_apart(forward) for module, forward in unfolding.items()}
            self._check_reached(modules)
            mode.forwards = self._drivers
            if layers.skipped:
                self._cut_rows(modules, layers.skipped)
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
            return hash(tuple((each._version, each.data_ptr()) for each in self.model.parameters()))
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
            does = "computes attention itself, outside of transformers' attention interface"
            if self._mode.by_content:
                does = "chooses tokens by content for each request of a step"
            elif not self._mode.direct:
                does = f"has parts that mix tokens outside of attention ({type(next(iter(self._mode.apart))).__name__})"
            raise ModelError(
                f"{self.description.name} {does}, so it cannot be compiled; leave compile out", code="not_compiled"
            )
        if self._mode is not None:
            self._mode.opaque = {
                module: OpaqueForward(driver.form, driver) for module, driver in self._drivers.items() if driver.form
            }
        modules = self._modules()
        if again := next((layer.name for layer in self._attending if path_of(layer.name) != layer.name), None):
            raise ModelError(
                f"layer {path_of(again)!r} of {self.description.name} attends several times in a forward, so the model "
                "cannot be compiled; leave compile out",
                code="not_compiled",
            )
        sizes = {modules[layer.name]: value_size(layer) for layer in self._attending}
        self.compiled = CompiledBody(self._body, sizes, backend, self._cutter)
        self._probe_compiled([self.compiled])

    def _probe_compiled(self, parts: Sequence[CompiledBody]) -> None:
        """Run a few tokens through the compiled parts of the model; raise ``ModelError`` if torch cannot compile them.

        Args:
            parts: Every run calls each of them once.
        """
        modules = self._modules()
        try:
            # Called as in a step: with other arguments, the first step would compile the model again.
            with for_any_size():
                self._note_rows(modules, 3, None, num_wanted=2)
                for part in parts:
                    part.note_probe()
                if self._cutter is not None:
                    self._note_rows(modules, 5, torch.tensor([1, 3], device=self.model.device))
                    for part in parts:
                        part.note_probe()
            # Some models, and some compilers, need code of its own for a single token.
            self._note_rows(modules, 1, None, num_wanted=1)
        except Exception as error:  # a compiler may raise anything
            raise ModelError(
                f"{self.description.name} cannot be compiled here ({one_sentence(error)}); leave compile out",
                code="not_compiled",
            ) from error

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

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        """Run one packed step; the attention layers already hold the step's metadata.

        Args:
            input_ids: ``[num_tokens], int64, device``.
            positions: ``[num_tokens], int64, device``.
            logits_indices: ``[num_wanted], int64, device``: the rows of the packed batch whose logits are wanted.

        Returns:
            Logits ``[num_wanted, vocab_size], device``; if the step's last layers keep only some rows, of these rows.
            For a model that does not generate, hidden states ``[num_wanted, hidden_size]``.
        """
        layers, mode = self._layers, self._mode
        if layers is None or mode is None:
            raise ModelError(f"{self.description.name} is not attached to an engine; make an engine for it")
        kept_rows = layers.kept_rows
        with (
            torch.inference_mode(),
            mode.on(),
            running(RunningStep(self._routes, positions, kept_rows, mode.by_content)),
        ):
            if kept_rows is not None:
                return self._run(input_ids, positions)
            if self._keeps_logits:
                return self._run(input_ids, positions, logits_to_keep=logits_indices)
            return self._run(input_ids, positions)[logits_indices]

    def can_give_hidden_states(self) -> bool:
        """Return whether the model has a head, whose input can be noted."""
        return self.description.generates and self.model.get_output_embeddings() is not None

    def give_hidden_states(self) -> None:
        """Note the input of the model's head in each step."""
        self._noted = HiddenStates(self.model.get_output_embeddings(), of_output=False)

    def forward_with_hidden_states(
        self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one packed step, and return the input of the model's head beside the logits.

        Args:
            input_ids: As for ``forward``.
            positions: As for ``forward``.
            logits_indices: As for ``forward``.

        Returns:
            The logits, and ``[num_logits_rows, hidden_size]`` of the same rows.

        Raises:
            ModelError: The model does not call its head.
        """
        assert self._noted is not None
        logits = self.forward(input_ids, positions, logits_indices)
        rows = self._noted.take()
        if rows is None:
            raise ModelError(
                f"{self.description.name} does not call its output embeddings, so it has no hidden states; choose "
                "another proposer"
            )
        # A model that always computes the logits of all rows gives those that are wanted.
        return logits, rows if len(rows) == len(logits) else rows[logits_indices]

    def load_prediction_heads(self) -> PredictionHeads | None:
        """Load the heads from the folder of the model's checkpoint; on rank 0 only, with the help of the others.

        Raises:
            ModelError: It has no weights of them.
        """
        from kvframe_transformers.prediction_heads import load_heads

        return load_heads(self.model, self.description)

    def give_all_hidden_states(self) -> None:
        """Note the output of the model's body in each step."""
        self._noted = HiddenStates(self.model.get_decoder(), of_output=True)

    def forward_with_all_hidden_states(
        self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one packed step, and return the last hidden states of all tokens beside the logits.

        Args:
            input_ids: As for ``forward``.
            positions: As for ``forward``.
            logits_indices: As for ``forward``.

        Returns:
            The logits, and ``[num_tokens, hidden_size]``.
        """
        assert self._noted is not None
        logits, rows = self.forward(input_ids, positions, logits_indices), self._noted.take()
        assert rows is not None
        return logits, rows

    def self_check(self, run_packed: RunPacked) -> None:
        """Compare a packed run with the model's own plain forward; raise ``ModelError`` if logits differ.

        Args:
            run_packed: ``run_packed(prompts)`` returns the logits ``[len(prompt), vocab_size]`` of each prompt,
                computed through the attached layers together; ``run_packed(prompts, last_only=True)`` returns
                those of its last token, ``[1, vocab_size]``.
        """
        assert self._layers is not None
        assert self._mode is not None
        modules, layers = list(self._modules().items()), self._layers
        with self._mode.temperatures.in_short_steps():
            compare_runs(
                self.description, self.model, modules, run_packed, self._run_plain, layers.skipped, layers.dtypes
            )

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, with the special tokens that the tokenizer adds."""
        if self.tokenizer is None:
            raise self._no_tokenizer()
        return list(self.tokenizer(text)["input_ids"])

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the token ids of the tokenizer's chat template, with the start of the model's answer."""
        if self.tokenizer is None:
            raise self._no_tokenizer()
        if not self.tokenizer.chat_template:
            return super().encode_chat(messages)
        try:
            given = [dict(message) for message in messages]
            return list(self.tokenizer.apply_chat_template(given, add_generation_prompt=True, return_dict=False))
        except Exception as error:  # a template is a program of the checkpoint's
            raise ModelError(f"the chat template of {self.description.name} failed: {one_sentence(error)}") from error

    def decode(self, token_ids: Sequence[int]) -> str | None:
        """Return the text of ``token_ids`` without special tokens; None if the model has no tokenizer."""
        if self.tokenizer is None:
            return None
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def decode_with_special_tokens(self, token_ids: Sequence[int]) -> str | None:
        """Return the text of ``token_ids`` with special tokens; None if the model has no tokenizer."""
        if self.tokenizer is None:
            return None
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def decode_stream(
        self, token_ids: Sequence[int], *, special_tokens: bool = False
    ) -> Callable[[Sequence[int], bool], str]:
        """Return a function that decodes new tokens, in the way of the tokenizer's kind.

        Args:
            token_ids: The prompt.
            special_tokens: Whether special tokens have a text.
        """
        return decode_as_they_come(self.tokenizer, token_ids, special_tokens)

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

    def _run_plain(self, prompt: list[int]) -> torch.Tensor:
        """Return the logits ``[len(prompt), vocab_size]``, or hidden states, of the model's own attention."""
        assert self._mode is not None
        ids, inputs = torch.tensor(prompt, device=self.model.device), {}
        if self.description.bidirectional_prompts and self._takes_token_types:
            inputs["token_type_ids"] = torch.zeros_like(ids)[None]  # the type of a prompt's tokens
        with torch.inference_mode(), self._mode.off():
            return self._run(ids, None, **inputs)

    def _find_apart(self, attending: Collection[nn.Module]) -> dict[nn.Module, Forward]:
        """Return the forwards in a step of modules that mix the tokens of a batch."""
        ids = ordinary_ids(self.model.config.to_dict(), self.description.vocab_size or 1)
        generator = torch.Generator().manual_seed(0)

        def run(length: int) -> None:
            drawn = ids[torch.randint(len(ids), (length,), generator=generator)].to(self.model.device)
            self._run(drawn, torch.arange(length, device=self.model.device))

        assert self._mode is not None
        if self.description.max_model_len < max(LENGTHS):
            return {}
        with torch.inference_mode(), self._mode.off():
            return find_apart(self._body, attending, run, tolerance_of(self.model.dtype))

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
            self._note_rows(self._modules(), 2, None)
        except RuntimeError:  # the model needs the rows of a layer's output side by side in memory
            self._joined = []
            mode.packed = PackedLinears(self._body)

    def _check_reached(self, modules: Mapping[str, nn.Module]) -> None:
        """Run two tokens through layers that only record their calls, and find how mixers continue a sequence."""
        described = [layer for layer in self.description.layers if layer.entry_of is None]
        for layer in described:
            if layer.name not in modules:
                raise ModelError(f"{self.description.name} has no module {layer.name!r}, which its config describes")
        inputs = SharedInputs()
        with inputs.recorded(packable(self._body) if self.packs_weights else ()):
            num_rows, _ = self._note_rows(modules, 2, None)
        self._joined = inputs.groups()
        for layer in described:
            if layer.name not in num_rows:
                raise ModelError(
                    f"layer {layer.name!r} of {self.description.name} ({type(modules[layer.name]).__name__}) does not "
                    f"run through transformers' attention interface, so kvframe cannot serve it{if_untested()}"
                )
        for driver in self._drivers.values():
            driver.check()

    def _cut_rows(self, modules: Mapping[str, nn.Module], skipped: Sequence[str]) -> None:
        """Hook the blocks that leave rows out, and check in a step of three tokens that they do."""
        blocks = self._blocks_from(skipped)
        refusal = (
            f"{self.description.name} ({type(self.model).__name__}) cannot leave rows out from layer {skipped[0]!r} on"
        )
        if blocks is None:
            raise ModelError(f"{refusal}; turn prefill skipping off for it")
        self._cutter = RowCutter(blocks)
        kept_rows = torch.tensor([1], device=self.model.device)
        try:
            num_rows, logits = self._note_rows(modules, 3, kept_rows)
        except (RuntimeError, IndexError, ValueError) as error:  # the model's error for rows that do not fit
            raise ModelError(f"{refusal} ({one_sentence(error)}); turn prefill skipping off for it") from error
        wrong = [name for name, rows in num_rows.items() if rows != (1 if name in skipped else 3)]
        if wrong or len(logits) != 1:
            what = f"layer {wrong[0]!r} got {num_rows[wrong[0]]} rows" if wrong else f"it gave {len(logits)} logits"
            raise ModelError(
                f"{refusal} ({what} in a step of three tokens that keeps one); turn prefill skipping off for it"
            )

    def _note_rows(
        self,
        modules: Mapping[str, nn.Module],
        num_tokens: int,
        kept_rows: torch.Tensor | None,
        num_wanted: int | None = None,
    ) -> tuple[dict[str, int], torch.Tensor]:
        """Run tokens through layers that only record how many queries they get; return these numbers and the logits."""
        num_rows: dict[str, int] = {}
        routes = routes_by_module(
            {layer.name: Route.of(layer, _NotingLayer(layer, num_rows)) for layer in self._attending}, modules
        )
        noting = {module: partial(driver.note, num_rows) for module, driver in self._drivers.items()}
        assert self._mode is not None
        inputs = {}
        with torch.inference_mode():
            positions = torch.arange(num_tokens, device=self.model.device)
            if num_wanted is not None and self._keeps_logits:
                inputs["logits_to_keep"] = torch.arange(num_wanted, device=self.model.device)
            with (
                self._mode.on(noting),
                running(RunningStep(routes, positions, kept_rows, self._mode.by_content)),
            ):
                return num_rows, self._run(torch.zeros_like(positions), positions, **inputs)

    def _blocks_from(self, skipped: Sequence[str]) -> tuple[nn.Module, ...] | None:
        return blocks_from(self.model, [layer.name for layer in self.description.layers], skipped)


def _body_of(model: Any) -> Any:
    """Return the part of a model that gives its last hidden states."""
    body = model.base_model
    if body is not model or model.get_output_embeddings() is None:
        return body
    # transformers looks for the body under a name that this model does not use.
    return next((part for part in model.children() if isinstance(part, PreTrainedModel)), body)


class _NotingLayer:
    """Records how many queries it gets, and gives zeros."""

    def __init__(self, layer: LayerDescription, num_rows: dict[str, int]) -> None:
        self._layer, self._num_rows = layer, num_rows

    def bind(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Take no parameters."""

    def __call__(self, query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        self._num_rows[self._layer.name] = len(query)
        return query.new_zeros(*query.shape[:2], value_size(self._layer))

    def with_lse(self, query: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return zeros, and zeros as their log-sum-exp."""
        return self(query), query.new_zeros(query.shape[:2], dtype=torch.float32)


def value_size(layer: LayerDescription) -> int:
    """Return the size of the heads of a layer's output."""
    size: int = layer.options.get("head_size_v") or layer.options["head_size"]
    return size
