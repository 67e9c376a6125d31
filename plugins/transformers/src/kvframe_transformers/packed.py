"""Multiplies by copies of a model's weights in the order that the processor reads fastest (oneDNN's packed weights)."""

from __future__ import annotations

import itertools
from typing import TypeGuard
from weakref import WeakValueDictionary

import torch
from torch import nn

_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinears:
    """The linear layers of a model on a CPU, each beside a packed copy of its weight.

    Invariant: between ``switch_on`` and ``switch_off`` each of them multiplies by its copy, compiled or not. Its weight
    is unchanged.
    """

    def __init__(self, model: nn.Module) -> None:
        """Pack the weights of all linear layers that can be packed.

        Args:
            model: The model, on its device.
        """
        self._forwards = [(vars(each), _PackedForward(each)) for each in model.modules() if _can_be_packed(each)]

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


class _PackedForward:
    """What a layer calls instead of its ``forward``: a multiplication by the packed copy."""

    def __init__(self, layer: nn.Linear) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach())
        self._bias = None if layer.bias is None else layer.bias.detach()
        self._number, self._num_out = next(_NUMBERS), layer.out_features
        _FORWARDS[self._number] = self

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            result: torch.Tensor = torch.ops.kvframe_transformers.multiply(
                rows, self._bias, self._number, self._num_out
            )
            return result
        return self.multiply(rows, self._bias)

    def multiply(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, bias, "none", [], "")
        return result


# The compiler can hold no packed tensor. It calls an operator instead, with the number of the copy.
_NUMBERS = itertools.count()
_FORWARDS: WeakValueDictionary[int, _PackedForward] = WeakValueDictionary()
_LIBRARY = torch.library.Library("kvframe_transformers", "DEF")
_LIBRARY.define("multiply(Tensor rows, Tensor? bias, int number, SymInt num_out) -> Tensor")


def _multiply(rows: torch.Tensor, bias: torch.Tensor | None, number: int, num_out: int) -> torch.Tensor:
    return _FORWARDS[number].multiply(rows, bias)


def _shape(rows: torch.Tensor, bias: torch.Tensor | None, number: int, num_out: int) -> torch.Tensor:
    return rows.new_empty((*rows.shape[:-1], num_out))


_LIBRARY.impl("multiply", _multiply, "CPU")
torch.library.register_fake("kvframe_transformers::multiply", _shape, lib=_LIBRARY)
