"""One forward of a model without weights, in which attention, masks and mixers are only noted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import attrs
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_outputs import BaseModelOutput

from kvframe.contract import ModelError
from kvframe_transformers.checkpoint import one_sentence
from kvframe_transformers.latents import Expansion, noting_expansions
from kvframe_transformers.masks import MaskFunction
from kvframe_transformers.states import Forward, Inputs, MixerCall, Mixers, StateView, is_mixer, reads_padding

DISCOVERY = "kvframe_discovery"
"""The attention implementation, and the mask implementation, under which a forward is only recorded."""

PROBE_TOKENS = 4
"""Tokens of the probe forward."""

PROBE_ENCODER_TOKENS = 7
"""Tokens that a probed encoder made; not as many as there are tokens, so that lengths tell which is which."""

PROBE_DTYPE = torch.bfloat16
"""The dtype of a probed model; no other one, so that what a module keeps in another one shows."""


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


def width_of_encoder(model: Any) -> int:
    """Return the elements of what a model's encoder gives for a token: as its own config says, where it has one."""
    width: int = model.get_encoder().config.hidden_size
    return width


def record(model: Any, name: str) -> Recording:
    """Run a model without weights once, and return what it called.

    Args:
        model: A ``PreTrainedModel`` on the meta device that nobody else uses: its implementations are changed.
        name: What the model is called in errors.

    Raises:
        ModelError: The forward fails.
    """
    model.set_attn_implementation(DISCOVERY)
    for module in model.modules():
        # A dynamic rotary embedding decides by the positions' values, which are not there; layers do not depend on it.
        if getattr(module, "rope_type", None) == "dynamic":
            module.rope_type = "default"
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")  # its control flow does not depend on the routing
    mixers = Mixers(module for module in model.modules() if is_mixer(module))
    if mixers.modules:
        model.to(PROBE_DTYPE)  # shows which states have the model's dtype, and which one of their own
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

    def run(*args: Any, **kwargs: Any) -> Any:
        view, inputs = StateView(), call.inputs_of(args, kwargs)
        output = forward(**{**inputs, call.cache: view})
        _RECORDING.get().calls.append(RecordedState(module, view.named(), inputs, output))
        return output

    return run


def _probe_inputs(model: Any, *, reads_mask: bool) -> dict[str, Any]:
    ids = torch.zeros(1, PROBE_TOKENS, dtype=torch.int64, device="meta")
    # A padding mask keeps transformers from looking for packed sequences, which would take data. For mixers it looks at
    # the mask itself.
    mask = torch.ones_like(ids, device="cpu" if reads_mask else "meta")
    if not model.config.is_encoder_decoder:
        return {"input_ids": ids, "attention_mask": mask}
    # The encoder does not run: it keeps nothing, and is no part of a step.
    states = torch.empty(1, PROBE_ENCODER_TOKENS, width_of_encoder(model), device="meta")
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
