"""Multiplies by copies of a model's weights in the order that the processor reads fastest (oneDNN's packed weights)."""

from __future__ import annotations

from functools import partial
from typing import TypeGuard

import torch
from torch import nn

_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinears:
    """The linear layers of a model on a CPU, each beside a packed copy of its weight.

    Invariant: until ``remove``, each of them multiplies by its copy; its own weight is unchanged.
    """

    def __init__(self, model: nn.Module) -> None:
        """Pack the weights of all linear layers that can be packed.

        Args:
            model: The model, on its device.
        """
        self._layers: list[nn.Linear] = [each for each in model.modules() if _can_be_packed(each)]
        for layer in self._layers:
            packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach())
            # A module calls the ``forward`` of its instance, if there is one.
            vars(layer)["forward"] = partial(_multiply, packed, layer.bias)

    def __len__(self) -> int:
        """The number of packed layers."""
        return len(self._layers)

    def remove(self) -> None:
        """Let each layer multiply by its own weight; drop the copies."""
        for layer in self._layers:
            vars(layer).pop("forward", None)
        self._layers = []


def _can_be_packed(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a module is a plain linear layer whose weight lies on a CPU, whole."""
    if type(module) is not nn.Linear or "forward" in vars(module) or not torch.backends.mkldnn.is_available():
        return False
    weight = module.weight.detach()
    return type(weight) is torch.Tensor and weight.device.type == "cpu" and weight.dtype in _DTYPES


def _multiply(packed: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return result
