"""Mixers that keep their states outside of transformers' cache: in attributes, or in an argument and the result.

Their forwards are given the form of other mixers': they take the states as a ``StateView``, and leave them there.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvframe_transformers.states import HELD, PASSED, Forward, StateView, own_forward

_OF_ALL_LAYERS = "RwkvBlock"
"""The class of modules that take one tensor with the states of all layers, and not those of their own."""


def held_states(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the states that a module's forward keeps in attributes of itself and of its parts; none if it keeps none.

    Such an attribute has a name with ``state``, is None at first, and is set by the forward.
    """
    own_names = list(_set_by_forward(module))
    return own_names and [
        *own_names,
        *(attribute for part in module.modules() if part is not module for attribute in _set_by_forward(part)),
    ]


def passes_states(module: nn.Module) -> bool:
    """Return whether a module of transformers takes its states as an argument, and returns those after it."""
    if not type(module).__module__.startswith("transformers.models.") or isinstance(module, PreTrainedModel):
        return False
    parameter = inspect.signature(type(module).forward).parameters.get(PASSED)
    return parameter is not None and parameter.default is None


def keeping_own_states(model: nn.Module) -> dict[nn.Module, Forward]:
    """Return the outermost modules of a model that keep states in one of these ways, and their changed forwards."""
    forwards: dict[nn.Module, Forward] = {}
    inner: set[nn.Module] = set()
    for module in model.modules():
        if module in inner or isinstance(module, nn.ModuleList):
            continue
        if forward := forward_with_states(module):
            forwards[module] = forward
            inner.update(module.modules())
    return forwards


def forward_with_states(module: nn.Module) -> Forward | None:
    """Return the forward of a module with its states in a ``StateView``; None if it keeps no states of its own."""
    if attributes := held_states(module):
        return _with_held_states(own_forward(module), attributes)
    if not passes_states(module):
        return None
    own_function = own_forward(module)
    return (
        _with_columns(module, own_function)
        if type(module).__name__ == _OF_ALL_LAYERS
        else _with_passed_states(own_function)
    )


def _with_held_states(forward: Forward, attributes: list[tuple[nn.Module, str]]) -> Forward:
    uses_cache = "use_cache" in inspect.signature(forward).parameters

    def run(**inputs: Any) -> Any:
        view: StateView = inputs.pop(HELD)
        places = list(_places(attributes))
        owners = [getattr(module, name) for module, name in attributes]
        try:
            for module, name, states, number in places:
                setattr(module, name, getattr(view, states).get(number))
            output = forward(**{**inputs, "use_cache": True} if uses_cache else inputs)
            for module, name, states, number in places:
                getattr(view, states)[number] = getattr(module, name)
        finally:
            for (module, name), owner in zip(attributes, owners, strict=True):
                setattr(module, name, owner)
        return output

    return run


def _with_passed_states(forward: Forward) -> Forward:
    def run(**inputs: Any) -> Any:
        view: StateView = inputs.pop(PASSED)
        before = tuple(view.recurrent[number] for number in sorted(view.recurrent)) or None
        output, states, *other_outputs = forward(**inputs, **{PASSED: before})
        if isinstance(states, tuple | list) and all(isinstance(state, torch.Tensor) for state in states):
            view.recurrent = dict(enumerate(states))
        return (output, None, *other_outputs)

    return run


def _with_columns(module: Any, forward: Forward) -> Forward:
    """Return the forward of a block of RWKV, which takes the states of all layers, and changes its own column of them.

    Its code computes single tokens for one sequence only, so each sequence of a batch is computed by itself.
    """

    def run(hidden: torch.Tensor, **inputs: Any) -> Any:
        view: StateView = inputs.pop(PASSED)
        if not view.recurrent:
            view.recurrent = dict(enumerate(_first_columns(hidden)))
        outputs = []
        for index, row in enumerate(hidden.split(1)):
            columns = [state[index : index + 1, :, None] for _, state in sorted(view.recurrent.items())]
            # Every column is the same memory, so the block changes the view's states.
            states = [column.expand(-1, -1, module.layer_id + 1) for column in columns]
            outputs.append(forward(row, **{**inputs, PASSED: states})[0])
        return torch.cat(outputs), None, None

    return run


def _first_columns(hidden_states: torch.Tensor) -> list[torch.Tensor]:
    """Return a block's states before the first token: two of earlier inputs, and the parts of a weighted mean."""
    inputs = hidden_states.new_zeros(2, hidden_states.shape[0], hidden_states.shape[2])
    sums = hidden_states.new_zeros(2, hidden_states.shape[0], hidden_states.shape[2], dtype=torch.float32)
    return [*inputs.unbind(), *sums.unbind(), torch.full_like(sums[0], -1e30)]


def _places(attributes: list[tuple[nn.Module, str]]) -> Iterator[tuple[nn.Module, str, str, int]]:
    """Yield each held state with the view's attribute for its kind, and its number there."""
    counts = {"conv": 0, "recurrent": 0}
    for module, name in attributes:
        kind = "conv" if "conv" in name else "recurrent"
        yield module, name, kind, counts[kind]
        counts[kind] += 1


def _set_by_forward(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    if not type(module).__module__.startswith("transformers.models."):
        return
    names = [name for name, value in vars(module).items() if "state" in name and value is None]
    if names:
        code = inspect.unwrap(type(module).forward).__code__
        stored_names = {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}
        yield from ((module, name) for name in names if name in stored_names)
