"""Staging: one copy brings everything that a step computed on the host to the device.

A step is worked out on the host, chains of wrappers included: their tensors are small, and what is small costs less
there than a launch on a device. Then all of them lie side by side in pinned memory, and one copy brings them over,
which nobody waits for.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, TypeVar

import attrs
import torch

from kvframe.attention.nested import host_tensors, replace_tensors

HOST = torch.device("cpu")

ALIGNMENT = 64
"""Bytes: each tensor starts at a multiple of this, so that kernels may read it with wide loads."""

T = TypeVar("T")
Place = tuple[torch.Size, torch.dtype, int]
"""A tensor's shape, its dtype, and the byte of the memory that it starts at."""


class Staging:
    """Brings the tensors of a step to the device.

    Invariant: host memory is not written to before the copy that was made of it is done.

    Attributes:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        """Take the device; where that is the host, nothing is copied."""
        self.device = device
        # While the device still reads the one, a step may write to the other.
        self._buffers = (_HostBuffer(device), _HostBuffer(device))
        self._turn = 0

    def to_device(self, value: T, into: StagedMemory | None = None) -> T:
        """Return a value whose tensors are on the device; with the very tensors where that is the host.

        Args:
            value: Tensors in attrs classes, dataclasses, tuples, lists and mappings. Fields whose names end with
                ``_cpu`` stay on the host; so does what is declared to be no tensor, and whatever lies in objects of
                other classes.
            into: Where the tensors are to lie; fresh memory unless given.

        Raises:
            ValueError: The tensors have other shapes or dtypes than those that ``into`` was made for.
        """
        if self.device.type == HOST.type and into is None:
            return value
        tensors = host_tensors(value)
        places, num_bytes = layout_of(tensors)
        self._turn = 1 - self._turn
        host = self._buffers[self._turn].fill(tensors, places, num_bytes)
        if into is None:
            views: Sequence[torch.Tensor] = views_of(host.to(self.device, non_blocking=True), places)
        else:
            if into.places != places:
                raise ValueError("the tensors of this step are not those that the memory was laid out for")
            into.memory.copy_(host, non_blocking=True)
            views = into.views
        self._buffers[self._turn].note_copy()
        there = {id(tensor): view for tensor, view in zip(tensors, views, strict=True)}
        return replace_tensors(value, lambda tensor: there.get(id(tensor), tensor))


class _HostBuffer:
    """Host memory that copies to a device are made of; pinned where that lets them run by themselves."""

    def __init__(self, device: torch.device) -> None:
        self._is_pinned = device.type == "cuda"
        self._copied = torch.cuda.Event() if self._is_pinned else None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._places: tuple[Place, ...] | None = None
        self._views: Sequence[torch.Tensor] = ()

    def fill(self, tensors: Sequence[torch.Tensor], places: tuple[Place, ...], num_bytes: int) -> torch.Tensor:
        """Write tensors to their places; return the memory, ``[num_bytes], uint8, host``."""
        if self._copied is not None:
            self._copied.synchronize()  # of a copy two steps ago, which is done
        if len(self._memory) < num_bytes:
            # Made outside of inference mode, so that a later step may write to it in either mode.
            with torch.inference_mode(False):
                self._memory = torch.empty(2 * num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)
            self._places = None
        if self._places != places:
            self._places, self._views = places, views_of(self._memory, places)
        for view, tensor in zip(self._views, tensors, strict=True):
            view.copy_(tensor)
        return self._memory[:num_bytes]

    def note_copy(self) -> None:
        """Note that a copy of the memory was just asked for."""
        if self._copied is not None:
            self._copied.record()


@attrs.frozen(eq=False)
class StagedMemory:
    """Memory on the device that the tensors of steps of equal shapes are copied to, each always to the same place.

    Attributes:
        places: Where each tensor lies.
        memory: ``[num_bytes], uint8, device``.
        views: The tensors.
    """

    places: tuple[Place, ...]
    memory: torch.Tensor
    views: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, value: Any, device: torch.device) -> StagedMemory:
        """Return memory for the tensors of a value as ``Staging.to_device`` takes it; what is in it is undefined."""
        places, num_bytes = layout_of(host_tensors(value))
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return cls(places, memory, tuple(views_of(memory, places)))


def layout_of(tensors: Sequence[torch.Tensor]) -> tuple[tuple[Place, ...], int]:
    """Return a place for each tensor, one after the other, and the bytes of all of them."""
    places, end = [], 0
    for tensor in tensors:
        places.append((tensor.shape, tensor.dtype, end))
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(places), end


def views_of(memory: torch.Tensor, places: Sequence[Place]) -> list[torch.Tensor]:
    """Return the tensors that lie in memory of bytes, a multiple of the alignment."""
    # Seen as elements of each dtype once; tensors that are alike and lie one after the other are then one operation.
    as_dtype: dict[torch.dtype, torch.Tensor] = {}
    views: list[torch.Tensor] = []
    for (shape, dtype), alike in itertools.groupby(places, itemgetter(0, 1)):
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
