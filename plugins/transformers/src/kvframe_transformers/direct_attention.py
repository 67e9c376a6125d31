"""Attention of modules that compute it themselves, outside of transformers' attention interface.

Older models multiply queries and keys, scale, add a mask, take the softmax and multiply by the values. Inside
``replacing``, the first product gives a tensor without values, which notes these operations. The last product then
becomes one call. Any other operation on it is refused, so that nothing of the attention is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from kvframe.contract import ModelError
from kvframe_transformers.states import Forward, names_of


@attrs.frozen(eq=False)
class DirectAttention:
    """What a module makes of its queries and keys, until it multiplies by the values.

    Attributes:
        query: ``[batch, num_heads, num_tokens, head_size]``.
        key: ``[batch, num_kv_heads, num_tokens, head_size]``.
        scale: The factor on their products.
        added: The tensors that are added to the products, and those that hide some of them.
        changes: The operations with these tensors: names, and arguments in which None stands for the scores.
        scales_added: Whether ``scale`` is also a factor on some of ``added``; a scaled mask is still a mask.
        is_normalized: Whether the softmax was taken.
    """

    query: torch.Tensor
    key: torch.Tensor
    scale: float = 1.0
    added: tuple[torch.Tensor, ...] = ()
    changes: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    scales_added: bool = False
    is_normalized: bool = False


Attending = Callable[[DirectAttention, torch.Tensor], torch.Tensor]
"""Computes attention over values, ``[batch, num_kv_heads, num_tokens, head_size_v]``; the result is of that form."""


def attends_directly(module: nn.Module) -> bool:
    """Return whether a module may compute attention itself: its methods take a softmax, and call no interface."""
    names = {name.lower() for name in names_of(type(module))}
    return "softmax" in names and "get_interface" not in names


def replacing(forward: Forward, attend: Attending) -> Forward:
    """Return a forward like ``forward`` whose attention is computed by ``attend``."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _Products(attend):
            return forward(*args, **kwargs)

    return run


class _Products(TorchFunctionMode):
    """Replaces the product of queries and keys."""

    def __init__(self, attend: Attending) -> None:
        super().__init__()
        self._attend = attend
        self._zeros: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = _name(func)
        if name == "baddbmm" and _is_plain(args[0]) and args[0].dim() == 3:
            return self._sum_with_products(*args, **(kwargs or {}))
        if name == "zeros":
            self._zeros.append(func(*args, **(kwargs or {})))
            return self._zeros[-1]
        if name in _PRODUCTS and len(args) == 2 and not any(isinstance(tensor, _Scores) for tensor in args):
            query, key = args
            if query.dim() == key.dim() == _PRODUCTS[name] and query.shape[-1] == key.shape[-2]:
                shape = (*query.shape[:-1], key.shape[-1])
                attention = DirectAttention(
                    *(tensor if tensor.dim() == 4 else tensor.unsqueeze(0) for tensor in (query, key.mT))
                )
                return _Scores.standing_for(attention, self._attend, shape)
        return func(*args, **(kwargs or {}))

    def _sum_with_products(
        self, bias: torch.Tensor, batch1: torch.Tensor, batch2: torch.Tensor, *, beta: float = 1, alpha: float = 1
    ) -> _Scores:
        query, key = batch1.unsqueeze(0), batch2.mT.unsqueeze(0)
        is_zero = any(bias is zeros for zeros in self._zeros)
        attention = DirectAttention(
            query, key, scale=alpha, added=() if is_zero else (bias if beta == 1 else beta * bias,)
        )
        return _Scores.standing_for(attention, self._attend, (*batch1.shape[:-1], batch2.shape[-1]))


class _Scores(torch.Tensor):
    """Stands for scores or, after the softmax, for probabilities: it has their shape and no values."""

    _of: DirectAttention
    _attend: Attending
    _shape: tuple[int, ...]

    @classmethod
    def standing_for(cls, attention: DirectAttention, attend: Attending, shape: Sequence[int]) -> _Scores:
        """Return the tensor of a shape; its one value, a zero, is never read."""
        scores = attention.query.new_zeros(()).expand(shape).as_subclass(cls)
        scores._of, scores._attend, scores._shape = attention, attend, tuple(shape)
        return scores

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, scores = _name(func), next(tensor for tensor in args if isinstance(tensor, _Scores))
        attention, other_args = scores._of, [tensor for tensor in args if tensor is not scores]
        if name in _PROPERTIES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name in _UNCHANGED:
            return scores
        if name in _PRODUCTS and attention.is_normalized and args[0] is scores and _is_plain(other_args[0]):
            value = other_args[0]
            return (
                scores._attend(attention, value)
                if value.dim() == 4
                else scores._attend(attention, value.unsqueeze(0))[0]
            )
        if name in ("view", "reshape"):
            with torch._C.DisableTorchFunctionSubclass():
                shape = func(*args).shape
            if shape[-2:] == scores._shape[-2:]:  # heads and batch in one dimension or in two
                return cls.standing_for(attention, scores._attend, shape)
        if name == "max" and _is_lowest(other_args[0]):
            return scores
        if name == "expand_as" and args[0] is not scores:
            return args[0]  # it is added, or hides keys, in any shape
        if name == "softmax" and not attention.is_normalized:
            return cls.standing_for(attrs.evolve(attention, is_normalized=True), scores._attend, scores._shape)
        new_attention = None
        if name in ("mul", "truediv", "div") and isinstance(other_args[0], int | float) and not attention.is_normalized:
            scale = attention.scale * (other_args[0] if name == "mul" else 1 / other_args[0])
            new_attention = attrs.evolve(
                attention, scale=scale, scales_added=attention.scales_added or bool(attention.added)
            )
        elif (
            not attention.is_normalized and _is_plain(other_args[0]) and name in ("add", "mul", "masked_fill", "where")
        ):
            change = (name, tuple(None if tensor is scores else tensor for tensor in args))
            new_attention = attrs.evolve(
                attention, added=(*attention.added, other_args[0]), changes=(*attention.changes, change)
            )
        if new_attention is not None and func.__name__.endswith("_") and not func.__name__.endswith("__"):
            scores._of = new_attention  # the caller keeps the tensor that it changed
            return scores
        if new_attention is not None:
            return cls.standing_for(new_attention, scores._attend, scores._shape)
        raise ModelError(f"a module computes {name!r} of its attention scores, which kvframe does not know")


_PRODUCTS = {"matmul": 4, "bmm": 3}
"""The dimensions of what each product takes: heads are a dimension of their own, or that of the batch."""
_PROPERTIES = frozenset({"__get__", "size", "dim", "numel", "is_floating_point"})
_UNCHANGED = frozenset({"dropout", "to", "type_as", "float", "type", "contiguous", "clone", "detach"})


def _is_lowest(value: Any) -> bool:
    """Return whether a number in a tensor is too low to matter; without data, whether it is one number."""
    if not isinstance(value, torch.Tensor) or value.dim():
        return False
    return value.is_meta or float(value) <= -1e4


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, _Scores)


def _name(func: Any) -> str:
    """Return an operation's name: ``add`` for a sum by a function, a method or an operator, in place or not."""
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        return name
    if name.startswith("__"):
        name = name.strip("_")
        return name[1:] if name in ("iadd", "radd", "imul", "rmul", "itruediv", "imatmul", "rmatmul") else name
    return name.rstrip("_")
