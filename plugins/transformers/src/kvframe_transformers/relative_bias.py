"""Learned biases of the scores by distance (T5): finds the table that each layer reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from kvframe.contract import LayerDescription

PARAMETER = "relative_bias"
"""The query side's field, and the name of a layer's table in its backend's parameters."""


def table_of(module: nn.Module) -> torch.Tensor | None:
    """Return a module's own table, ``[num_buckets, num_heads]``; None if it has none."""
    table = getattr(module, "relative_attention_bias", None)
    return table.weight if isinstance(table, nn.Embedding) else None


def only_table(model: nn.Module) -> torch.Tensor | None:
    """Return the table of a model that has one, outside of the attention modules that get its bias (MPNet)."""
    tables = [table for module in model.modules() if (table := table_of(module)) is not None]
    return tables[0] if len(tables) == 1 else None


def bias_of(model: nn.Module, num_heads: int) -> Mapping[str, Any]:
    """Return the bias of attention that modules compute themselves; raise ``LookupError`` if its table is unknown.

    Its buckets are those of T5. The self-check compares them at every distance.
    """
    table = only_table(model)
    if table is None or table.shape[1] != num_heads:
        raise LookupError("adds a bias to its scores that is not made from a table of distances")
    return {"num_buckets": table.shape[0], "max_distance": _MAX_DISTANCE, "bidirectional": True}


_MAX_DISTANCE = 128
"""Where the last bucket begins, if a model does not say: the default of T5 and of those that copied it."""


class BiasReader:
    """Finds the bias of recorded attention calls.

    One layer makes a bias and passes it to the others; the tensor object identifies the layer that made it.
    """

    def __init__(self) -> None:
        """Start with no tensor seen."""
        self._makers: dict[int, tuple[Any, Any]] = {}

    def read(self, module: nn.Module, bias: Any) -> Mapping[str, Any] | None:
        """Return the bias as a query side's ``relative_bias``; None if nothing is added.

        Args:
            module: The attention module that was called.
            bias: The tensor that came with the call, or None.

        Raises:
            LookupError: The bias is of an unknown kind; the message is the end of a sentence.
        """
        if bias is None:
            return None
        # The tensor is kept alive, so that no later one gets its id.
        maker, _ = self._makers.setdefault(id(bias), (module, bias))
        if table_of(maker) is not None:
            return {
                "num_buckets": int(maker.relative_attention_num_buckets),
                "max_distance": int(maker.relative_attention_max_distance),
                "bidirectional": not getattr(maker, "is_decoder", True),
            }
        if getattr(maker, "has_relative_attention_bias", True):
            raise LookupError("adds a bias to its scores that is not made from a table of distances")
        return None  # zeros


def tables_of(
    layers: Iterable[LayerDescription], modules: Mapping[str, nn.Module], model: nn.Module
) -> Iterator[tuple[LayerDescription, torch.Tensor]]:
    """Yield the layers with a bias and the table of each: its own, or that of the nearest earlier layer with one.

    Args:
        layers: The model's layers, in the order they run.
        modules: Their modules, by name.
        model: The model; if no layer has a table, it has one.
    """
    table = only_table(model)
    for layer in layers:
        if PARAMETER in layer.query:
            own_table = table_of(modules[layer.name])
            table = table if own_table is None else own_table
            assert table is not None
            yield layer, table
