"""State mixers: the modules that keep a recurrent or convolution state, and the cache object that they get."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import CodeType
from typing import Any

import attrs
import torch
from torch import nn
from torch.nn.functional import pad

from kvframe_transformers.operators import OpaqueFunction

_STATE_CALLS = frozenset({"update_conv_state", "update_recurrent_state", "set_linear_cache"})
_PADDING_CALL = "create_recurrent_attention_mask"
CACHE_NAMES = ("cache", "cache_params", "past_key_values")
"""The parameters by which modules take transformers' cache: the first since 5.24, the others before it."""
HELD, PASSED = "kvframe_states", "state"
"""The parameters by which mixers that keep their states elsewhere take a view: ours, and that of their own states."""
_HARMLESS = frozenset({"attention_mask", "conv_mask", "position_ids", "cache_position"})
"""Arguments of a mixer that have no effect, because there is no padding."""

Forward = Callable[..., Any]
Inputs = dict[str, Any]
"""The arguments of a mixer by name; tensors, in tuples too, have a row per token: ``[batch, num_tokens, …]``."""
Output = torch.Tensor | tuple[torch.Tensor, ...]
"""A mixer's result, with a row per token too."""
Numbers = tuple[tuple[int, ...], tuple[int, ...]]
"""The numbers by which a mixer calls its convolution states, and those of its recurrent states."""


@attrs.frozen
class OneLayer:
    """A layer of transformers' cache, as mixers of 5.20 read it."""

    conv_states: Mapping[int, torch.Tensor]
    recurrent_states: Mapping[int, torch.Tensor]
    record_past: bool = False


