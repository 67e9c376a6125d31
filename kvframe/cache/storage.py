"""The pool's bytes: one allocation, seen by each layer as strided tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from kvframe.errors import PlanError
from kvframe.groups import Grouping
from kvframe.plan import KVCachePlan
from kvframe.specs import STATE_ALIGNMENT_BYTES, align_up


class KVCacheStorage:
    """Owns the pool.

    Attributes:
        pool: ``[total_bytes], uint8, device``.
        views: Per layer, its state tensors by name, each ``[num_block_ids, *StateTensor.shape], device``, with the
            stride of one block id: views of neighbouring ids overlap, and only ids in a block table are pages. A
            layer that shares another's cache has that layer's views.
    """

    def __init__(self, plan: KVCachePlan, grouping: Grouping, device: torch.device) -> None:
        """Allocate the pool, zeroed.

        Args:
            plan: What to allocate.
            grouping: The groups that the plan is for.
            device: Where.

        Raises:
            PlanError: The device has not that much memory.
        """
        self._plan = plan
        try:
            self.pool = torch.zeros(plan.total_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise PlanError(
                f"{device} has no {plan.total_bytes} bytes to give the cache; ask for less memory"
            ) from error
        self.views: dict[str, Mapping[str, torch.Tensor]] = {}
        for planned, group in zip(plan.groups, grouping.groups, strict=True):
            for layer, spec, offset in zip(group.layers, group.stored, planned.layer_offsets, strict=True):
                tensors = {}
                for name, tensor in spec.state_tensors().items():
                    dtype = getattr(torch, tensor.dtype)
                    tensors[name] = self._view(tensor.shape, dtype, offset, planned.page_bytes)
                    offset += align_up(tensor.num_bytes, STATE_ALIGNMENT_BYTES)
                self.views[layer] = tensors
        for layer, target in grouping.follows.items():
            self.views[layer] = self.views[target]

    def _view(self, shape: Sequence[int], dtype: torch.dtype, offset: int, page_bytes: int) -> torch.Tensor:
        item = dtype.itemsize
        num_ids = (self.pool.numel() - page_bytes) // self._plan.block_id_bytes + 1
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        whole = self.pool[: self.pool.numel() // item * item].view(dtype)
        return whole.as_strided(
            (num_ids, *shape), (self._plan.block_id_bytes // item, *strides), storage_offset=offset // item
        )

    def fill(self, group: int, block_ids: Sequence[int], value: float) -> None:
        """Fill pages with one value in every layer's dtype.

        Args:
            group: The pages' group.
            block_ids: The pages.
            value: What to write; NaN shows any read of state that nobody needs.
        """
        for layer in self._plan.groups[group].layers:
            for tensor in self.views[layer].values():
                tensor[list(block_ids)] = value

    def poison(self) -> None:
        """Make everything but the null page read as NaN, in every dtype of floats."""
        self.pool[self._plan.null_bytes :] = 255
