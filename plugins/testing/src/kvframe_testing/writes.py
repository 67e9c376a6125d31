"""Finds writes to tensors that others read too."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe_testing.laws import ConformanceError


class WriteGuard:
    """Tensors that must not be written to, with a copy of each, and the number of writes to its memory."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._copies = [tensor.clone() for tensor in tensors]
        self._num_writes = list(map(num_writes, tensors))

    def check(self, message: str) -> None:
        """Raise a ``ConformanceError`` with the message if one of them was written to."""
        is_counted = self._num_writes != list(map(num_writes, self._tensors))
        if is_counted or not all(map(same_bits, self._tensors, self._copies)):
            raise ConformanceError(message)


def num_writes(tensor: torch.Tensor) -> int:
    """Return how often torch wrote to a tensor's memory, through any view; 0 if it does not count, as in inference."""
    return 0 if tensor.is_inference() else tensor._version


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors hold the same bits: NaN is not equal to itself."""
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def tensors_of(metadata: CommonAttentionMetadata) -> list[torch.Tensor]:
    """Return every tensor of a step's metadata, including host tensors and those of extensions."""
    values = [*attrs.asdict(metadata, recurse=False).values()]
    for extension in metadata.extensions.values():
        values += [extension.values, extension.values_cpu]
    return [value for value in values if isinstance(value, torch.Tensor)]
