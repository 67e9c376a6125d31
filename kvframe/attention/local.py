"""Step-local caches: scratch pages for layers that keep nothing of the past, such as those of an encoder.

Such a layer is in no cache group. It uses the same wrappers, builders and backends as layers with a cache: its keys and
values of the step are written to scratch pages, which the next such layer overwrites.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import torch

from kvframe.attention.batch_metadata import StepBatch, build_metadata
from kvframe.attention.staging import HOST
from kvframe.attention.storage import fill_pages
from kvframe.cache.block_table import BlockTables
from kvframe.contract.backend import KVCache
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.specs import LayerSpec, StateTensor
from kvframe.planning.memory import allocating

Layout = tuple[tuple[str, StateTensor], ...]


class LocalCaches:
    """Owns the scratch pages of a model's step-local layers.

    Invariant: a page's content is valid from a layer's write to the end of that layer's call, so layers whose
    state tensors are alike share their pages.

    Attributes:
        places: For each step-local layer, the index of its metadata in what ``metadata`` returns.
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
        self.places: dict[str, int] = {}
        self.views: dict[str, KVCache] = {}
        buffers: dict[Layout, KVCache] = {}
        block_sizes: list[int] = []
        for layer in layers:
            if layer.query is None or layer.spec is None or layer.spec.keeps_past:
                continue
            size, state = layer.spec.block_size, layer.spec.state_tensors()
            if size not in block_sizes:
                block_sizes.append(size)
            self.places[layer.name] = block_sizes.index(size)
            layout = tuple(sorted(state.items()))
            if layout not in buffers:
                buffers[layout] = _allocate(state, 1 + num_pages(size, max_tokens, max_reqs), device)
            self.views[layer.name] = buffers[layout]
        self._tensors = [tensor for buffer in buffers.values() for tensor in buffer.values()]
        self._tables = BlockTables(max_reqs, max_tokens, block_sizes)
        self.num_bytes = sum(tensor.nbytes for tensor in self._tensors)

    @property
    def num_places(self) -> int:
        """The number of values that ``metadata`` returns."""
        return len(self._tables)

    def fits(self, query_lens: Sequence[int]) -> bool:
        """Return whether requests with this many tokens each can be computed in one step."""
        return not self.places or (len(query_lens) <= self._max_reqs and sum(query_lens) <= self.max_tokens)

    def metadata(self, batch: StepBatch) -> tuple[CommonAttentionMetadata, ...]:
        """Give each request of a step consecutive pages, and return the step's metadata for these layers.

        Args:
            batch: The step, with all tokens of each request.

        Returns:
            One value per block size of the step-local layers, on the host.
        """
        if not self.places:
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


def _allocate(state: Mapping[str, StateTensor], count: int, device: torch.device) -> KVCache:
    num_bytes = count * sum(tensor.num_bytes for tensor in state.values())
    with allocating(num_bytes, "for the tokens of a step", "a smaller max_num_batched_tokens", str(device)):
        return {
            name: torch.zeros(count, *tensor.shape, dtype=getattr(torch, tensor.dtype), device=device)
            for name, tensor in state.items()
        }