class StateView:
    """The states of one mixer, with the interface of transformers' cache. The mixer may change them in place.

    Attributes:
        conv: ``[batch, …, kernel_size]`` by the mixer's own number; empty if there are no earlier tokens.
        recurrent: ``[batch, …]``, likewise.
    """

    def __init__(
        self, conv: Mapping[int, torch.Tensor] | None = None, recurrent: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        """Keep the states after the earlier tokens; no argument means no earlier tokens."""
        self.conv = dict(conv or {})
        self.recurrent = dict(recurrent or {})

    @property
    def numbers(self) -> Numbers:
        """The numbers by which the mixer calls its states."""
        return tuple(sorted(self.conv)), tuple(sorted(self.recurrent))

    @classmethod
    def of(cls, states: Mapping[str, torch.Tensor] | None, numbers: Numbers) -> StateView:
        """Return the view of states that ``named`` returned; None stands for no earlier tokens."""
        if states is None:
            return cls()
        conv, recurrent = numbers
        return cls(
            {number: states[f"conv_{index}"] for index, number in enumerate(conv)},
            {number: states[f"recurrent_{index}"] for index, number in enumerate(recurrent)},
        )

    def named(self) -> dict[str, torch.Tensor]:
        """Return all states, by their names in a cache spec."""
        conv, recurrent = self.numbers
        return {
            **{f"conv_{index}": self.conv[number] for index, number in enumerate(conv)},
            **{f"recurrent_{index}": self.recurrent[number] for index, number in enumerate(recurrent)},
        }

    # --- the methods of transformers' Cache that mixers call ----------------------------------------------------------

    @property
    def layers(self) -> Mapping[int, OneLayer]:
        """The states as mixers of transformers 5.20 read them: ``cache.layers[layer_idx].conv_states[state_idx]``."""
        return defaultdict(lambda: OneLayer(self.conv, self.recurrent))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether there are earlier tokens."""
        return bool(self.conv or self.recurrent)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: only the state after the last token is kept."""
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return a convolution state; None if there are no earlier tokens."""
        return self.conv.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return a recurrent state; None if there are no earlier tokens."""
        return self.recurrent.get(state_idx)

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Append inputs, keep the last ``conv_kernel_size`` of them, and return the earlier and the new ones."""
        before = self.conv.get(state_idx)
        if before is not None:
            size = before.shape[-1]
            inputs = torch.cat((before, conv_states), dim=-1)
        else:
            size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            inputs = pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        self.conv[state_idx] = inputs[..., inputs.shape[-1] - size :]
        return inputs

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """Return the recurrent state, as mixers of MiniMax-01 ask for it."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """Set the recurrent state, likewise."""
        self.update_recurrent_state(linear_cache, layer_idx)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Set the state after the last token."""
        self.recurrent[state_idx] = recurrent_states
        return recurrent_states


@attrs.frozen
class MixerCall:
    """The signature of a mixer's call.

    Attributes:
        signature: The signature of its forward.
        tokens: The parameter that takes the tokens, ``[batch, num_tokens, hidden_size]``.
        cache: The parameter that takes the cache.
        harmless: The arguments that have no effect.
    """

    signature: inspect.Signature
    tokens: str
    cache: str
    harmless: frozenset[str] = _HARMLESS

    @classmethod
    def of(cls, module: nn.Module) -> MixerCall | None:
        """Return the signature of ``module``; None if it takes no cache."""
        signature = inspect.signature(type(module).forward)
        signature = signature.replace(parameters=list(signature.parameters.values())[1:])
        cache = next((name for name in CACHE_NAMES if name in signature.parameters), None)
        return None if cache is None else cls(signature, next(iter(signature.parameters)), cache)

    @classmethod
    def with_own_states(cls, module: nn.Module) -> MixerCall:
        """Return the signature of a module that keeps its states outside of transformers' cache."""
        signature = inspect.signature(type(module).forward)
        signature = signature.replace(parameters=list(signature.parameters.values())[1:])
        cache = PASSED if PASSED in signature.parameters else HELD
        # Such a module may begin its states anew at the first position.
        return cls(signature, next(iter(signature.parameters)), cache, _HARMLESS - {"position_ids"})

    def inputs_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inputs:
        """Return the arguments of a call by name, without the cache and tensors that have no effect."""
        arguments = self.signature.bind_partial(*args, **kwargs).arguments
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                arguments.update(arguments.pop(name, {}))
        inputs = {name: value for name, value in arguments.items() if name != self.cache and name not in self.harmless}
        for name in self.harmless & self.signature.parameters.keys():
            if self.signature.parameters[name].default is inspect.Parameter.empty:
                inputs[name] = None
        return inputs


def with_rows(output: Any, tokens: torch.Tensor, view: StateView) -> Any:
    """Return a mixer's result; what has no row per token in a tuple, such as a state or None, becomes empty rows.

    A state is also in the cache. The self-check finds a model that reads it from the result.

    Args:
        output: The result.
        tokens: The tokens of the call.
        view: The states after the call.
    """
    if not isinstance(output, tuple):
        return output
    # As many heads as tokens would make a state look like rows.
    states = {id(state) for state in (*view.conv.values(), *view.recurrent.values())}
    return tuple(
        tokens.new_empty(*tokens.shape[:2], 0)
        if item is None
        or (isinstance(item, torch.Tensor) and (item.shape[:2] != tokens.shape[:2] or id(item) in states))
        else item
        for item in output
    )


@attrs.frozen
class CallForm:
    """The form of a mixer's calls and results, without the values and the number of tokens.

    Attributes:
        args: The positional arguments of a call; those that are tensors are not read.
        kwargs: The keyword arguments; likewise.
        tokens: The place of the tokens among the tensors of the arguments.
        is_tuple: Whether the result is a tuple.
        sizes: For each tensor of the result, the sizes after ``[batch, num_tokens]``, and its dtype.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tokens: int
    is_tuple: bool
    sizes: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], tokens: torch.Tensor, output: Output) -> CallForm:
        """Return the form of a call whose tokens and result are given."""
        (index,) = (index for index, tensor in enumerate(tensors_of(args, kwargs)) if tensor is tokens)
        tensors = output if isinstance(output, tuple) else (output,)
        sizes = tuple((tuple(tensor.shape[2:]), tensor.dtype) for tensor in tensors)
        return cls(_without_tensors(args), _without_tensors(dict(kwargs)), index, isinstance(output, tuple), sizes)

    def filled(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with these tensors."""
        remaining = iter(tensors)
        return _with_tensors(self.args, remaining), _with_tensors(self.kwargs, remaining)

    def result(self, tensors: Sequence[torch.Tensor]) -> Output:
        """Return the result that has these tensors."""
        return tuple(tensors) if self.is_tuple else tensors[0]

    def empty(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors of the result of a call with these tensors, without values."""
        tokens = tensors[self.tokens]
        return [tokens.new_empty(*tokens.shape[:2], *sizes, dtype=dtype) for sizes, dtype in self.sizes]


class _Tensor:
    """Stands for a tensor in the form of a call."""


def tensors_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors in a call's arguments, those in tuples included. A compiler can trace it."""
    tensors: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, tuple):
            tensors.extend(tensors_of(value, {}))
    return tensors


def _without_tensors(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_without_tensors, value))
    if isinstance(value, dict):
        return {name: _without_tensors(item) for name, item in value.items()}
    return _Tensor() if isinstance(value, torch.Tensor) else value


