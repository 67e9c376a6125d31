"""Finds the linear layers that a model calls with the same input, as the projections of an attention module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class SharedInputs:
    """Records the inputs of linear layers while a model runs."""

    def __init__(self) -> None:
        """Start without a run."""
        self._inputs: dict[int, tuple[torch.Tensor, torch.Tensor, list[nn.Linear]]] = {}
        self._num_calls: dict[nn.Linear, int] = {}

    @contextmanager
    def recorded(self, layers: Iterable[nn.Linear]) -> Iterator[None]:
        """Record the calls of these layers inside the block.

        Args:
            layers: Linear layers of one model.
        """
        hooks = [layer.register_forward_pre_hook(self._record) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def groups(self) -> list[tuple[nn.Linear, ...]]:
        """Return the layers that got the same tensor, in the order of their calls; each layer was called once.

        Layers of one group have the same number of input features and the same dtype.
        """
        groups = []
        for _, _, layers in self._inputs.values():
            once = [layer for layer in layers if self._num_calls[layer] == 1]
            same_dtype_layers = [layer for layer in once if layer.weight.dtype == once[0].weight.dtype]
            if len(same_dtype_layers) > 1:
                groups.append(tuple(same_dtype_layers))
        return groups

    def _record(self, module: nn.Module, arguments: Sequence[Any]) -> None:
        assert isinstance(module, nn.Linear)
        self._num_calls[module] = self._num_calls.get(module, 0) + 1
        if len(arguments) != 1:
            return
        rows = arguments[0]
        # The tensor is kept, so that its number stays its own. The copy shows whether it is written to in between.
        input_record = self._inputs.setdefault(id(rows), (rows, rows.clone(), []))
        if torch.equal(rows, input_record[1]):
            input_record[2].append(module)
