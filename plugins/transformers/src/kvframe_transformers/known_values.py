"""Values of tensors without data that are computed from numbers alone, such as a mask that a module makes itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_aten = torch.ops.aten
_MAX_NUMBERS = 1 << 23
_HIDDEN = -1e3
"""A score that attention does not show: a mask adds or sets -10,000 or less, which may be scaled."""

_WITHOUT_VALUES = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)


class KnownValues(TorchDispatchMode):
    """Computes on the CPU too what is computed without data, as far as it depends on no weight and no random number.

    Attributes:
        copies: By the address of a storage without data: the storage, and its numbers.
    """

    def __init__(self) -> None:
        """Start with no tensor known."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: dict[int, tuple[Any, torch.Tensor]] = {}

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a tensor on the CPU; None if they are not known."""
        if not tensor.is_meta:
            return tensor
        _, numbers = self.copies.get(tensor.untyped_storage()._cdata, (None, None))
        if numbers is None or numbers.dtype != tensor.dtype:
            return None
        return numbers.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def set_value(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Set the values of a tensor without data; it has a storage of its own."""
        storage = tensor.untyped_storage()
        self.copies[storage._cdata] = storage, value.to(tensor.dtype).contiguous().view(-1)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and compute its values if all that it takes is known."""
        result = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_meta]
        if not outputs:
            return result
        is_computed = func not in _WITHOUT_VALUES and torch.Tag.nondeterministic_seeded not in func.tags
        is_known = is_computed and all(self.value_of(leaf) is not None for leaf in inputs)
        if is_known and all(leaf.numel() <= _MAX_NUMBERS for leaf in outputs):
            known_args, known_kwargs = tree_map(self._known, (args, dict(kwargs or {})))
            values = tree_leaves(func(*known_args, **known_kwargs))
            for output, value in zip(outputs, values, strict=True):
                self._keep(output, value)
        elif func._schema.is_mutable:
            for leaf in outputs:  # what it changes, it returns
                self.copies.pop(leaf.untyped_storage()._cdata, None)
        return result

    def _known(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.value_of(value)
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def _keep(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.copies:  # a view, and what is changed in place, have their numbers already
            numbers = torch.empty(storage.nbytes() // tensor.itemsize, dtype=tensor.dtype, device="cpu")
            numbers.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(value)
            self.copies[storage._cdata] = storage, numbers


Change = tuple[str, tuple[Any, ...]]
"""An operation on scores: its name, and its arguments, in which None stands for the scores."""


def visible_keys(changes: Sequence[Change], values: KnownValues, num_tokens: int, query: int) -> torch.Tensor | None:
    """Return which keys a query sees by the operations on its scores, ``[num_tokens], bool, host``.

    Args:
        changes: The operations, without those that scale.
        values: What is known of their tensors.
        num_tokens: The queries, which are as many as the keys.
        query: The index of the query.

    Returns:
        True for scores that stay as they are, False for those that become too small to matter; None if any becomes
        something else, or if heads differ.
    """
    before = torch.tensor([0.25, -0.5]).view(2, 1, 1, 1)
    after = before.expand(2, 1, 1, num_tokens)
    for name, args in changes:
        mask_rows = [
            _row(values.value_of(argument), query) if isinstance(argument, torch.Tensor) else argument
            for argument in args
        ]
        if name in ("where", "masked_fill") and mask_rows[-1] is None and args[-1] is not None and not args[-1].dim():
            mask_rows[-1] = torch.tensor(float("-inf"))  # a number that replaces scores is the lowest one
        if any(value is None and argument_row is not None for value, argument_row in zip(mask_rows, args, strict=True)):
            return None
        inputs = [after if argument_row is None else value for value, argument_row in zip(mask_rows, args, strict=True)]
        try:
            after = getattr(torch, name)(*inputs)
        except (RuntimeError, TypeError):
            return None
    if after.shape[-2:] != (1, num_tokens):
        return None
    stays, vanishes = (after == before).flatten(0, -2), (after <= _HIDDEN).flatten(0, -2)
    visible: torch.Tensor = stays[0]
    is_clear = (stays == visible).all() and (vanishes == ~visible).all()
    return visible if is_clear else None


def _row(value: torch.Tensor | None, query: int) -> torch.Tensor | None:
    """Return what a tensor has for one query."""
    return value if value is None or value.dim() < 2 or value.shape[-2] == 1 else value[..., query : query + 1, :]
