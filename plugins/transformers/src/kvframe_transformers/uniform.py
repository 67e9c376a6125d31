"""Tensors without data whose numbers are known, because they are all the same: a mask may depend on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_aten = torch.ops.aten
_FILLED: Mapping[Any, float] = {
    _aten.zeros.default: 0,
    _aten.zeros_like.default: 0,
    _aten.new_zeros.default: 0,
    _aten.ones.default: 1,
    _aten.ones_like.default: 1,
    _aten.new_ones.default: 1,
}
"""Operations whose result is filled with a number."""

_FULL: Mapping[Any, int] = {
    _aten.scalar_tensor.default: 0,
    _aten.full.default: 1,
    _aten.full_like.default: 1,
    _aten.new_full.default: 2,
}
"""Operations that fill with an argument, and its index."""

_COPIES: Mapping[Any, int] = {_aten._to_copy.default: 0, _aten.clone.default: 0, _aten.copy_.default: 1}
"""Operations that copy an argument, and its index."""


class UniformTensors:
    """The numbers of tensors without data that are filled with one number, by the storage that views of them share.

    Attributes:
        numbers: By the address of a storage: the storage, and a tensor of one number with the dtype of its tensors.
    """

    def __init__(self) -> None:
        """Start with no tensor known."""
        self.numbers: dict[int, tuple[Any, torch.Tensor]] = {}

    def number_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the number that a tensor is filled with, ``[]``, host; None if it is not known."""
        if not tensor.is_meta:
            return tensor if tensor.dim() == 0 and tensor.device.type == "cpu" else None
        _, number = self.numbers.get(tensor.untyped_storage()._cdata, (None, None))
        return number if number is not None and number.dtype == tensor.dtype else None

    def note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record an operation on tensors without data."""
        is_filled = isinstance(result, torch.Tensor) and result.is_meta
        number = self._number_after(func, args, kwargs, result) if is_filled else None
        if func._schema.is_mutable:
            self._change(func, args, kwargs, number)
        elif number is not None:
            storage = result.untyped_storage()
            self.numbers[storage._cdata] = storage, number

    def _number_after(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: torch.Tensor
    ) -> torch.Tensor | None:
        if func in _FILLED:
            return torch.tensor(_FILLED[func], dtype=result.dtype, device="cpu")
        if func in _FULL and isinstance(args[_FULL[func]], int | float):
            return torch.tensor(args[_FULL[func]], dtype=result.dtype, device="cpu")
        if func in _COPIES:
            number = self.number_of(args[_COPIES[func]])
            return None if number is None else number.to(result.dtype)
        if torch.Tag.pointwise not in func.tags or kwargs:
            return None
        numbers = [self.number_of(argument) if isinstance(argument, torch.Tensor) else argument for argument in args]
        if func._schema.is_mutable and numbers and numbers[0] is not None:
            numbers[0] = numbers[0].clone()
        is_known = all(argument is not None for argument in numbers) and any(
            isinstance(argument, torch.Tensor) for argument in args
        )
        number = func(*numbers) if is_known else None
        return number.to(result.dtype) if isinstance(number, torch.Tensor) else None

    def _change(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], number: torch.Tensor | None) -> None:
        """Forget every tensor that an operation changes, unless it is filled with the same number after it."""
        for argument, value in zip(func._schema.arguments, args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and isinstance(value, torch.Tensor) and value.is_meta:
                before = self.number_of(value)
                if before is None or number is None or not torch.equal(before, number):
                    self.numbers.pop(value.untyped_storage()._cdata, None)
        for value in kwargs.values():
            if isinstance(value, torch.Tensor) and value.is_meta:
                self.numbers.pop(value.untyped_storage()._cdata, None)


class AnyIndex(TorchFunctionMode):
    """Lets code look up known numbers at any index, beyond the size of the tensor too."""

    def __init__(self, uniform: UniformTensors) -> None:
        """Take the known tensors."""
        super().__init__()
        self._uniform = uniform

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer a look-up; run every other call."""
        if func is torch.Tensor.__getitem__ and args[0].is_meta and isinstance(args[1], tuple):
            number = self._uniform.number_of(args[0])
            are_indices = all(isinstance(index, torch.Tensor) and not index.is_meta for index in args[1])
            if number is not None and are_indices and len(args[1]) == args[0].dim():
                return number.expand(torch.broadcast_shapes(*(index.shape for index in args[1])))
        return func(*args, **(kwargs or {}))
