"""Computes single tokens of state mixers in the pages themselves, by the kernels of kvframe-kernels.

A mixer's forward takes states from its cache and passes them, without reading them, to functions that compute a token's
step. In a copy of the forward, these functions are replaced: the cache returns the places of states, and each state is
read from its page and written to its page once. A gather, a step and a scatter would move it three times.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import attrs
import torch
from torch import nn

from kvframe.contract import KVCache, StateRound
from kvframe_transformers.scans import parameters_of, with_globals
from kvframe_transformers.states import Inputs, Numbers, Output, StateView

_CONV = frozenset({"hidden_states", "conv_state", "weight", "bias", "activation"})
_SELECTIVE = frozenset({"state", "dt", "A", "B", "C", "D", "z", "dt_bias", "dt_softplus"})
_DELTA = frozenset({"query", "key", "value", "g", "beta", "initial_state", "use_qk_l2norm_in_kernel"})
_CHUNKED = "chunk_size"


def kernels_run_on(device: torch.device) -> bool:
    """Return whether there are kernels for a device."""
    return device.type == "cuda" and all(importlib.util.find_spec(name) for name in ("triton", "kvframe_kernels"))


@attrs.frozen(eq=False)
class PagedState:
    """The place of a state, which a forward passes from its cache to the function that steps the state.

    Attributes:
        pages: ``[num_block_ids, states_per_block, *shape], device``.
        source: Page and place of each row's state before the token.
        target: Page and place of each row's state after it.
    """

    pages: torch.Tensor
    source: tuple[torch.Tensor, torch.Tensor]
    target: tuple[torch.Tensor, torch.Tensor]

    def to(self, *_: Any) -> PagedState:
        """Return itself: the state keeps the dtype of its pages."""
        return self


class PagedStep:
    """A mixer's forward on one token of each of several requests, with kernels for its steps."""

    def __init__(self, module: nn.Module, function: FunctionType, steps: Mapping[str, Callable[..., Any]]) -> None:
        """Copy a forward.

        Args:
            module: The mixer.
            function: Its forward, as it is written.
            steps: The replacements of the functions that it calls for a step, by global name.
        """
        self._forward = with_globals(module, function, steps)

    @classmethod
    def of(cls, module: nn.Module) -> PagedStep | None:
        """Return the copy of a mixer's forward; None if it calls no such functions."""
        function = inspect.unwrap(type(module).forward)
        if not isinstance(function, FunctionType) or any(hasattr(part, "_hf_hook") for part in module.modules()):
            return None
        steps = {}
        for name in function.__code__.co_names:
            step = _step_for(parameters_of(function.__globals__.get(name)))
            if step is not None:
                steps[name] = step
        return cls(module, function, steps) if steps else None

    def __call__(
        self, part: StateRound, pages: KVCache, numbers: Numbers, arguments: Callable[[StateView], Inputs]
    ) -> Output:
        """Compute the tokens; their states go from page to page.

        Args:
            part: The places of the states that are read and written.
            pages: The layer's state tensors.
            numbers: The mixer's own numbers of them.
            arguments: The other arguments of the forward.
        """
        source, target = (part.source_pages, part.source_places), (part.target_pages, part.target_places)
        states: dict[str, Any] = {name: PagedState(tensor, source, target) for name, tensor in pages.items()}
        output: Output = self._forward(**arguments(_PagedView.of(states, numbers)))
        return output


class _PagedView(StateView):
    """The cache of a forward whose steps write the states to their pages themselves."""

    def update_conv_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise TypeError("the inputs of a convolution are read outside of its step")

    def update_recurrent_state(self, recurrent_states: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(recurrent_states, PagedState):
            raise TypeError("a recurrent state was computed outside of its step")


def _step_for(parameters: frozenset[str]) -> Callable[..., Any] | None:
    """Return the replacement for a function with these parameters; None if it is not a step."""
    if parameters >= _CONV:
        return _conv_step
    if parameters >= _SELECTIVE:
        return _selective_step
    return _delta_step if parameters >= _DELTA and _CHUNKED not in parameters else None


def _conv_step(
    hidden_states: torch.Tensor,
    conv_state: PagedState,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """Step the inputs of a convolution, ``[batch, num_channels, 1]``."""
    from kvframe_kernels.triton.conv import conv_update

    if activation not in (None, "silu", "swish"):
        raise ValueError(f"the kernel has no {activation}")
    at = conv_state.pages, conv_state.source, conv_state.target
    return conv_update(*at, hidden_states[..., 0], weight, bias, silu=activation is not None)[..., None]


def _selective_step(
    state: PagedState,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Step the state of Mamba-2, ``x: [batch, num_heads, head_size]``, or of Mamba, which has no axis of heads."""
    from kvframe_kernels.triton.states import selective_state_update

    pages, row_inputs, layer_inputs = state.pages, [x, dt, z], [A, D, dt_bias]
    if x.dim() == 2:
        pages, B, C = pages.unsqueeze(2), B.unsqueeze(1), C.unsqueeze(1)
        row_inputs = [None if row_input is None else row_input.unsqueeze(1) for row_input in row_inputs]
        layer_inputs = [None if row_input is None else row_input.unsqueeze(0) for row_input in layer_inputs]
    (x_, dt_, z_), (A_, D_, bias) = row_inputs, layer_inputs
    assert x_ is not None
    assert dt_ is not None
    assert A_ is not None
    place = pages, state.source, state.target
    return selective_state_update(*place, x_, dt_, A_, B, C, D_, z_, bias, softplus=dt_softplus).view(x.shape)


def _delta_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: PagedState,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, PagedState]:
    """Step the state of a gated delta rule, ``query: [batch, 1, num_heads, size]``; it is written to its page."""
    from kvframe_kernels.triton.delta import gated_delta_update

    place = initial_state.pages, initial_state.source, initial_state.target
    out = gated_delta_update(
        *place,
        query[:, 0],
        key[:, 0],
        value[:, 0],
        g[:, 0],
        beta[:, 0],
        query.shape[-1] ** -0.5,
        normalise=use_qk_l2norm_in_kernel,
    )
    return out[:, None], initial_state
