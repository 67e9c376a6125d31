"""Staging: one copy brings everything that a step computed on the host to the device.

A step is prepared on the host, wrapper chains included, because its tensors are small: computing them there costs less
than a kernel launch. Then all of them are placed side by side in pinned memory, and one asynchronous copy brings them
to the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, TypeVar

import attrs
import torch

from kvframe.attention.nested import host_tensors, replace_tensors
from kvframe.contract.capture import NotReplayableError

HOST = torch.device("cpu")

ALIGNMENT = 64
"""Bytes: each tensor starts at a multiple of this, so that kernels may read it with wide loads."""

T = TypeVar("T")
MemoryRange = tuple[torch.Size, torch.dtype, int]
"""A tensor's shape, its dtype, and the byte of the memory that it starts at."""


class Staging:
    """Brings the tensors of a step to the device.

    Invariant: host memory is not overwritten before its last copy to the device is done.

    Attributes:
        device: The device.
        is_needed: Whether the device is another than the host.
    """

    def __init__(self, device: torch.device) -> None:
        """Take the device; if it is the host, nothing is copied."""
        self.device = device
        self.is_needed = device.type != HOST.type
        # While the device still reads one buffer, a step may write to the other.
        self._buffers = (_HostBuffer(device), _HostBuffer(device))
        self._turn = 0

    def to_device(self, value: T, into: StagedMemory | None = None) -> T:
        """Return a value with its tensors on the device; the same tensors if that is the host.

        Args:
            value: Tensors in attrs classes, dataclasses, tuples, lists and mappings. Fields whose names end with
                ``_cpu`` stay on the host; so do fields that are not declared as tensors, and objects of other classes.
            into: Memory for the tensors; new memory unless given.

        Raises:
            NotReplayableError: The tensors have other shapes or dtypes than those that ``into`` was made for.
        """
        if not self.is_needed and into is None:
            return value
        tensors = host_tensors(value)
        layout, num_bytes = layout_of(tensors)
        self._turn = 1 - self._turn
        cpu_memory = self._buffers[self._turn].fill(tensors, layout, num_bytes)
        if into is None:
            views: Sequence[torch.Tensor] = views_of(cpu_memory.to(self.device, non_blocking=True), layout)
        else:
            if into.layout != layout:
                raise NotReplayableError("the tensors of this step are not those that the memory was laid out for")
            into.memory.copy_(cpu_memory, non_blocking=True)
            views = into.views
        self._buffers[self._turn].note_copy()
        view_of = {id(tensor): view for tensor, view in zip(tensors, views, strict=True)}
        return replace_tensors(value, lambda tensor: view_of.get(id(tensor), tensor))


class _HostBuffer:
    """Host memory that is copied to a device; pinned for a GPU, so that copies are asynchronous."""

    def __init__(self, device: torch.device) -> None:
        self._is_pinned = device.type == "cuda"
        self._copied = torch.cuda.Event() if self._is_pinned else None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._layout: tuple[MemoryRange, ...] | None = None
        self._views: Sequence[torch.Tensor] = ()

    def fill(self, tensors: Sequence[torch.Tensor], layout: tuple[MemoryRange, ...], num_bytes: int) -> torch.Tensor:
        """Write tensors to their places; return the memory, ``[num_bytes], uint8, host``."""
        if self._copied is not None:
            self._copied.synchronize()  # with a copy of two steps ago, which is usually done
        if len(self._memory) < num_bytes:
            # Made outside of inference mode, so that a later step may write to it in either mode.
            with torch.inference_mode(False):
                self._memory = torch.empty(2 * num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)
            self._layout = None
        if self._layout != layout:
            self._layout, self._views = layout, views_of(self._memory, layout)
        for view, tensor in zip(self._views, tensors, strict=True):
            view.copy_(tensor)
        return self._memory[:num_bytes]

    def note_copy(self) -> None:
        """Record that a copy of the memory was queued."""
        if self._copied is not None:
            self._copied.record()


@attrs.frozen(eq=False)
class StagedMemory:
    """Memory on the device for the tensors of steps of equal shapes: each tensor always lies at the same address.

    Attributes:
        layout: Where each tensor lies.
        memory: ``[num_bytes], uint8, device``.
        views: The tensors.
    """

    layout: tuple[MemoryRange, ...]
    memory: torch.Tensor
    views: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, value: Any, device: torch.device) -> StagedMemory:
        """Return uninitialised memory for the tensors of a value that ``Staging.to_device`` takes."""
        layout, num_bytes = layout_of(host_tensors(value))
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return cls(layout, memory, tuple(views_of(memory, layout)))


def layout_of(tensors: Sequence[torch.Tensor]) -> tuple[tuple[MemoryRange, ...], int]:
    """Return a place for each tensor, one after the other, and the bytes of all of them."""
    layout, end = [], 0
    for tensor in tensors:
        layout.append((tensor.shape, tensor.dtype, end))
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(layout), end


def views_of(memory: torch.Tensor, layout: Sequence[MemoryRange]) -> list[torch.Tensor]:
    """Return the tensors that lie in memory of bytes, a multiple of the alignment."""
    # The memory is viewed once per dtype; consecutive tensors of one shape and dtype are made by one operation.
    as_dtype: dict[torch.dtype, torch.Tensor] = {}
    views: list[torch.Tensor] = []
    for (shape, dtype), alike in itertools.groupby(layout, itemgetter(0, 1)):
        starts = [start // dtype.itemsize for _, _, start in alike]
        if dtype not in as_dtype:
            as_dtype[dtype] = memory.view(dtype)
        strides, step = [1] * len(shape), 1
        for index in range(len(shape) - 1, -1, -1):
            strides[index] = step
            step *= max(1, shape[index])
        if len(starts) == 1:
            views.append(as_dtype[dtype].as_strided(shape, strides, starts[0]))
        else:
            distance = starts[1] - starts[0]
            together = as_dtype[dtype].as_strided((len(starts), *shape), (distance, *strides), starts[0])
            views.extend(together.unbind())
    return views
