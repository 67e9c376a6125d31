"""The bytes of pages: the device pool as each layer views it, and scratch pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import torch

from kvframe.attention.batch_metadata import StepBatch, build_metadata
from kvframe.attention.staging import HOST
from kvframe.cache.block_table import BlockTables
from kvframe.contract.backend import KVCache
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.specs import STATE_ALIGNMENT_BYTES, LayerSpec, StateTensor, align_up
from kvframe.planning.groups import Grouping
from kvframe.planning.memory import allocating
from kvframe.planning.plan import KVCachePlan

Layout = tuple[tuple[str, StateTensor], ...]


class KVCacheStorage:
    """Owns the pool.

    Attributes:
        plan: What is allocated.
        pool: ``[total_bytes], uint8, device``.
        views: Per layer, its state tensors by name, each ``[num_block_ids, *StateTensor.shape], device``, with the
            stride of one block id: views of neighbouring ids overlap, and only ids in a block table are pages, or
            the first part of a page that has several. A layer that shares another's cache has that layer's views.
    """

    def __init__(self, plan: KVCachePlan, grouping: Grouping, device: torch.device) -> None:
        """Allocate the pool, zeroed.

        Args:
            plan: What to allocate.
            grouping: The groups that the plan is for.
            device: The device of the pool.

        Raises:
            PlanError: The device does not have that much memory.
        """
        self.plan = plan
        self.pool = self._allocate(plan, device)
        self.views: dict[str, Mapping[str, torch.Tensor]] = {}
        for planned, group in zip(plan.groups, grouping.groups, strict=True):
            for layer, spec, offset in zip(group.layers, group.stored, planned.layer_offsets, strict=True):
                tensors = {}
                for name, tensor in spec.state_tensors().items():
                    dtype = getattr(torch, tensor.dtype)
                    tensors[name] = self._view(tensor.shape, dtype, offset, planned.part_bytes)
                    offset += align_up(tensor.num_bytes, STATE_ALIGNMENT_BYTES)
                self.views[layer] = tensors
        for layer, target in grouping.follows.items():
            self.views[layer] = self.views[target]

    @staticmethod
    def _allocate(plan: KVCachePlan, device: torch.device) -> torch.Tensor:
        with allocating(plan.total_bytes, "to give the cache", "less memory", str(device)):
            return torch.zeros(plan.total_bytes, dtype=torch.uint8, device=device)

    def _view(self, shape: Sequence[int], dtype: torch.dtype, offset: int, part_bytes: int) -> torch.Tensor:
        item = dtype.itemsize
        num_ids = (self.pool.numel() - part_bytes) // self.plan.block_id_bytes + 1
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        pool_items = self.pool[: self.pool.numel() // item * item].view(dtype)
        return pool_items.as_strided(
            (num_ids, *shape), (self.plan.block_id_bytes // item, *strides), storage_offset=offset // item
        )

    @property
    def num_slabs(self) -> int:
        """The number of slabs in the pool."""
        return self.plan.num_slabs

    def reserve(self, plan: KVCachePlan) -> torch.Tensor:
        """Return ``[plan.total_bytes], uint8, device``, zeroed: memory to ``move`` to.

        Args:
            plan: The new plan; only the number of slabs differs.

        Raises:
            PlanError: The device does not have that much memory.
        """
        # Torch cannot resize memory that NumPy has seen, and a backend may have passed it to NumPy.
        return self._allocate(plan, self.pool.device)

    def move(self, plan: KVCachePlan, pool: torch.Tensor) -> None:
        """Grow or shrink the pool at its end; the bytes that remain keep their content.

        The pool and the views are the same tensors afterwards, at another address. Nothing may use the old addresses
        any longer, such as captured graphs.

        Args:
            plan: The new plan; only the number of slabs differs.
            pool: The memory that was reserved for it.
        """
        kept_bytes = min(plan.total_bytes, self.plan.total_bytes)
        pool[:kept_bytes] = self.pool[:kept_bytes]
        memory = pool.untyped_storage()
        self.plan = plan
        self.pool.set_(memory, 0, (plan.total_bytes,), (1,))
        for group in plan.groups:
            num_ids = (plan.total_bytes - group.part_bytes) // plan.block_id_bytes + 1
            for layer in group.layers:
                for view in self.views[layer].values():
                    view.set_(memory, view.storage_offset(), (num_ids, *view.shape[1:]), view.stride())

    def fill(self, group: int, block_ids: Sequence[int], value: float) -> None:
        """Fill pages with one value in every layer's dtype.

        Args:
            group: The pages' group.
            block_ids: The pages.
            value: The value. NaN shows that a dead page is read; in a tensor of whole numbers it sets all bits.
        """
        planned = self.plan.groups[group]
        ids_per_part = planned.part_bytes // self.plan.block_id_bytes
        parts = [page + part * ids_per_part for page in block_ids for part in range(planned.num_parts)]
        for layer in planned.layers:
            for tensor in self.views[layer].values():
                fill_pages(tensor, parts, value)

    def copy_pages(self, group: int, block_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        """Copy pages of a group within the pool, in order and without further memory.

        Args:
            group: The pages' group.
            block_ids: The pages to copy.
            target_ids: As many pages to copy them to.
        """
        num_bytes, unit = self.plan.groups[group].page_bytes, self.plan.block_id_bytes
        for page, target in zip(block_ids, target_ids, strict=True):
            self.pool.narrow(0, target * unit, num_bytes).copy_(self.pool.narrow(0, page * unit, num_bytes))

    def poison(self) -> None:
        """Fill all pages but the null page with NaN, in every dtype of floats."""
        self.pool[self.plan.null_bytes :] = 255


def fill_pages(tensor: torch.Tensor, pages: list[int] | slice, value: float) -> None:
    """Fill pages of one state tensor with one value, of any dtype.

    Args:
        tensor: ``[num_pages, …], device``; written to.
        pages: The pages.
        value: The value. NaN sets all bits in a tensor of whole numbers.
    """
    if math.isnan(value) and not tensor.is_floating_point():
        tensor.view(torch.uint8)[pages] = 255
    elif tensor.dtype.itemsize == 1:  # Floats of eight bits have no index operations of their own.
        tensor.view(torch.uint8)[pages] = int(torch.tensor(value, dtype=tensor.dtype).view(torch.uint8))
    else:
        tensor[pages] = value


class LocalCaches:
    """Owns the scratch pages of a model's step-local layers, which keep nothing of the past, such as an encoder's.

    Such a layer is in no cache group. It uses the same wrappers, builders and backends as layers with a cache: its keys
    and values of the step are written to scratch pages, which the next such layer overwrites.

    Invariant: a page's content is valid from a layer's write to the end of that layer's call, so layers whose
    state tensors are alike share their pages.

    Attributes:
        metadata_indices: For each step-local layer, the index of its metadata in what ``metadata`` returns.
        views: Per layer, its state tensors by name, each ``[num_pages, *StateTensor.shape], device``; page 0 is the
            null page.
        num_bytes: Bytes of all scratch pages.
        max_tokens: The most tokens of a step.
        is_poisoned: Whether each step starts with NaN in every page, so that a read of stale content shows.
    """

    def __init__(self, layers: Sequence[LayerSpec], device: torch.device, *, max_tokens: int, max_reqs: int) -> None:
        """Allocate the pages, zeroed.

        Args:
            layers: The model's layers; those that attend and keep nothing of the past are step-local.
            device: Where they run.
            max_tokens: The most tokens of a step.
            max_reqs: The most requests of a step.

        Raises:
            PlanError: The device has no memory for them.
        """
        self.is_poisoned = False
        self.max_tokens = max_tokens
        self._max_reqs = max_reqs
        self.metadata_indices: dict[str, int] = {}
        self.views: dict[str, KVCache] = {}
        buffers: dict[Layout, KVCache] = {}
        block_sizes: list[int] = []
        for layer in layers:
            if layer.query is None or layer.spec is None or layer.spec.keeps_past:
                continue
            size, state = layer.spec.block_size, layer.spec.state_tensors()
            if size not in block_sizes:
                block_sizes.append(size)
            self.metadata_indices[layer.name] = block_sizes.index(size)
            layout = tuple(sorted(state.items()))
            if layout not in buffers:
                buffers[layout] = _allocate_scratch(state, 1 + num_pages(size, max_tokens, max_reqs), device)
            self.views[layer.name] = buffers[layout]
        self._tensors = [tensor for buffer in buffers.values() for tensor in buffer.values()]
        self._tables = BlockTables(max_reqs, max_tokens, block_sizes)
        self.num_bytes = sum(tensor.nbytes for tensor in self._tensors)

    @property
    def num_groups(self) -> int:
        """The number of values that ``metadata`` returns."""
        return len(self._tables)

    def fits(self, query_lens: Sequence[int]) -> bool:
        """Return whether requests with this many tokens each can be computed in one step."""
        return not self.metadata_indices or (len(query_lens) <= self._max_reqs and sum(query_lens) <= self.max_tokens)

    def metadata(self, batch: StepBatch) -> tuple[CommonAttentionMetadata, ...]:
        """Give each request of a step consecutive pages, and return the step's metadata for these layers.

        Args:
            batch: The step, with all tokens of each request.

        Returns:
            One value per block size of the step-local layers, on the host.
        """
        if not self.metadata_indices:
            return ()
        assert len(batch.rows) <= self._max_reqs
        assert batch.query_lens.sum() <= self.max_tokens
        assert not batch.num_computed.any(), "a layer that keeps nothing sees whole requests"
        if self.is_poisoned:
            for tensor in self._tensors:
                fill_pages(tensor, slice(1, None), math.nan)
        rows = np.arange(len(batch.rows))
        for stack in self._tables.stacks:
            counts = -(-batch.query_lens // stack.block_size)
            columns = np.arange(counts.max())
            ids = (np.cumsum(counts) - counts + 1)[:, None] + columns
            stack.ids[:, : len(rows), : len(columns)] = np.where(columns < counts[:, None], ids, 0)
        return build_metadata(attrs.evolve(batch, rows=rows), self._tables, HOST)


def num_pages(block_size: int, max_tokens: int, max_reqs: int) -> int:
    """Return the most pages that the requests of a step use; each request starts a new page."""
    return min(max_tokens, (max_tokens + max_reqs * (block_size - 1)) // block_size)


def _allocate_scratch(state: Mapping[str, StateTensor], count: int, device: torch.device) -> KVCache:
    num_bytes = count * sum(tensor.num_bytes for tensor in state.values())
    with allocating(num_bytes, "for the tokens of a step", "a smaller max_num_batched_tokens", str(device)):
        return {
            name: torch.zeros(count, *tensor.shape, dtype=getattr(torch, tensor.dtype), device=device)
            for name, tensor in state.items()
        }
