"""ALiBi (arXiv 2108.12409): finds the slopes that a model adds to its attention scores."""

from __future__ import annotations

import inspect
import re

import torch
from torch import nn

PARAMETER = "alibi_slopes"
"""The query side's field."""

DEFAULT_POSITIONS = 2048
"""The limit for a model whose config names none, because it has no last position: the length of BLOOM's training."""

_MAKER = re.compile(r"build_(\w+_)?alibi_tensor")


def is_alibi(bias: torch.Tensor, num_heads: int, num_keys: int) -> bool:
    """Return whether what is added to scores has, for each head, a number for each key, equal for all queries."""
    return num_heads > 1 and bias.shape[-3:] == (num_heads, 1, num_keys) and bias.numel() == num_heads * num_keys


def slopes_of(model: nn.Module, num_heads: int) -> tuple[float, ...]:
    """Return the slopes of a model: its own function makes them, for two keys.

    The self-check compares what they give with the model.

    Raises:
        LookupError: The model has no such function, or the function gives no slopes; the message is the end of a
            sentence.
    """
    for module in model.modules():
        for name in filter(_MAKER.fullmatch, dir(type(module))):
            make = getattr(module, name)
            if "attention_mask" in inspect.signature(make).parameters:
                bias = make(torch.ones(1, 2, device="cpu"), num_heads, torch.float32)
            else:
                bias = make(num_heads, 2, device="cpu")
            if bias.shape == (num_heads, 1, 2):
                return tuple((bias[:, 0, 1] - bias[:, 0, 0]).tolist())
    raise LookupError("adds a number for each key to its scores, which is not that of ALiBi")
