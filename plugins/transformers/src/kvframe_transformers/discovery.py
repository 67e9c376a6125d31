"""Finds a model's attention layers by one forward without weights: by their calls, not by the model's name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvframe.contract import LayerDescription, ModelError
from kvframe_transformers.alibi import PARAMETER as SLOPES
from kvframe_transformers.alibi import slopes_of
from kvframe_transformers.calls import name_of_call, path_of
from kvframe_transformers.compressors import describe_entries, find_compressor
from kvframe_transformers.direct_recording import hides_keys_from_all
from kvframe_transformers.encoders import attends_sparsely, computes_waves, counts_positions, has_table_of_waves
from kvframe_transformers.indexer_kinds import IndexerKind, find_indexer, reads_choices
from kvframe_transformers.indexers import ENTRY
from kvframe_transformers.known_values import KnownValues
from kvframe_transformers.latents import KIND as LATENT_KIND
from kvframe_transformers.masks import MaskKind, classify_mask, sees_all
from kvframe_transformers.names import if_untested
from kvframe_transformers.recorded import RecordedCall, RecordedState, Recording
from kvframe_transformers.recording import PROBE_DTYPE, PROBE_ENCODER_TOKENS, PROBE_TOKENS, record
from kvframe_transformers.relative_bias import BiasReader, bias_of
from kvframe_transformers.states import CACHE_NAMES
from kvframe_transformers.uniform import AnyIndex

_KEEPS_STATE = re.compile(rf"\b({'|'.join(CACHE_NAMES)}|layer_past)(\.layers\[[^]]+\])?\.(?P<update>update\w*)\(")
_KNOWN_TENSORS = frozenset(
    {"s_aux", "position_ids", "cache_position", "position_bias", "alibi", "indices", "block_indices"}
)
"""Tensors that may come with an attention call: those that kvframe serves, and those that change nothing."""


class OwnMaskError(ModelError):
    """A module attends with a mask that it makes itself; only the shape of the mask is known."""


def discover_layers(
    model: Any,
    name: str,
    max_model_len: int,
    *,
    generates: bool = True,
    inputs: Mapping[str, Any] | None = None,
    values: KnownValues | None = None,
) -> tuple[LayerDescription, ...]:
    """Return the layers of a model on the meta device that attend or keep state, in the order they run.

    Args:
        model: A ``PreTrainedModel`` for this call only: its attention implementation and its dtype are changed.
        name: The model's name in errors.
        max_model_len: The most tokens of a request: masks are examined up to here.
        generates: Whether tokens are generated one after the other, so that no token may see later ones.
        inputs: What the model is called with; a few tokens unless given.
        values: What is known of the tensors of a model that was built to know it: masks of modules are read then.

    Raises:
        ModelError: The model keeps state, or masks attention, in a way that no cache spec describes, or it cannot take
            the positions of a packed batch.
    """
    if not generates and attends_sparsely(model):
        raise ModelError(f"{name} ({type(model).__name__}) attends to some tokens of long texts only")
    recording = record(model, name, inputs, values, PROBE_TOKENS if values is None else max_model_len)
    layers = _Reader(model, name, max_model_len, recording, generates).layers()
    attends = any(layer.query for layer in layers)
    if attends and not _takes_positions(model, layers, recording.ran):
        raise ModelError(
            f"{name} ({type(model).__name__}) takes no position_ids, so several requests cannot be packed into one "
            "batch; only a model adapter of its own can serve it"
        )
    return layers


def _takes_positions(model: Any, layers: Sequence[LayerDescription], ran: Sequence[nn.Module]) -> bool:
    if takes_positions(model) or takes_decoder_positions(model):
        return True
    checks = (takes_position_ids, has_table_of_waves, counts_positions, computes_waves)
    if any(check(module) for module in ran for check in checks):
        return True
    # Such a model uses positions only as distances in the scores.
    return all({"relative_bias", SLOPES} & layer.query.keys() or layer.kind == "cross_attention" for layer in layers)


def sees_whole_prompts(model: nn.Module, layers: Sequence[LayerDescription]) -> bool:
    """Return whether all tokens of a prompt see each other, though the masks of a generating model are causal.

    transformers then makes no mask for a prompt, and its attention functions are not causal (PaliGemma).

    Raises:
        ModelError: Some layers attend so, and others do not.
    """
    modules = dict(model.named_modules())
    whole = {layer.name: _sees_whole_prompts(modules[path_of(layer.name)]) for layer in layers if layer.query}
    if any(whole.values()) and not all(whole.values()):
        whole_name, causal_name = (
            next(name for name, is_whole in whole.items() if is_whole is sees_whole) for sees_whole in (True, False)
        )
        raise ModelError(
            f"layer {whole_name!r} lets all tokens of a prompt see each other (use_bidirectional_attention), and "
            f"layer {causal_name!r} does not; kvframe serves models whose layers are alike in this"
        )
    return any(whole.values())


def _sees_whole_prompts(module: nn.Module) -> bool:
    is_causal, config = getattr(module, "is_causal", True), getattr(module, "config", None)
    return not is_causal and getattr(config, "use_bidirectional_attention", None) is True


def takes_positions(model: Any) -> bool:
    """Return whether a model takes positions, or passes its further arguments to a decoder that does."""
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" in parameters or not any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    ):
        return "position_ids" in parameters
    if not isinstance(model, PreTrainedModel) or model.config.is_encoder_decoder:
        return False
    decoder: Any = model.get_decoder()
    return decoder is not model and "position_ids" in inspect.signature(decoder.forward).parameters


def takes_decoder_positions(model: Any) -> bool:
    """Return whether an encoder-decoder takes positions for its decoder, or passes such arguments on to it."""
    parameters = inspect.signature(model.forward).parameters
    if "decoder_position_ids" in parameters:
        return True
    # A model of two models passes the arguments of the decoder on, without the prefix of their names.
    if not hasattr(model.config, "decoder") or not any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    ):
        return False
    return "position_ids" in inspect.signature(model.get_decoder().forward).parameters


def takes_position_ids(module: nn.Module) -> bool:
    """Return whether a module takes positions as an argument and looks them up."""
    return isinstance(module, nn.Embedding) and "position_ids" in inspect.signature(module.forward).parameters


def _forward_source(module_class: type) -> str:
    try:
        return _source_of(inspect.unwrap(module_class.forward).__code__)  # type: ignore[attr-defined]
    except (AttributeError, OSError, TypeError):  # there is no forward, or it was made at run time
        return ""


@cache
def _source_of(code: CodeType) -> str:
    return inspect.getsource(code)


_OWN_MASK = "changes its mask after transformers made it"


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
        self._last_indexer: nn.Module | None = None

    def layers(self) -> tuple[LayerDescription, ...]:
        """Return a description of every recorded call; raise ``ModelError`` for a call that has none."""
        calls = self._recording.calls
        if not calls:
            raise ModelError(
                f"{self._name} ({type(self._model).__name__}) has no attention layer that goes through transformers' "
                "attention interface, and none that keeps a state in transformers' cache, so nothing can be routed "
                f"through kvframe{if_untested()}"
            )
        served_modules = (
            {call.module for call in calls} | self._recording.index_keys.keys() | self._recording.compressed.keys()
        )
        for module in self._recording.ran:
            cache_update = None if module in served_modules else _KEEPS_STATE.search(_forward_source(type(module)))
            if cache_update is not None and cache_update["update"].startswith("update_index"):
                raise self._refusal(
                    module,
                    "is a sparse indexer: it caches keys of its own, and chooses by them the past tokens that "
                    "attention reads; no cache spec keeps such keys",
                )
            if cache_update is not None:
                raise self._refusal(module, "keeps a cache of its own, outside of transformers' attention interface")
        producers: dict[tuple[int, int], str] = {}
        num_calls: dict[str, int] = {}
        layers_by_name: dict[str, LayerDescription] = {}
        for call in calls:
            path = self._names[call.module]
            number = num_calls[path] = num_calls.get(path, 0) + 1
            if isinstance(call, RecordedState):
                if number > 1:
                    raise self._refusal(call.module, "keeps a state more than once in a forward")
                layers_by_name[path] = self._describe_state(call, path)
                continue
            if number > 1:
                second_layer = self._describe(call, path, None)
                if second_layer == layers_by_name[path] and second_layer.kind == "encoder_only":
                    continue  # nothing outlives a call, so each call may be one of the same layer
                if LATENT_KIND in (second_layer.kind, layers_by_name[path].kind):
                    raise self._refusal(call.module, "attends to latents more than once in a forward")
            name = name_of_call(path, number)
            # A layer that attends to the tensor objects of an earlier layer reads that layer's cache.
            producer = producers.setdefault(self._stored_by(call), name)
            layers_by_name[name] = self._describe(call, name, None if producer == name else producer)
            indexer = find_indexer(call.module)
            keys = None if indexer is None else self._recording.index_keys.get(indexer)
            if keys is not None:
                entry = f"{name}/{ENTRY}"
                layers_by_name[entry] = LayerDescription(
                    name=entry, kind="token_entries", options={"tensors": {ENTRY: keys}}, query={}, entry_of=name
                )
            compressor = find_compressor(call.module)
            if compressor is not None:
                entries = describe_entries(name, compressor, self._recording.compressed[compressor])
                layers_by_name |= {entry.name: entry for entry in entries}
        return tuple(layers_by_name.values())

    def _stored_by(self, call: RecordedCall) -> tuple[int, int]:
        """Return what identifies the tensors that a call's layer stores: keys and values, or latents."""
        expansion = self._recording.expansions.get(call.module)
        if expansion is not None and expansion.is_of(call.key, call.value):
            return id(expansion.latents), id(expansion.rotated)
        return id(call.key), id(call.value)

    def _choice_of(self, call: RecordedCall) -> Mapping[str, int] | None:
        """Return the form of the choices that a call reads: those of its module's indexer, or of the one before it."""
        if not reads_choices(call.module, call.inputs):
            return None
        indexer = find_indexer(call.module) or self._last_indexer
        kind = None if indexer is None else IndexerKind.of(indexer)
        if kind is None:
            raise self._refusal(call.module, "reads tokens that no indexer before it has chosen")
        self._last_indexer = indexer
        return kind.choice

    def _describe(self, call: RecordedCall, path: str, shares_with: str | None) -> LayerDescription:
        problems = [
            name
            for name, value in call.inputs.items()
            if isinstance(value, torch.Tensor) and name not in _KNOWN_TENSORS
        ]
        if problems:
            raise self._refusal(call.module, f"gets {problems[0]!r} with its attention, which no cache spec knows")
        try:
            bias = call.inputs.get("position_bias")
            if call.is_direct and bias is not None:
                relative_bias: Mapping[str, Any] | None = bias_of(self._model, call.query.shape[1])
            else:
                relative_bias = self._biases.read(call.module, bias)
            slopes = None
            if call.inputs.get("alibi") is not None:
                slopes = slopes_of(self._model, call.query.shape[1])
        except LookupError as error:
            raise self._refusal(call.module, str(error)) from error
        choice = self._choice_of(call)
        if choice is not None:
            mask = MaskKind("full_attention")  # what is chosen is the indexer's own, and the self-check sees it
        else:
            mask = self._cross_mask_of(call) if call.is_cross else self._mask_of(call)
        if mask.kind is None:
            refusal = self._refusal(call.module, mask.why)
            raise OwnMaskError(str(refusal)) if mask.why == _OWN_MASK and call.is_direct else refusal
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
            **({} if slopes is None else {SLOPES: slopes}),
            **({} if choice is None else {"choice": choice}),
            **({} if find_compressor(call.module) is None else {"merged": True}),
        }
        kind, expansion = mask.kind, self._recording.expansions.get(call.module)
        if expansion is not None and kind == "full_attention" and expansion.is_of(call.key, call.value):
            kind, options = LATENT_KIND, expansion.options
        return LayerDescription(name=path, kind=kind, options=options, query=query, shares_with=shares_with)

    def _describe_state(self, call: RecordedState, path: str) -> LayerDescription:
        if not call.states:
            raise self._refusal(call.module, "keeps a state that transformers' cache does not show")
        for verb, value in [
            *((f"gets {name!r}", value) for name, value in call.inputs.items()),
            ("returns", call.output),
        ]:
            for tensor in value if isinstance(value, tuple) else (value,):
                if isinstance(tensor, torch.Tensor) and tensor.shape[:2] != (1, PROBE_TOKENS):
                    raise self._refusal(call.module, f"{verb} a tensor without a row per token")
        options: dict[str, Any] = {}
        for kind in ("conv", "recurrent"):
            states = [state for name, state in call.states.items() if name.startswith(kind)]
            if states:
                dtypes = [str(state.dtype).removeprefix("torch.") for state in states]
                options[f"{kind}_shapes"] = tuple(tuple(state.shape[1:]) for state in states)
                options[f"{kind}_dtypes"] = tuple(
                    "auto" if state.dtype == PROBE_DTYPE else dtype for state, dtype in zip(states, dtypes, strict=True)
                )
        return LayerDescription(name=path, kind="mamba", options=options, query={})

    def _cross_mask_of(self, call: RecordedCall) -> MaskKind:
        config: Any = self._model.config
        if not config.is_encoder_decoder:
            return MaskKind(
                None,
                why=f"attends to {call.key.shape[2]} keys in a forward of {call.query.shape[2]} tokens, such as "
                "compressed tokens beside the past ones",
            )
        masks = [mask for mask in self._recording.masks if call.mask is mask.marker]
        if call.mask is None or (masks and sees_all(masks[0].function, PROBE_ENCODER_TOKENS)):
            return MaskKind("cross_attention")
        return MaskKind(None, why="sees only some of the encoder's tokens")

    def _mask_of(self, call: RecordedCall) -> MaskKind:
        kind = self._kind_of(call)
        return MaskKind("encoder_only", kind.options) if kind.is_bidirectional and not self._generates else kind

    def _kind_of(self, call: RecordedCall) -> MaskKind:
        if call.mask is None:
            return MaskKind(None, why="attends without a mask (bidirectional attention)", is_bidirectional=True)
        for mask in self._recording.masks:
            if call.mask is mask.marker or getattr(call.mask, "_base", None) is mask.marker:
                if id(mask) not in self._kinds:
                    with AnyIndex(self._recording.uniform):
                        self._kinds[id(mask)] = classify_mask(
                            mask.function, self._max_model_len, mask.local_size, mask.chunk_size
                        )
                return self._kinds[id(mask)]
        if hides_keys_from_all(call.mask, call.key.shape[2]):
            return MaskKind(None, why="attends without a mask (bidirectional attention)", is_bidirectional=True)
        return MaskKind(None, why=_OWN_MASK)

    def _refusal(self, module: nn.Module, why: str) -> ModelError:
        return ModelError(
            f"layer {self._names[module]!r} of {self._name} ({type(module).__name__}) {why}; only a plugin "
            "with a cache spec for this attention, and a model adapter that recognises it, can serve it"
        )


def scale_of(scaling: float | None, head_size: int) -> float:
    """Return the factor on the query-key products; transformers' default if the call names none."""
    return head_size**-0.5 if scaling is None else float(scaling)
