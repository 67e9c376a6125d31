"""State mixers: which modules keep a recurrent or convolution state, and the cache that they are given for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import nn
from torch.nn.functional import pad

_STATE_CALLS = frozenset({"update_conv_state", "update_recurrent_state", "set_linear_cache"})
_PADDING_CALL = "create_recurrent_attention_mask"
_CACHE_NAMES = ("cache_params", "past_key_values")
_HARMLESS = frozenset({"attention_mask", "conv_mask", "position_ids", "cache_position"})
"""Tensors that a mixer may be given beside its tokens and that change nothing here: there is no padding."""

Forward = Callable[..., Any]
Inputs = dict[str, Any]
"""What a mixer is called with, by name; tensors, in tuples too, have a row per token: ``[batch, num_tokens, …]``."""
Output = torch.Tensor | tuple[torch.Tensor, ...]
"""What it returns, with a row per token too."""
Numbers = tuple[tuple[int, ...], tuple[int, ...]]


class StateView:
    """The states of one mixer, as transformers' cache shows them to it. The mixer may change them in place.

    Attributes:
        conv: ``[batch, …, kernel_size]`` by the mixer's own number; what is missing has no past.
        recurrent: ``[batch, …]`` likewise.
    """

    def __init__(
        self, conv: Mapping[int, torch.Tensor] | None = None, recurrent: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        """Take the states of the past; none where nothing is before the tokens."""
        self.conv = dict(conv or {})
        self.recurrent = dict(recurrent or {})

    @property
    def numbers(self) -> Numbers:
        """The mixer's own numbers of its convolution states, and of its recurrent ones."""
        return tuple(sorted(self.conv)), tuple(sorted(self.recurrent))

    @classmethod
    def of(cls, states: Mapping[str, torch.Tensor] | None, numbers: Numbers) -> StateView:
        """Return the view of states that ``named`` gave; of nothing, if None."""
        if states is None:
            return cls()
        conv, recurrent = numbers
        return cls(
            {number: states[f"conv_{index}"] for index, number in enumerate(conv)},
            {number: states[f"recurrent_{index}"] for index, number in enumerate(recurrent)},
        )

    def named(self) -> dict[str, torch.Tensor]:
        """Return all states, by the names that a cache spec has for them."""
        conv, recurrent = self.numbers
        return {
            **{f"conv_{index}": self.conv[number] for index, number in enumerate(conv)},
            **{f"recurrent_{index}": self.recurrent[number] for index, number in enumerate(recurrent)},
        }

    # --- what a mixer asks of transformers' Cache ---------------------------------------------------------------------

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether anything is before the tokens."""
        return bool(self.conv or self.recurrent)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: only the state after the last token is kept."""
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return a convolution state; None if nothing is before the tokens."""
        return self.conv.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return a recurrent state; None if nothing is before the tokens."""
        return self.recurrent.get(state_idx)

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Append inputs, keep the last ``conv_kernel_size`` of them, and return all with what was before them."""
        before = self.conv.get(state_idx)
        if before is not None:
            size = before.shape[-1]
            inputs = torch.cat((before, conv_states), dim=-1)
        else:
            size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            inputs = pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        self.conv[state_idx] = inputs[..., inputs.shape[-1] - size :]
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Keep the state after the last token."""
        self.recurrent[state_idx] = recurrent_states
        return recurrent_states


@attrs.frozen
class MixerCall:
    """How a mixer is called.

    Attributes:
        signature: The signature of its forward.
        tokens: The parameter that takes the tokens, ``[batch, num_tokens, hidden_size]``.
        cache: The parameter that takes the cache.
    """

    signature: inspect.Signature
    tokens: str
    cache: str

    @classmethod
    def of(cls, module: nn.Module) -> MixerCall | None:
        """Return how ``module`` is called; None if it takes no cache."""
        signature = inspect.signature(type(module).forward)
        signature = signature.replace(parameters=list(signature.parameters.values())[1:])
        cache = next((name for name in _CACHE_NAMES if name in signature.parameters), None)
        return None if cache is None else cls(signature, next(iter(signature.parameters)), cache)

    def inputs_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inputs:
        """Return what a call gives, by name, without the cache and what changes nothing here."""
        bound = self.signature.bind_partial(*args, **kwargs).arguments
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                bound.update(bound.pop(name, {}))
        return {name: value for name, value in bound.items() if name != self.cache and name not in _HARMLESS}


def is_mixer(module: nn.Module) -> bool:
    """Return whether a module keeps a state: by what its methods call, not by its name."""
    return bool(_calls(type(module)) & _STATE_CALLS)


def reads_padding(module: nn.Module) -> bool:
    """Return whether a module looks at a padding mask's values to make the mask of mixers."""
    return _PADDING_CALL in _calls(type(module))


def _calls(module_class: type) -> frozenset[str]:
    """Return the names that a model's module uses in its methods, its bases' among them."""
    names: set[str] = set()
    for base in module_class.__mro__:
        if base.__module__.startswith("transformers.models."):
            for member in vars(base).values():
                if inspect.isfunction(member):
                    names.update(inspect.unwrap(member).__code__.co_names)
    return frozenset(names)


class Mixers:
    """The mixers of a model.

    Invariant: between ``switch_on`` and ``switch_off`` every mixer's forward is the one it was given; otherwise it is
    its own.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Take the mixers among ``modules`` that keep a state, each with its forward."""
        self.modules = tuple(modules)
        self._own = {module: module.__dict__.get("forward") for module in self.modules}
        self._forwards: dict[nn.Module, Forward] = {}

    def own_forward(self, module: nn.Module) -> Forward:
        """Return a mixer's own forward, whatever stands for it now."""
        own = self._own[module]
        return type(module).forward.__get__(module) if own is None else own  # type: ignore[no-any-return]

    def switch_on(self, forwards: Mapping[nn.Module, Forward] | None = None) -> None:
        """Let other functions stand for the forwards: those given, or those that did before."""
        self._forwards = dict(forwards) if forwards is not None else self._forwards
        for module, forward in self._forwards.items():
            module.forward = forward

    def switch_off(self) -> None:
        """Give every mixer its own forward back."""
        for module in self._forwards:
            own = self._own[module]
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = own

    @contextmanager
    def switched(self, forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
        """Let other functions stand for the forwards inside the block, and what did before after it."""
        before = self._forwards
        self.switch_off()
        self.switch_on(forwards)
        try:
            yield
        finally:
            self.switch_off()
            self.switch_on(before)
