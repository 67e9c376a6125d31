"""Finds a model's attention layers by one forward without weights: by what they do, not by the model's name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import attrs
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_outputs import BaseModelOutput

from kvframe.errors import ModelError
from kvframe.model.description import LayerDescription
from kvframe_transformers.checkpoint import one_sentence
from kvframe_transformers.latents import KIND as LATENT_KIND
from kvframe_transformers.latents import Expansion, noting_expansions
from kvframe_transformers.masks import MaskFunction, MaskKind, classify_mask, sees_all
from kvframe_transformers.relative_bias import BiasReader
from kvframe_transformers.states import Forward, Inputs, MixerCall, Mixers, StateView, is_mixer, reads_padding

DISCOVERY = "kvframe_discovery"
"""The attention implementation, and the mask implementation, under which a forward is only recorded."""

_PROBE_TOKENS = 4
_PROBE_ENCODER_TOKENS = 7
_PROBE_DTYPE = torch.bfloat16
_KEEPS_STATE = re.compile(r"\b(past_key_values?|layer_past|cache_params)\.update\w*\(")
_KNOWN_TENSORS = frozenset({"s_aux", "position_ids", "cache_position", "position_bias"})
"""Tensors that may come with an attention call: those that are served, and those that change nothing here."""


@attrs.frozen(eq=False)
class RecordedCall:
    """One attention call of the probe forward: tensors without data, and what came with them."""

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: Any
    inputs: dict[str, Any]

    @property
    def is_cross(self) -> bool:
        """Whether the keys are of another sequence than the queries: that of an encoder."""
        return self.key.shape[2] != self.query.shape[2]


@attrs.frozen(eq=False)
class RecordedState:
    """One call of a state mixer in the probe forward: the states that it left, what it got and returned."""

    module: nn.Module
    states: Mapping[str, torch.Tensor]
    inputs: Inputs
    output: Any


@attrs.frozen(eq=False)
class RecordedMask:
    """One mask of the probe forward: the tensor that stands for it, and what would have made it."""

    marker: torch.Tensor
    function: MaskFunction
    local_size: int | None
    chunk_size: int | None


@attrs.frozen(eq=False)
class Recording:
    """What the probe forward showed: attention, mixers and masks in order, latents, and every module that ran."""

    calls: list[RecordedCall | RecordedState] = attrs.field(factory=list)
    masks: list[RecordedMask] = attrs.field(factory=list)
    ran: list[nn.Module] = attrs.field(factory=list)
    expansions: dict[nn.Module, Expansion] = attrs.field(factory=dict)


_RECORDING: ContextVar[Recording] = ContextVar("kvframe_transformers_recording")


def _record_mask(
    *, batch_size: int, q_length: int, kv_length: int, mask_function: MaskFunction, config: Any = None, **inputs: Any
) -> torch.Tensor:
    """Stand for a mask: the tensor shows, when it reaches an attention call, which function would have made it."""
    marker = torch.empty(batch_size, 1, q_length, kv_length, device="meta")
    chunk_size = getattr(config, "attention_chunk_size", None)
    _RECORDING.get().masks.append(RecordedMask(marker, mask_function, inputs.get("local_size"), chunk_size))
    return marker


def _record_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    **inputs: Any,
) -> tuple[torch.Tensor, None]:
    """Note the call and return an output of the right shape, as transformers' attention functions do."""
    _RECORDING.get().calls.append(RecordedCall(module, query, key, value, attention_mask, inputs))
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1]), None


AttentionInterface.register(DISCOVERY, _record_attention)
AttentionMaskInterface.register(DISCOVERY, _record_mask)


def discover_layers(
    model: Any, name: str, max_model_len: int, *, generates: bool = True
) -> tuple[LayerDescription, ...]:
    """Return the layers of a model on the meta device that attend or keep state, in the order they run.

    Args:
        model: A ``PreTrainedModel`` that nobody else uses: its attention implementation is changed, and its dtype.
        name: What the model is called in errors.
        max_model_len: The most tokens of a request: masks are looked at up to here.
        generates: Whether tokens are generated one after the other, so that none may see later ones.

    Raises:
        ModelError: The model keeps state, or masks attention, in a way that kvframe has no words for, or it cannot be
            told the positions of a packed batch.
    """
    recording = _record(model, name)
    layers = _Reader(model, name, max_model_len, recording, generates).layers()
    attends = any(layer.query for layer in layers)
    if attends and not _can_be_told_positions(model, layers, recording.ran):
        raise ModelError(
            f"{name} ({type(model).__name__}) takes no position_ids, so several requests cannot be packed into one "
            "batch: serving it takes a model adapter of its own"
        )
    return layers


def _can_be_told_positions(model: Any, layers: Sequence[LayerDescription], ran: Sequence[nn.Module]) -> bool:
    if {"position_ids", "decoder_position_ids"} & inspect.signature(model.forward).parameters.keys():
        return True
    if any(takes_position_ids(module) for module in ran):
        return bool(model.config.is_encoder_decoder)
    # Distances in the scores are all that such a model knows of positions.
    return all("relative_bias" in layer.query or layer.kind == "cross_attention" for layer in layers)


