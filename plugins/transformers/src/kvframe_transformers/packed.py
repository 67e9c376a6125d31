"""Multiplies by copies of a model's weights in the order that the processor reads fastest (oneDNN's packed weights)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TypeGuard
from weakref import WeakValueDictionary

import torch
from torch import nn


class PackedLinears:
    """The linear layers of a model on a CPU, each beside a packed copy of its weight.

    Layers that get the same input share one copy and one multiplication, by the first of them that is called.

    Invariant: between ``switch_on`` and ``switch_off`` each of them multiplies by its copy, compiled or not. Its weight
    is unchanged.
    """

    def __init__(self, model: nn.Module, groups: Iterable[Sequence[nn.Linear]] = ()) -> None:
        """Pack the weights of all linear layers that can be packed.

        Args:
            model: The model, on its device.
            groups: Packable layers that always get the same input, which is not written to between their calls. A layer
                is in one group at most.
        """
        together = [tuple(group) for group in groups]
        joined_layers = {layer for group in together for layer in group}
        together += [(layer,) for layer in packable(model) if layer not in joined_layers]
        self._products = [_Product(group) for group in together]
        self._forwards = [
            (vars(layer), _PackedForward(product, index))
            for group, product in zip(together, self._products, strict=True)
            for index, layer in enumerate(group)
        ]

    def __len__(self) -> int:
        """The number of packed layers."""
        return len(self._forwards)

    @property
    def num_products(self) -> int:
        """The number of multiplications of a step that calls every layer once."""
        return len(self._products)

    def switch_on(self) -> None:
        """Make each layer multiply by its copy."""
        for attributes, forward in self._forwards:
            attributes["forward"] = forward  # a module calls the ``forward`` of its instance, if there is one

    def switch_off(self) -> None:
        """Make each layer multiply by its own weight."""
        for attributes, _ in self._forwards:
            attributes.pop("forward", None)
        for product in self._products:
            product.forget()


def packable(model: nn.Module) -> list[nn.Linear]:
    """Return the plain linear layers of a model whose weights lie on a CPU, whole."""
    return [module for module in model.modules() if _can_be_packed(module)]


def _can_be_packed(module: nn.Module) -> TypeGuard[nn.Linear]:
    if type(module) is not nn.Linear or "forward" in vars(module) or not torch.backends.mkldnn.is_available():
        return False
    weight = module.weight.detach()
    return type(weight) is torch.Tensor and weight.device.type == "cpu" and _multiplies(weight.dtype)


def _multiplies(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies packed weights of a dtype on this processor; bfloat16 needs AVX-512."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class _Product:
    """The multiplication of one input by the packed copies of some layers' weights.

    Invariant: the results that are kept are those of the input that is kept, of layers that did not ask for theirs yet.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        weight, self.bias = layers[0].weight.detach(), _joined_bias(layers)
        if len(layers) > 1:
            weight = torch.cat([layer.weight.detach() for layer in layers])
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.sizes, self.num_out = [layer.out_features for layer in layers], len(weight)
        self.number = next(_NUMBERS)
        _PRODUCTS[self.number] = self
        self._rows: torch.Tensor | None = None
        self._results: dict[int, torch.Tensor] = {}

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the results of all layers, side by side."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return result

    def part(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        """Return the result of one layer, and keep those of the others until they ask for them."""
        if rows is not self._rows or index not in self._results:
            self._rows, self._results = rows, dict(enumerate(self.multiply(rows).split(self.sizes, -1)))
        result = self._results.pop(index)
        if not self._results:
            self._rows = None
        return result

    def forget(self) -> None:
        """Release the input and the results."""
        self._rows, self._results = None, {}


def _joined_bias(layers: Sequence[nn.Linear]) -> torch.Tensor | None:
    biases = [None if layer.bias is None else layer.bias.detach() for layer in layers]
    if len(biases) == 1 or not any(bias is not None for bias in biases):
        return biases[0]
    return torch.cat(
        [
            layer.weight.new_zeros(layer.out_features) if bias is None else bias
            for layer, bias in zip(layers, biases, strict=True)
        ]
    ).detach()


class _PackedForward:
    """What a layer calls instead of its ``forward``: a multiplication by the packed copy."""

    def __init__(self, product: _Product, index: int) -> None:
        self._product, self._index, self._is_alone = product, index, len(product.sizes) == 1
        self._bias, self._number, self._num_out = product.bias, product.number, product.num_out
        self._start, self._size = sum(product.sizes[:index]), product.sizes[index]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            result: torch.Tensor = torch.ops.kvframe_transformers.multiply(
                rows, self._bias, self._number, self._num_out
            )
            return result if self._is_alone else result.narrow(-1, self._start, self._size)
        return self._product.multiply(rows) if self._is_alone else self._product.part(self._index, rows)


def share_products(graph: torch.fx.GraphModule) -> None:
    """Let the layers of a compiled model that get the same input use one multiplication.

    Args:
        graph: The traced model, in which each layer has a call of its own; it is changed.
    """
    first: dict[tuple[object, ...], torch.fx.Node] = {}
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.kvframe_transformers.multiply):
        first_node = first.setdefault(tuple(node.args), node)
        if first_node is not node:
            node.replace_all_uses_with(first_node)
            graph.graph.erase_node(node)
    graph.recompile()


# The compiler can hold no packed tensor. It calls an operator instead, with the number of the copy.
_NUMBERS = itertools.count()
_PRODUCTS: WeakValueDictionary[int, _Product] = WeakValueDictionary()
_LIBRARY = torch.library.Library("kvframe_transformers", "DEF")
_LIBRARY.define("multiply(Tensor rows, Tensor? bias, int number, SymInt num_out) -> Tensor")


def _multiply(rows: torch.Tensor, bias: torch.Tensor | None, number: int, num_out: int) -> torch.Tensor:
    return _PRODUCTS[number].multiply(rows)


def _shape(rows: torch.Tensor, bias: torch.Tensor | None, number: int, num_out: int) -> torch.Tensor:
    return rows.new_empty((*rows.shape[:-1], num_out))


_LIBRARY.impl("multiply", _multiply, "CPU")
torch.library.register_fake("kvframe_transformers::multiply", _shape, lib=_LIBRARY)
