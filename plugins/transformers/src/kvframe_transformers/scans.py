"""Selective scans that continue from a state, for mixers whose own scan cannot."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from kvframe_transformers.states import Output, StateView

_SCAN_PARAMETERS = frozenset({"A", "B", "C", "D", "z", "delta_bias", "delta_softplus", "return_last_state"})
_CHUNK = 256
"""Tokens whose correction is computed at once: each of them takes the memory of a whole state."""


class ContinuedScan:
    """A mixer's forward with another scan.

    The scan of Mamba (arXiv 2312.00752), ``h[t] = exp(dt[t] A) h[t-1] + dt[t] B[t] x[t]``, is linear in its first
    state: started from ``h``, its output is the output without a state plus ``C[t] exp(A (dt[0] + … + dt[t])) h``. So
    a forward that calls its scan without the state can be corrected at that one call. The corrected forward is a copy
    of the function with another scan among its globals; the mixer and its module stay unchanged.
    """

    def __init__(self, module: nn.Module, function: FunctionType, scans: Mapping[str, Callable[..., Any]]) -> None:
        """Copy a forward.

        Args:
            module: The mixer.
            function: Its forward, as it is written.
            scans: The functions that it calls for a scan, by global name.
        """
        scans = {name: self._continuing(scan) for name, scan in scans.items()}
        self._forward = with_globals(module, function, scans)
        self._state: torch.Tensor | None = None

    @classmethod
    def of(cls, module: nn.Module) -> ContinuedScan | None:
        """Return the copy of a mixer's forward that calls such a scan; None if there is no such call."""
        # A wrapper around a forward moves the weights of offloaded modules, of which there are none here.
        function = inspect.unwrap(type(module).forward)
        if not isinstance(function, FunctionType) or any(hasattr(part, "_hf_hook") for part in module.modules()):
            return None
        called_functions = {name: function.__globals__.get(name) for name in function.__code__.co_names}
        scans = {
            name: part for name, part in called_functions.items() if part and parameters_of(part) >= _SCAN_PARAMETERS
        }
        return cls(module, function, scans) if scans else None

    def __call__(self, view: StateView, **arguments: Any) -> Output:
        """Run the forward on several tokens; its scan continues from the one recurrent state of ``view``."""
        (self._state,) = view.recurrent.values()
        try:
            output: Output = self._forward(**arguments)
        finally:
            self._state = None
        return output

    def _continuing(self, scan: Callable[..., Any]) -> Callable[..., Any]:
        def run(
            inputs: torch.Tensor,
            dt: torch.Tensor,
            A: torch.Tensor,
            B: torch.Tensor,
            C: torch.Tensor,
            *,
            z: torch.Tensor | None = None,
            delta_bias: torch.Tensor | None = None,
            delta_softplus: bool = False,
            **options: Any,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """Scan ``[batch, size, num_tokens]`` from the state; the gate comes last, after the correction."""
            assert self._state is not None
            output, last = scan(
                inputs, dt, A, B, C, z=None, delta_bias=delta_bias, delta_softplus=delta_softplus, **options
            )
            steps = dt.float() if delta_bias is None else dt.float() + delta_bias.float()[:, None]
            decay_sums = (functional.softplus(steps) if delta_softplus else steps).cumsum(-1)[..., None] * A.float()[
                :, None
            ]
            state = self._state.float()[:, :, None]
            state_outputs = [
                torch.einsum("bdtn,bnt->bdt", decay.exp() * state, weights.float())
                for decay, weights in zip(decay_sums.split(_CHUNK, 2), C.split(_CHUNK, 2), strict=True)
            ]
            output = output + torch.cat(state_outputs, -1).to(output.dtype)
            if z is not None:
                output = output * functional.silu(z)
            return output, last + (decay_sums[:, :, -1].exp() * state[:, :, 0]).to(last.dtype)

        return run


def with_globals(
    module: nn.Module, function: FunctionType, replacements: Mapping[str, Callable[..., Any]]
) -> MethodType:
    """Return a copy of a module's function with some globals replaced."""
    new_globals = {**function.__globals__, **replacements}
    copy = FunctionType(function.__code__, new_globals, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return MethodType(copy, module)


def parameters_of(function: Any) -> frozenset[str]:
    """Return the names of a function's parameters; none for a value that is not a function."""
    try:
        return frozenset(inspect.signature(inspect.unwrap(function)).parameters) if callable(function) else frozenset()
    except (TypeError, ValueError):  # it has no signature
        return frozenset()
