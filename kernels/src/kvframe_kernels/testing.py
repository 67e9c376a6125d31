"""Makes tensors for tests of kernels: inside larger memory and with unusual strides, as a kernel may get them.

The memory around them holds NaN, or all bits set if it holds whole numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def poisoned(shape: Sequence[int], dtype: torch.dtype, device: str | torch.device = "cpu") -> torch.Tensor:
    """Return a tensor of NaN, or of all bits set for whole numbers."""
    if dtype.is_floating_point:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)
    bits = torch.full((*shape[:-1], shape[-1] * dtype.itemsize), 255, dtype=torch.uint8, device=device)
    return bits.view(dtype)


def scattered(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a copy of a tensor that has gaps along every dimension, and another order of dimensions in memory."""
    order = torch.randperm(tensor.dim(), generator=generator).tolist()
    gaps = torch.randint(1, 3, (tensor.dim(),), generator=generator).tolist()
    memory = poisoned([tensor.shape[axis] * gaps[axis] + 1 for axis in order], tensor.dtype, tensor.device)
    view = memory.permute([order.index(axis) for axis in range(tensor.dim())])
    for axis, gap in enumerate(gaps):
        view = view.narrow(axis, 1, view.shape[axis] - 1)[(slice(None),) * axis + (slice(None, None, gap),)]
    view.copy_(tensor)
    return view


def paged(
    num_ids: int, unit: int, shape: Sequence[int], dtype: torch.dtype, device: str | torch.device = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a pool of poison, and a layer's view of it, with one block id every ``unit`` elements.

    If a page has more than ``unit`` elements, views of neighbouring ids overlap. The first part of each page belongs to
    another layer.
    """
    size = int(torch.Size(shape).numel())
    offset = 3
    pool = poisoned([num_ids * unit + size + offset], dtype, device)
    strides = [int(torch.Size(shape[axis + 1 :]).numel()) for axis in range(len(shape))]
    return pool, pool.as_strided((num_ids, *shape), (unit, *strides), offset)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors hold the same bytes, NaN included."""
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