def width_of_encoder(model: Any) -> int:
    """Return the elements of what a model's encoder gives for a token: as its own config says, where it has one."""
    width: int = model.get_encoder().config.hidden_size
    return width


def takes_position_ids(module: nn.Module) -> bool:
    """Return whether a module looks up positions that it is told."""
    return isinstance(module, nn.Embedding) and "position_ids" in inspect.signature(module.forward).parameters


def _forward_source(module_class: type) -> str:
    try:
        return inspect.getsource(module_class.forward)  # type: ignore[attr-defined]
    except (AttributeError, OSError, TypeError):  # no forward, or one that was made at run time
        return ""


def _record(model: Any, name: str) -> Recording:
    model.set_attn_implementation(DISCOVERY)
    for module in model.modules():
        # A dynamic rotary embedding decides by the positions' values, which are not there; layers do not depend on it.
        if getattr(module, "rope_type", None) == "dynamic":
            module.rope_type = "default"
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")  # its control flow does not depend on the routing
    mixers = Mixers(module for module in model.modules() if is_mixer(module))
    if mixers.modules:
        model.to(_PROBE_DTYPE)  # shows which states have the model's dtype, and which one of their own
    recording = Recording()
    token = _RECORDING.set(recording)
    recorders = {module: _recorder(module, mixers.own_forward(module)) for module in mixers.modules}
    try:
        with (
            torch.no_grad(),
            _noting(model, recording),
            mixers.switched(recorders),
            noting_expansions(model, recording.expansions),
        ):
            model(**_probe_inputs(model, reads_mask=any(map(reads_padding, model.modules()))), use_cache=False)
    except Exception as error:
        raise ModelError(
            f"the layers of {name} cannot be read without its weights: a forward of {type(model).__name__} on tensors "
            f"without data fails ({one_sentence(error)})"
        ) from error
    finally:
        _RECORDING.reset(token)
    return recording


def _recorder(module: nn.Module, forward: Forward) -> Forward:
    """Return a forward that notes the states that ``forward`` leaves."""
    call = MixerCall.of(module)
    if call is None:
        return forward

    def record(*args: Any, **kwargs: Any) -> Any:
        view, inputs = StateView(), call.inputs_of(args, kwargs)
        output = forward(**{**inputs, call.cache: view})
        _RECORDING.get().calls.append(RecordedState(module, view.named(), inputs, output))
        return output

    return record


def _probe_inputs(model: Any, *, reads_mask: bool) -> dict[str, Any]:
    ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device="meta")
    # A padding mask keeps transformers from looking for packed sequences, which would take data. For mixers it looks at
    # the mask itself.
    mask = torch.ones_like(ids, device="cpu" if reads_mask else "meta")
    if not model.config.is_encoder_decoder:
        return {"input_ids": ids, "attention_mask": mask}
    # The encoder does not run: it keeps nothing, and is no part of a step.
    states = torch.empty(1, _PROBE_ENCODER_TOKENS, width_of_encoder(model), device="meta")
    encoded = BaseModelOutput(last_hidden_state=states)
    return {"encoder_outputs": encoded, "decoder_input_ids": ids, "decoder_attention_mask": mask}