def _with_tensors(value: Any, remaining: Iterator[torch.Tensor]) -> Any:
    if isinstance(value, tuple):
        return tuple(_with_tensors(item, remaining) for item in value)
    if isinstance(value, dict):
        return {name: _with_tensors(item, remaining) for name, item in value.items()}
    return next(remaining) if isinstance(value, _Tensor) else value


class OpaqueForward:
    """A mixer's forward in a compiled model: one operator, which the compiler does not look into.

    Attributes:
        target: What the operator calls.
        forward: What the mixer gets as its forward.
    """

    def __init__(self, form: CallForm, target: Forward) -> None:
        """Take the form of the mixer's calls, and what the operator calls at first."""
        self.target = target
        self._form = form
        function = OpaqueFunction(self._run, form.empty)

        def forward(*args: Any, **kwargs: Any) -> Output:
            return form.result(function(tensors_of(args, kwargs)))

        self.forward: Forward = forward

    def _run(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        args, kwargs = self._form.filled(tensors)
        output: Output = self.target(*args, **kwargs)
        return output if isinstance(output, tuple) else (output,)


def is_mixer(module: nn.Module) -> bool:
    """Return whether a module keeps a state, by the names that its methods use, not by its own name."""
    return bool(names_of(type(module)) & _STATE_CALLS)


def reads_padding(module: nn.Module) -> bool:
    """Return whether a module reads a padding mask's values to make the mask of mixers."""
    return _PADDING_CALL in names_of(type(module))


def _read_names(module_class: type) -> frozenset[str]:
    names: set[str] = set()
    for base in module_class.__mro__:
        if base.__module__.startswith("transformers.models."):
            for member in vars(base).values():
                if inspect.isfunction(member):
                    names.update(_names_in(inspect.unwrap(member).__code__))
    return frozenset(names)


names_of: Callable[[type], frozenset[str]] = cache(_read_names)
"""Returns the names that the methods of a module's class and of its bases use."""


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names that code uses, and those of the functions in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def own_forward(module: nn.Module) -> Forward:
    """Return a module's own forward: that of the instance if it has one, otherwise that of its class."""
    instance_forward = vars(module).get("forward")
    return type(module).forward.__get__(module) if instance_forward is None else instance_forward  # type: ignore[no-any-return]


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """Replace the forwards of modules inside the block, and restore the earlier ones after it."""
    before = [(vars(module), vars(module).get("forward")) for module in forwards]
    try:
        for module, forward in forwards.items():
            vars(module)["forward"] = forward  # a module calls the ``forward`` of its instance, if there is one
        yield
    finally:
        for attributes, own_forward_value in before:
            if own_forward_value is None:
                attributes.pop("forward", None)
            else:
                attributes["forward"] = own_forward_value
