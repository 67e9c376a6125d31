"""Records the attention of modules that compute it themselves, and the masks that they make."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kvframe.contract import ModelError
from kvframe_transformers.alibi import is_alibi
from kvframe_transformers.direct_attention import DirectAttention, replacing
from kvframe_transformers.known_values import KnownValues, visible_keys
from kvframe_transformers.recorded import RECORDING, RecordedCall, RecordedMask
from kvframe_transformers.states import Forward, own_forward


def direct_recorder(module: nn.Module) -> Forward:
    """Return a module's forward, which records the attention that the module computes itself."""

    def attend(attention: DirectAttention, value: torch.Tensor) -> torch.Tensor:
        bias: torch.Tensor | None = None
        alibi: torch.Tensor | None = None
        masks: list[torch.Tensor] = []
        for tensor in attention.added:
            if alibi is None and is_alibi(tensor, attention.query.shape[1], attention.key.shape[2]):
                alibi = tensor
                continue
            if hides_keys_from_all(tensor, attention.key.shape[2]):
                continue
            if bias is None and tensor.shape[1:] == (
                attention.query.shape[1],
                attention.query.shape[2],
                attention.key.shape[2],
            ):
                bias = tensor
            else:
                masks.append(tensor)
        if attention.scales_added and (bias is not None or alibi is not None):
            raise ModelError("a module scales its attention scores after it adds a bias, which kvframe does not know")
        # Of several masks, one may hide more than another.
        mask: Any = None if not masks else masks[0] if len(masks) == 1 else _UNKNOWN
        values = RECORDING.get().values
        if values is not None and masks:
            own_mask = _mask_of(attention, values)
            mask = mask if own_mask is None else own_mask
        inputs = {"scaling": attention.scale, "position_bias": bias, "alibi": alibi}
        RECORDING.get().calls.append(
            RecordedCall(module, attention.query, attention.key, value, mask, inputs, is_direct=True)
        )
        return attention.query.new_empty(*attention.query.shape[:-1], value.shape[-1])

    return replacing(own_forward(module), attend)


def hides_keys_from_all(mask: Any, num_keys: int) -> bool:
    """Return whether what is added to scores, or hides some, is the same for all queries and heads, as for padding."""
    return isinstance(mask, torch.Tensor) and mask.shape[-1] == num_keys and set(mask.shape[1:-1]) == {1}


def _mask_of(attention: DirectAttention, values: KnownValues) -> torch.Tensor | None:
    """Record the mask that a module makes itself, and return what identifies it; None if its values are not known."""
    num_tokens, masks = attention.query.shape[2], RECORDING.get().masks
    for mask in masks:  # a module may use one of transformers' masks beside its own
        is_added = any(tensor is mask.marker for tensor in attention.added)
        if is_added and values.value_of(mask.marker) is None:
            mask_values = _values_of(mask, num_tokens)
            if mask_values is not None:
                values.set_value(mask.marker, mask_values)
    if visible_keys(attention.changes, values, num_tokens, query=num_tokens - 1) is None:
        return None

    def function(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        visible = visible_keys(attention.changes, values, num_tokens, int(query))
        if visible is None:
            raise IndexError("the scores of this query become something else")
        return visible[key]

    marker = torch.empty(1, 1, num_tokens, num_tokens, device="meta")
    masks.append(RecordedMask(marker, function, None, None))
    return marker


def _values_of(mask: RecordedMask, num_tokens: int) -> torch.Tensor | None:
    """Return the values of a mask that is added, ``[1, 1, num_tokens, num_tokens], host``."""
    tokens, zero = torch.arange(num_tokens), torch.tensor(0)
    try:
        visible = mask.function(zero, zero, tokens[:, None], tokens[None, :])
    except (RuntimeError, NotImplementedError, IndexError):  # it indexes tensors of the model, which have no data
        return None
    invisible = ~torch.as_tensor(visible).broadcast_to(num_tokens, num_tokens)
    return torch.zeros(1, 1, num_tokens, num_tokens).masked_fill(invisible, float("-inf"))


_UNKNOWN = object()
"""Stands for several masks together."""
