"""Hooks on a decoder's modules: they replace values that the modules would compute for a batch of one request."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from kvframe.contract import ModelError
from kvframe_transformers.discovery import takes_position_ids
from kvframe_transformers.encoders import computes_waves, counts_positions, has_table_of_waves
from kvframe_transformers.operators import OpaqueFunction
from kvframe_transformers.routing import running_step

_POSITIONS, _BIAS = "position_ids", "position_bias"


class DecoderHooks:
    """Passes the true positions to position embeddings, and keeps attention modules from computing biases.

    Invariant: if no step runs, the hooks change nothing.
    """

    def __init__(self, model: nn.Module, attention: Iterable[nn.Module]) -> None:
        """Hook a model.

        Args:
            model: The model, whose position embeddings get the positions.
            attention: Its attention modules that an engine runs. The engine adds the bias; a module would compute one
                for all pairs of packed tokens.
        """
        # A compiler must not trace how they find the running step.
        positions = OpaqueFunction(lambda tensors: [_positions_of(model, tensors[0]).clone()], lambda tensors: tensors)

        def pass_positions(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            return _pass_positions(positions, module, args, kwargs)

        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(pass_positions, with_kwargs=True)
            for module in model.modules()
            if takes_position_ids(module)
        ]

        def look_up(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            return _look_up(positions, module, args, output)

        self._handles += [
            module.register_forward_hook(look_up)
            for module in model.modules()
            if has_table_of_waves(module) or counts_positions(module) or computes_waves(module)
        ]
        self._handles += [
            module.register_forward_pre_hook(_give_no_bias, with_kwargs=True)
            for module in attention
            if _may_compute_bias(module)
        ]

    def remove(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _pass_positions(
    positions: OpaqueFunction, module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    if torch.compiler.is_compiling():
        return args, {**kwargs, _POSITIONS: positions([kwargs[_POSITIONS]])[0]}
    if running_step() is None:
        return None
    own_positions = kwargs.get(_POSITIONS)
    if (
        own_positions is None and args
    ):  # such modules get the tokens, or their shape, and add the dimension of the batch
        shape = args[0].shape if isinstance(args[0], torch.Tensor) else args[0]
        own_positions = torch.empty(shape[:2]).flatten()
    return args, {**kwargs, _POSITIONS: _positions_of(module, own_positions)}


def _positions_of(module: nn.Module, own_positions: Any) -> torch.Tensor:
    """Return the positions of the running step's tokens, in the shape of those that a module was given."""
    step = running_step()
    assert step is not None
    if not isinstance(own_positions, torch.Tensor) or own_positions.numel() != len(step.positions):
        raise ModelError(
            f"{type(module).__name__} does not get one position for each token, so it cannot get those of a packed "
            "batch; only a model adapter of its own can serve it"
        )
    return step.positions.view_as(own_positions)


def _look_up(positions: OpaqueFunction, module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    """Return the rows of a module's table for the true positions; a table of sines begins with rows for padding."""
    own_positions = output[..., 0].long()
    if torch.compiler.is_compiling():
        rows = positions([own_positions])[0]
    elif running_step() is None:
        return output
    else:
        rows = _positions_of(module, own_positions)
    if computes_waves(module):
        waves: torch.Tensor = module.forward(args[0], position_ids=rows.view(-1, 1))
        return waves
    if isinstance(module, nn.Embedding):
        return module.weight[rows + getattr(module, "offset", 0)]
    table: torch.Tensor = module.weights
    return table[rows + module.padding_idx + 1].to(output)


def _may_compute_bias(module: nn.Module) -> bool:
    """Return whether a module computes a bias by distance if it gets none, as those of T5 do."""
    if not hasattr(module, "has_relative_attention_bias"):
        return False
    parameter = inspect.signature(module.forward).parameters.get(_BIAS)
    return parameter is not None and parameter.default is not parameter.empty


def _give_no_bias(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    if torch.compiler.is_compiling():
        hidden_states = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        return args, {**kwargs, _BIAS: hidden_states.new_empty(0)}
    step = running_step()
    return None if step is None else (args, {**kwargs, _BIAS: step.positions.new_empty(0)})
