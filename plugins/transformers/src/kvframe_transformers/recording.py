"""Runs one forward of a model without weights, in which attention, masks and mixers are only recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import attrs
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from kvframe.contract import ModelError
from kvframe_transformers.checkpoint import one_sentence
from kvframe_transformers.compressors import find_compressor
from kvframe_transformers.compressors import probe as probe_compressor
from kvframe_transformers.direct_attention import attends_directly
from kvframe_transformers.direct_recording import direct_recorder
from kvframe_transformers.implementations import IMPLEMENTATION, configs_of
from kvframe_transformers.indexer_kinds import find_indexer, keeps_index_keys
from kvframe_transformers.indexers import probe
from kvframe_transformers.known_values import KnownValues
from kvframe_transformers.latents import noting_expansions
from kvframe_transformers.masks import MaskFunction
from kvframe_transformers.names import if_untested
from kvframe_transformers.own_states import keeping_own_states
from kvframe_transformers.recorded import RECORDING, RecordedCall, RecordedMask, RecordedState, Recording
from kvframe_transformers.states import (
    CACHE_NAMES,
    Forward,
    MixerCall,
    StateView,
    is_mixer,
    own_forward,
    reads_padding,
    replaced_forwards,
    with_rows,
)
from kvframe_transformers.without_values import WithoutValues

DISCOVERY = "kvframe_discovery"
"""The attention implementation, and the mask implementation, under which a forward is only recorded."""

PROBE_TOKENS = 4
"""Tokens of the probe forward."""

PROBE_ENCODER_TOKENS = 7
"""Tokens of a probed encoder. It differs from ``PROBE_TOKENS``, so that a shape shows whose tokens it counts."""

PROBE_DTYPE = torch.bfloat16
"""The dtype of a probed model; an unusual one, so that a module's state in another dtype can be recognised."""


def _record_mask(
    *, batch_size: int, q_length: int, kv_length: int, mask_function: MaskFunction, config: Any = None, **inputs: Any
) -> torch.Tensor:
    """Return a tensor in place of a mask; in an attention call, it identifies the function that makes the mask."""
    marker = torch.empty(batch_size, 1, q_length, kv_length, device="meta")
    chunk_size = getattr(config, "attention_chunk_size", None)
    RECORDING.get().masks.append(RecordedMask(marker, mask_function, inputs.get("local_size"), chunk_size))
    return marker


def _record_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    **inputs: Any,
) -> tuple[torch.Tensor, None]:
    """Record the call, and return an output of the right shape, as transformers' attention functions do."""
    RECORDING.get().calls.append(RecordedCall(module, query, key, value, attention_mask, inputs))
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1]), None


AttentionInterface.register(DISCOVERY, _record_attention)


AttentionMaskInterface.register(DISCOVERY, _record_mask)


@dataclass
class EncoderOutput(BaseModelOutput):  # type: ignore[misc]
    """An encoder's output for a decoder.

    Attributes:
        attention_mask: None, because no input is padded. Some decoders read it.
        router_logits: None; for a loss in training. Models with experts read it.
        router_probs: Likewise.
    """

    attention_mask: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None
    router_probs: tuple[torch.Tensor, ...] | None = None


def width_of_encoder(model: Any) -> int:
    """Return the size of an encoder's output for a token, by the encoder's own config if there is one."""
    config: Any = getattr(model.get_encoder(), "config", model.config)
    width: int = config.get_text_config().hidden_size
    return width


def record(
    model: Any,
    name: str,
    inputs: Mapping[str, Any] | None = None,
    values: KnownValues | None = None,
    num_tokens: int = PROBE_TOKENS,
) -> Recording:
    """Run a model without weights, and return its recorded calls.

    If no module calls transformers' attention interface, it runs again, and the modules that compute attention
    themselves are recorded.

    Args:
        model: A ``PreTrainedModel`` on the meta device for this call only: its implementations are changed.
        name: The model's name in errors.
        inputs: What it is called with; ``num_tokens`` tokens unless given.
        values: What is known of the model's tensors, to read the masks that modules make themselves.
        num_tokens: The tokens.

    Raises:
        ModelError: The forward fails.
    """
    if values is not None:
        with values:
            return _record(model, name, inputs, direct=True, values=values, num_tokens=num_tokens)
    recording = _record(model, name, inputs, direct=False)
    if recording.calls or not any(map(attends_directly, model.modules())):
        return recording
    try:
        return _record(model, name, inputs, direct=True)
    except ModelError:
        return recording  # they do more than is known


