"""Multiplies by copies of a model's weights in the order that the processor reads fastest (oneDNN's packed weights)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeGuard

import torch
from torch import nn

_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinears:
    """The linear layers of a model on a CPU, each beside a packed copy of its weight.

    Invariant: between ``switch_on`` and ``switch_off`` each of them multiplies by its copy. Its weight is unchanged.
    """

    def __init__(self, model: nn.Module) -> None:
        """Pack the weights of all linear layers that can be packed.

        Args:
            model: The model, on its device.
        """
        self._forwards = [(vars(each), _packed_forward(each)) for each in model.modules() if _can_be_packed(each)]

    def __len__(self) -> int:
        """The number of packed layers."""
        return len(self._forwards)

    def switch_on(self) -> None:
        """Make each layer multiply by its copy."""
        for attributes, forward in self._forwards:
            attributes["forward"] = forward  # a module calls the ``forward`` of its instance, if there is one

    def switch_off(self) -> None:
        """Make each layer multiply by its own weight."""
        for attributes, _ in self._forwards:
            attributes.pop("forward", None)


def _can_be_packed(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a module is a plain linear layer whose weight lies on a CPU, whole."""
    if type(module) is not nn.Linear or "forward" in vars(module) or not torch.backends.mkldnn.is_available():
        return False
    weight = module.weight.detach()
    return type(weight) is torch.Tensor and weight.device.type == "cpu" and weight.dtype in _DTYPES


def _packed_forward(layer: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    bias = None if layer.bias is None else layer.bias.detach()
    return partial(_multiply, torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach()), bias)


def _multiply(packed: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return result