@contextmanager
def _noting(model: nn.Module, recording: Recording) -> Iterator[None]:
    """Note every module that runs."""
    handles = [
        module.register_forward_pre_hook(lambda module, _: recording.ran.append(module)) for module in model.modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Reader:
    """Turns a recording into layer descriptions."""

    def __init__(self, model: nn.Module, name: str, max_model_len: int, recording: Recording, generates: bool) -> None:
        self._generates = generates
        self._names = {module: path for path, module in model.named_modules()}
        self._model = model
        self._name = name
        self._max_model_len = max_model_len
        self._recording = recording
        self._kinds: dict[int, MaskKind] = {}
        self._biases = BiasReader()

    def layers(self) -> tuple[LayerDescription, ...]:
        """Return a description of every recorded call; raises ``ModelError`` for what has none."""
        calls = self._recording.calls
        if not calls:
            raise ModelError(
                f"{self._name} ({type(self._model).__name__}) has no attention layer that goes through transformers' "
                "attention interface, and none that keeps a state in transformers' cache, so nothing can be routed "
                "through kvframe"
            )
        served = {call.module for call in calls}
        for module in self._recording.ran:
            if module not in served and _KEEPS_STATE.search(_forward_source(type(module))):
                raise self._refusal(module, "keeps a cache of its own, past transformers' attention interface")
        producers: dict[int, str] = {}
        found: dict[str, LayerDescription] = {}
        for call in calls:
            path = self._names[call.module]
            if path in found:
                what = "keeps a state" if isinstance(call, RecordedState) else "attends"
                raise self._refusal(call.module, f"{what} more than once in a forward")
            if isinstance(call, RecordedState):
                found[path] = self._describe_state(call, path)
                continue
            # A layer that is handed the very key tensor of an earlier one reads that layer's cache.
            producer = producers.setdefault(id(call.key), path)
            found[path] = self._describe(call, path, None if producer == path else producer)
        return tuple(found.values())

    def _describe(self, call: RecordedCall, path: str, shares_with: str | None) -> LayerDescription:
        unserved = [
            name
            for name, value in call.inputs.items()
            if isinstance(value, torch.Tensor) and name not in _KNOWN_TENSORS
        ]
        if unserved:
            raise self._refusal(call.module, f"gets {unserved[0]!r} with its attention, which no cache spec knows")
        try:
            relative_bias = self._biases.read(call.module, call.inputs.get("position_bias"))
        except LookupError as error:
            raise self._refusal(call.module, str(error)) from error
        mask = self._cross_mask_of(call) if call.is_cross else self._mask_of(call)
        if mask.kind is None:
            raise self._refusal(call.module, mask.why)
        _, num_heads, _, head_size = call.query.shape
        num_kv_heads, head_size_v = call.key.shape[1], call.value.shape[-1]
        options: dict[str, Any] = {"num_kv_heads": num_kv_heads, "head_size": head_size, **mask.options}
        if head_size_v != head_size:
            options["head_size_v"] = head_size_v
        query: Mapping[str, Any] = {
            "num_heads": num_heads,
            "head_size": head_size,
            "scale": scale_of(call.inputs.get("scaling"), head_size),
            "soft_cap": call.inputs.get("softcap"),
            "has_sinks": call.inputs.get("s_aux") is not None,
            **({} if relative_bias is None else {"relative_bias": relative_bias}),
        }
        kind, expansion = mask.kind, self._recording.expansions.get(call.module)
        if expansion is not None and kind == "full_attention" and expansion.is_of(call.key, call.value):
            kind, options = LATENT_KIND, expansion.options
        return LayerDescription(name=path, kind=kind, options=options, query=query, shares_with=shares_with)

    def _describe_state(self, call: RecordedState, path: str) -> LayerDescription:
        if not call.states:
            raise self._refusal(call.module, "keeps a state that transformers' cache does not show")
        for what, value in [
            *((f"gets {name!r}", value) for name, value in call.inputs.items()),
            ("returns", call.output),
        ]:
            for tensor in value if isinstance(value, tuple) else (value,):
                if isinstance(tensor, torch.Tensor) and tensor.shape[:2] != (1, _PROBE_TOKENS):
                    raise self._refusal(call.module, f"{what} a tensor without a row per token")
        options: dict[str, Any] = {}
        for kind in ("conv", "recurrent"):
            states = [state for name, state in call.states.items() if name.startswith(kind)]
            if states:
                dtypes = [str(state.dtype).removeprefix("torch.") for state in states]
                options[f"{kind}_shapes"] = tuple(tuple(state.shape[1:]) for state in states)
                options[f"{kind}_dtypes"] = tuple(
                    "auto" if state.dtype == _PROBE_DTYPE else dtype
                    for state, dtype in zip(states, dtypes, strict=True)
                )
        return LayerDescription(name=path, kind="mamba", options=options, query={})

    def _cross_mask_of(self, call: RecordedCall) -> MaskKind:
        masks = [mask for mask in self._recording.masks if call.mask is mask.marker]
        if call.mask is None or (masks and sees_all(masks[0].function, _PROBE_ENCODER_TOKENS)):
            return MaskKind("cross_attention")
        return MaskKind(None, why="sees only some of what the encoder gives")

    def _mask_of(self, call: RecordedCall) -> MaskKind:
        kind = self._kind_of(call)
        return MaskKind("encoder_only") if kind.sees_all and not self._generates else kind

    def _kind_of(self, call: RecordedCall) -> MaskKind:
        if call.mask is None:
            return MaskKind(None, why="attends without a mask (bidirectional attention)", sees_all=True)
        for mask in self._recording.masks:
            if call.mask is mask.marker or getattr(call.mask, "_base", None) is mask.marker:
                if id(mask) not in self._kinds:
                    self._kinds[id(mask)] = classify_mask(
                        mask.function, self._max_model_len, mask.local_size, mask.chunk_size
                    )
                return self._kinds[id(mask)]
        return MaskKind(None, why="changes its mask after transformers made it")

    def _refusal(self, module: nn.Module, why: str) -> ModelError:
        return ModelError(
            f"layer {self._names[module]!r} of {self._name} ({type(module).__name__}) {why}: serving it takes a plugin "
            "that provides a cache spec for this attention, and a model adapter that recognises it"
        )


def scale_of(scaling: float | None, head_size: int) -> float:
    """Return the factor on the query-key products; transformers' default where the call names none."""
    return head_size**-0.5 if scaling is None else float(scaling)
