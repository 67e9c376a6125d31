"""Modules that mix neighbouring tokens outside of attention, such as convolutions: found by what they return.

In a packed batch they would mix the tokens of different requests. So in a step they run for each request alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import attrs
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from kvframe_transformers.routing import running_step
from kvframe_transformers.states import Forward, names_of, own_forward

LENGTHS = (11, 13)
"""The tokens of two runs. Dimensions that change from one to the other count tokens."""

_FIRST = 6
"""The first tokens of the shorter run, which modules compute alone too."""

Dims = tuple[int, ...]


@attrs.frozen(eq=False)
class _Call:
    """A module's call: its arguments by place or name, and what it returned, a tuple."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: tuple[Any, ...]

    def dims(self, other_call: _Call) -> tuple[tuple[Dims, ...], dict[str, Dims], tuple[Dims, ...]]:
        """Return the dimensions that count tokens, given the same call with another number of tokens."""
        return (
            tuple(map(_dims, self.args, other_call.args)),
            {name: _dims(value, other_call.kwargs.get(name)) for name, value in self.kwargs.items()},
            tuple(map(_dims, self.output, other_call.output)),
        )


def find_apart(
    model: nn.Module, attending: Collection[nn.Module], run: Callable[[int], Any], tolerance: float
) -> dict[nn.Module, Forward]:
    """Return the modules that mix tokens without attending, with their forwards for a packed step.

    Args:
        model: The model, with its weights.
        attending: Its modules that attend; those around them mix tokens by that alone.
        run: Runs it, as transformers made it, over so many different tokens of one request.
        tolerance: The relative difference that rounding explains.
    """
    around = {module for module in model.modules() if any(part in attending for part in module.modules())}
    short, long = (_calls(model, partial(run, length), around) for length in LENGTHS)
    mixing = {module for module in short.keys() & long.keys() if _mixes(module, short[module], long[module], tolerance)}
    # What contains such a module seems to mix too.
    inner = [module for module in mixing if not any(part in mixing for part in module.modules() if part is not module)]
    return {module: _apart(own_forward(module), short[module].dims(long[module])) for module in inner}


def unfolds(module: nn.Module) -> bool:
    """Return whether a module calls torch's function ``unfold``, which is a convolution's reading of neighbours."""
    return "unfold" in names_of(type(module))


def unfolding_apart(forward: Forward) -> Forward:
    """Return a forward that unfolds the tokens of each request of the running step alone (ConvBERT)."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _Unfolding():
            return forward(*args, **kwargs)

    return run


class _Unfolding(TorchFunctionMode):
    """Unfolds ``[1, num_channels, num_tokens, 1]`` for each request alone."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs_by_name = dict(kwargs or {})
        if func is nn.functional.unfold and args[0].shape[3] == 1:
            return _apart(func, (((2,),), {}, ((2,),)))(*args, **kwargs_by_name)
        return func(*args, **kwargs_by_name)


def _calls(model: nn.Module, run: Callable[[], Any], left_out: Collection[nn.Module]) -> dict[nn.Module, _Call]:
    """Return the first call of each module in a run."""
    calls: dict[nn.Module, _Call] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.setdefault(module, _Call(args, kwargs, output if isinstance(output, tuple) else (output,)))

    handles = [
        module.register_forward_hook(note, with_kwargs=True) for module in model.modules() if module not in left_out
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _mixes(module: nn.Module, call: _Call, other_call: _Call, tolerance: float) -> bool:
    """Return whether a module gives the first tokens another output with the later ones than without them."""
    if len(call.args) != len(other_call.args) or len(call.output) != len(other_call.output):
        return False
    arg_dims, kwarg_dims, output_dims = call.dims(other_call)
    input_dims = (*arg_dims, *kwarg_dims.values())
    if not any(output_dims) or not any(input_dims):
        return False
    if any(len(dims) > 1 for dims in (*input_dims, *output_dims)):
        return False  # scores of queries and keys are a part of attention
    args = [_cut(value, dims, 0, _FIRST) for value, dims in zip(call.args, arg_dims, strict=True)]
    kwargs = {name: _cut(value, kwarg_dims[name], 0, _FIRST) for name, value in call.kwargs.items()}
    try:
        output = own_forward(module)(*args, **kwargs)
    except (RuntimeError, ValueError, IndexError, TypeError):  # it takes no other number of tokens
        return False
    output = output if isinstance(output, tuple) else (output,)
    for value, dims, alone in zip(call.output, output_dims, output, strict=True):
        if dims and not _is_close(alone, _cut(value, dims, 0, _FIRST), tolerance):
            return True
    return False


def _is_close(alone: Any, value: torch.Tensor, tolerance: float) -> bool:
    if not isinstance(alone, torch.Tensor) or alone.shape != value.shape:
        return True  # it counts tokens in another way
    difference = (alone.double() - value.double()).norm()
    return bool(difference <= tolerance * value.double().norm().clamp_min(1e-30))


def _apart(forward: Forward, dims: tuple[tuple[Dims, ...], dict[str, Dims], tuple[Dims, ...]]) -> Forward:
    """Return a forward that calls ``forward`` for each request's tokens in the running step, and joins the results."""
    arg_dims, kwarg_dims, output_dims = dims

    def run(*args: Any, **kwargs: Any) -> Any:
        step = running_step()
        assert step is not None
        starts = (step.positions == 0).nonzero().flatten().tolist()
        if len(starts) < 2:
            return forward(*args, **kwargs)
        parts = []
        for start, stop in zip(starts, [*starts[1:], len(step.positions)], strict=True):
            request_args = [_cut(value, dims, start, stop) for value, dims in zip_longest(args, arg_dims, fillvalue=())]
            request_kwargs = {
                name: _cut(value, kwarg_dims.get(name, ()), start, stop) for name, value in kwargs.items()
            }
            parts.append(forward(*request_args, **request_kwargs))
        if not isinstance(parts[0], tuple):
            return _join(parts, output_dims[0])
        return tuple(_join(outputs, dims) for outputs, dims in zip(zip(*parts, strict=True), output_dims, strict=True))

    return run


def _dims(value: Any, other_value: Any) -> Dims:
    """Return the dimensions of a tensor that count tokens; none for anything else."""
    if (
        not isinstance(value, torch.Tensor)
        or not isinstance(other_value, torch.Tensor)
        or value.dim() != other_value.dim()
    ):
        return ()
    return tuple(dim for dim in range(value.dim()) if (value.shape[dim], other_value.shape[dim]) == LENGTHS)


def _cut(value: Any, dims: Dims, start: int, stop: int) -> Any:
    for dim in dims:
        value = value.narrow(dim, start, stop - start)
    return value


def _join(parts: Sequence[Any], dims: Dims) -> Any:
    return torch.cat(list(parts), dim=dims[0]) if dims else parts[0]
