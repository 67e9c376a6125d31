"""Runs models on tensors without data, although their control flow asks for values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class WithoutValues(TorchDispatchMode):
    """Lets control flow ask for values of tensors without data: nothing is chosen, numbers are zero.

    Experts find the tokens that chose them by ``nonzero``, or split the sorted tokens by a list of numbers. The
    self-check compares what was read with the real model.
    """

    def __init__(self, note: Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], None] | None = None) -> None:
        """Keep what is called after each operation, with its function, arguments and result."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer a call that needs values; run every other one."""
        if func in _NEEDS_VALUES and args[0].is_meta:
            if func is torch.ops.aten.nonzero.default:
                return args[0].new_empty(0, args[0].dim(), dtype=torch.int64)
            return False if args[0].dtype is torch.bool else 0
        if func is torch.ops.aten._to_copy.default and args[0].is_meta and _is_list_of_numbers(args[0], kwargs or {}):
            return torch.zeros(args[0].shape, dtype=args[0].dtype, device="cpu")
        if func is torch.ops.aten.split_with_sizes.default and args[0].is_meta:
            args = _with_all_rows(*args)
        if func in _INDEXED and args[0].is_meta:
            args = (args[0], _without_masks(args[1]), *args[2:])
        result = func(*args, **(kwargs or {}))
        if self._note is not None:
            self._note(func, args, kwargs or {}, result)
        return result


def _is_list_of_numbers(tensor: torch.Tensor, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a copy of a tensor goes to the CPU to become a list of whole numbers."""
    is_whole = not tensor.dtype.is_floating_point and tensor.dtype is not torch.bool
    return is_whole and tensor.dim() == 1 and kwargs.get("device") == torch.device("cpu")


def _with_all_rows(tensor: torch.Tensor, sizes: Sequence[int], dim: int = 0) -> tuple[torch.Tensor, list[int], int]:
    """Return the arguments of a split whose sizes are not known, so that the first part has all rows."""
    total = tensor.shape[dim]
    return tensor, [*sizes] if sum(sizes) == total else [total, *(0 for _ in sizes[1:])], dim


def _without_masks(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return indices with no index instead of each mask: one for each of its dimensions, as ``nonzero`` gives them."""
    values: list[torch.Tensor | None] = []
    for index in indices:
        is_mask = index is not None and index.dtype is torch.bool and index.is_meta
        values += [index.new_empty(0, dtype=torch.int64)] * index.dim() if is_mask else [index]  # type: ignore[union-attr]
    return values


_INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default)
_NEEDS_VALUES = (torch.ops.aten.nonzero.default, torch.ops.aten._local_scalar_dense.default)