def _record(
    model: Any,
    name: str,
    inputs: Mapping[str, Any] | None,
    *,
    direct: bool,
    values: KnownValues | None = None,
    num_tokens: int = PROBE_TOKENS,
) -> Recording:
    model.set_attn_implementation(DISCOVERY)
    if direct:
        for config in configs_of(model):
            vars(config)[IMPLEMENTATION] = DISCOVERY  # such models refuse other implementations than their own
    for module in model.modules():
        # These rotary embeddings (longrope in transformers 5.20 only) depend on the positions' values, which do not
        # exist here; layers do not depend on them.
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, dict):
            module.rope_type = {layer: _without_values(layer_type) for layer, layer_type in rope_type.items()}
        elif rope_type is not None:
            module.rope_type = _without_values(rope_type)
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part._can_set_experts_implementation():
            part.set_experts_implementation("batched_mm")  # its control flow does not depend on the routing
    mixers = [module for module in model.modules() if is_mixer(module)]
    own_forwards = {} if mixers else keeping_own_states(model)
    if mixers or own_forwards:
        model.to(PROBE_DTYPE)  # shows which states have the model's dtype, and which have another one
    recorders = {module: _recorder(module, own_forward(module), MixerCall.of(module)) for module in mixers}
    recorders |= {
        module: _recorder(module, forward, MixerCall.with_own_states(module))
        for module, forward in own_forwards.items()
    }
    if direct:
        recorders |= {module: direct_recorder(module) for module in model.modules() if attends_directly(module)}
    recording = Recording(values=values)
    for module in model.modules():
        indexer = find_indexer(module)
        if indexer is not None and keeps_index_keys(indexer):
            note = partial(_note_index_keys, recording, indexer)
            recorders[indexer] = probe(indexer, own_forward(indexer), note)
        compressor = find_compressor(module)
        if compressor is not None:
            keep = partial(recording.compressed.__setitem__, compressor)
            recorders[compressor] = probe_compressor(compressor, own_forward(compressor), keep)
    token = RECORDING.set(recording)
    try:
        with (
            torch.no_grad(),
            WithoutValues(_note_result),
            _noting(model, recording),
            replaced_forwards(recorders),
            noting_expansions(model, recording.expansions),
        ):
            if inputs is None:
                inputs = _probe_inputs(model, num_tokens, reads_mask=any(map(reads_padding, model.modules())))
            model(**inputs, use_cache=False)
    except Exception as error:
        raise ModelError(
            f"the layers of {name} cannot be read without its weights: a forward of {type(model).__name__} on tensors "
            f"without data fails ({one_sentence(error)}){if_untested()}"
        ) from error
    finally:
        RECORDING.reset(token)
    return recording


def _note_index_keys(recording: Recording, indexer: nn.Module, shape: tuple[int, ...]) -> None:
    recording.index_keys[indexer] = tuple(shape)


def _note_result(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
    recording = RECORDING.get()
    recording.uniform.note(func, args, kwargs, result)
    if func is torch.ops.aten._to_copy.default:
        # A mask in another dtype is the same mask.
        masks = recording.masks
        masks += [attrs.evolve(mask, marker=result) for mask in masks if mask.marker is args[0]]


def _without_values(rope_type: Any) -> Any:
    return "default" if rope_type in ("dynamic", "longrope") else rope_type


def _recorder(module: nn.Module, forward: Forward, call: MixerCall | None) -> Forward:
    """Return a forward that records the states that ``forward`` leaves."""
    if call is None:
        raise ModelError(
            f"{type(module).__name__} keeps a state in transformers' cache, and has no argument for it of the name "
            f"{' or '.join(CACHE_NAMES)}{if_untested()}"
        )

    def run(*args: Any, **kwargs: Any) -> Any:
        view, inputs = StateView(), call.inputs_of(args, kwargs)
        output = with_rows(forward(**{**inputs, call.cache: view}), inputs[call.tokens], view)
        RECORDING.get().calls.append(RecordedState(module, view.named(), inputs, output))
        return output

    return run


def _probe_inputs(model: Any, num_tokens: int, *, reads_mask: bool) -> dict[str, Any]:
    ids = torch.zeros(1, num_tokens, dtype=torch.int64, device="meta")
    # A padding mask keeps transformers from searching for packed sequences, which needs data. For mixers, transformers
    # reads the mask itself.
    mask = torch.ones_like(ids, device="cpu" if reads_mask else "meta")
    if not model.config.is_encoder_decoder:
        return {"input_ids": ids, "attention_mask": mask}
    # The encoder does not run: it keeps no state, and is not part of a step.
    states = torch.empty(1, PROBE_ENCODER_TOKENS, width_of_encoder(model), device="meta")
    encoder_output = EncoderOutput(last_hidden_state=states)
    return {"encoder_outputs": encoder_output, "decoder_input_ids": ids, "decoder_attention_mask": mask}


@contextmanager
def _noting(model: nn.Module, recording: Recording) -> Iterator[None]:
    """Record every module that runs."""
    handles = [
        module.register_forward_pre_hook(lambda module, _: recording.ran.append(module)) for module in model.modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
