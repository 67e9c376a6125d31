"""Copies of pages in the plain format: they let a backend serve layers whose format it does not read.

Before a layer attends, its format reads back the pages that the step's queries may see, into memory that all layers
share, in the dtype that attention computes in. The backend gets these copies in place of the pool, with a block table
of their own. The pages to copy are found once a step, from the host copies of the metadata.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Self

import attrs
import numpy as np
import torch

from kvframe.attention.returned import build_all
from kvframe.contract.backend import AttentionBackend, AttentionMetadataBuilder, KVCache
from kvframe.contract.capture import NotReplayableError
from kvframe.contract.formats import PLAIN, StateTensor
from kvframe.contract.metadata import DEVICE_FIELDS, CommonAttentionMetadata
from kvframe.contract.order import IntArray
from kvframe.contract.specs import AttentionMask, LayerSpec
from kvframe.loading.claims import check_declared
from kvframe.planning.memory import allocating


class CopyScratch:
    """Owns the memory of a model's copies.

    Invariant: its content is valid from a layer's read to the end of that layer's call, so all layers share it. It
    grows to the largest size that a step needed: keys and values of each token that the step's queries see, for one
    layer.
    """

    def __init__(self, device: torch.device, max_static_bytes: int | None = None) -> None:
        """Own nothing yet.

        Args:
            device: Where the copies lie.
            max_static_bytes: The most bytes of the copies that a graph reads, which are sized for the most and the
                longest requests of the graph; None for no limit.
        """
        self._device = device
        self._max_static_bytes = max_static_bytes
        self._buffers: dict[tuple[str, StateTensor], torch.Tensor] = {}
        # Buffers whose addresses graphs hold, including buffers that larger ones replaced.
        self._remembered: dict[int, torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds."""
        buffers = {buffer.data_ptr(): buffer for buffer in self._buffers.values()} | self._remembered
        return sum(buffer.nbytes for buffer in buffers.values())

    def take(self, state: Mapping[str, StateTensor], num_pages: int, *, is_static: bool) -> KVCache:
        """Return tensors for the null page and for ``num_pages`` pages after it, ``[1 + num_pages, …], device``.

        Args:
            state: The tensors of one page, in the plain format.
            num_pages: How many pages.
            is_static: Whether a graph may hold their addresses. Such tensors stay where they are.

        Raises:
            NotReplayableError: The copies of a graph would take more bytes than the limit.
            PlanError: The device has no memory for them.
        """
        if is_static and self._max_static_bytes is not None:
            num_bytes = (1 + num_pages) * sum(tensor.num_bytes for tensor in state.values())
            if num_bytes > self._max_static_bytes:
                raise NotReplayableError(
                    f"copies of the pages of the graph's requests take {num_bytes} bytes, more than the "
                    f"{self._max_static_bytes} bytes of copies of all pages"
                )
        return {name: self._take((name, tensor), 1 + num_pages, is_static) for name, tensor in state.items()}

    def _take(self, key: tuple[str, StateTensor], num_pages: int, is_static: bool) -> torch.Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape[0] < num_pages:
            # Allocated outside of inference mode, so that a later call may write to it in either mode. An eighth is
            # spare, so that requests can grow by some pages without another allocation.
            num_made = num_pages + num_pages // 8
            num_bytes, advice = num_made * key[1].num_bytes, "a smaller max_num_seqs, or a backend that needs no copies"
            with (
                torch.inference_mode(False),
                allocating(num_bytes, "to copy the pages of a step to", advice, str(self._device)),
            ):
                shape = (num_made, *key[1].shape)
                buffer = torch.zeros(shape, dtype=getattr(torch, key[1].dtype), device=self._device)
            self._buffers[key] = buffer
        if is_static:
            self._remembered[buffer.data_ptr()] = buffer
        return buffer[:num_pages]


def make_on_copies(
    backend_class: type[AttentionBackend],
    layers: Sequence[LayerSpec],
    device: torch.device,
    options: Sequence[Any],
    scratch: CopyScratch,
) -> CopyingBackend:
    """Return a backend that works on copies of the layers' pages; the arguments are as for ``make_backend``."""
    return CopyingBackend(
        backend_class([_as_plain(layer) for layer in layers], device, *options), layers, device, scratch
    )


def _as_plain(layer: LayerSpec) -> LayerSpec:
    assert layer.spec is not None
    return attrs.evolve(layer, spec=layer.spec.in_format(PLAIN))


@attrs.frozen(eq=False)
class CopiedMetadata:
    """What the layers of an attention group read in a step.

    Attributes:
        built: What the backend's own builder made, for the copies.
        pages: ``[num_pages], int32, device``: the pages to copy.
        index_cpu: ``[num_pages], int64, host``: their indices in the flattened block table.
        num_columns: The columns of that block table.
        is_static: Whether the shapes are those of a graph.
    """

    built: Any
    pages: torch.Tensor
    index_cpu: torch.Tensor
    num_columns: int
    is_static: bool


class CopyingBackend(AttentionBackend):
    """Runs any backend on copies of pages."""

    def __init__(
        self, inner: AttentionBackend, layers: Sequence[LayerSpec], device: torch.device, scratch: CopyScratch
    ) -> None:
        """Wrap a backend.

        Args:
            inner: The backend, for the layers in the plain format.
            layers: The layers as they are stored.
            device: Where their caches lie.
            scratch: Memory for copies.
        """
        super().__init__(layers, device)
        assert layers[0].spec is not None
        self.inner = inner
        self._plain = {layer.name: _as_plain(layer) for layer in layers}
        self._state = layers[0].spec.in_format(PLAIN).state_tensors()
        self._format = layers[0].spec.kv_format
        self._scratch = scratch

    def bind(self, layer: LayerSpec, parameters: Mapping[str, torch.Tensor]) -> None:
        """Pass the layer's learned tensors on to the backend."""
        self.inner.bind(self._plain[layer.name], parameters)

    def make_builder(self) -> CopyingBuilder:
        """Return the backend's builder, inside one that decides which pages are copied."""
        builder = self.inner.make_builder()
        check_declared(AttentionMetadataBuilder, builder)
        return CopyingBuilder(builder, self._plain[self.layers[0].name])

    def attend(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, **keywords: Any
    ) -> torch.Tensor:
        """Copy the pages, and let the backend attend to the copies."""
        copies = self._copied(kv_cache, metadata)
        return self.inner.attend(self._plain[layer.name], query, copies, metadata.built, **keywords)

    def _copied(self, kv_cache: KVCache, metadata: Any) -> KVCache:
        """Return the step's pages, copied into the plain format."""
        assert isinstance(metadata, CopiedMetadata)
        copies = self._scratch.take(self._state, metadata.pages.shape[0], is_static=metadata.is_static)
        self._format.read(kv_cache, metadata.pages, {name: copy[1:] for name, copy in copies.items()})
        return copies


class CopyingBuilder(AttentionMetadataBuilder):
    """Chooses the pages to copy, and lets the backend's own builder build for the copies.

    Copies are numbered in the order of the block table; its page ids do not matter. Two cache groups with the same
    requests then differ only in the pages to copy.
    """

    table_fields = frozenset({"pages"})

    def __init__(self, inner: AttentionMetadataBuilder, layer: LayerSpec) -> None:
        """Wrap a builder.

        Args:
            inner: The backend's builder.
            layer: Any layer of the group, in the plain format.
        """
        assert layer.spec is not None
        self.inner = inner
        self.capture = inner.capture
        self.on_host = None if inner.on_host is None else DEVICE_FIELDS
        self.needs_exact_lens = True
        self.batch_order = inner.batch_order
        self._mask = layer.spec.mask
        self._layer = layer

    @property
    def reuse_key(self) -> Hashable:
        """The key of the backend's own builder, and the mask, which decides what is copied."""
        key = self.inner.reuse_key
        return "copies", self._mask, (self._layer.spec, self._layer.query) if key is None else key

    def build(self, metadata: CommonAttentionMetadata) -> CopiedMetadata:
        """Return the pages to copy, and the backend's own metadata for the copies."""
        (result,) = self.build_together([(self, metadata)])
        return result

    @classmethod
    def build_together(cls, builds: Sequence[tuple[Self, CommonAttentionMetadata]]) -> list[CopiedMetadata]:
        """Let the builders of each class build together, for their copies."""
        indices = [builder._index(metadata) for builder, metadata in builds]
        together: dict[type[AttentionMetadataBuilder], list[int]] = {}
        for number, (builder, _) in enumerate(builds):
            together.setdefault(type(builder.inner), []).append(number)
        results: dict[int, Any] = {}
        for builder_class, numbers in together.items():
            inner = [(builds[number][0].inner, _over_copies(builds[number][1], indices[number])) for number in numbers]
            results.update(zip(numbers, build_all(builder_class, inner), strict=True))
        return [
            CopiedMetadata(
                built=results[number],
                pages=_pages(metadata, index),
                index_cpu=index,
                num_columns=metadata.block_table.shape[1],
                is_static=metadata.static_shapes,
            )
            for number, ((_, metadata), index) in enumerate(zip(builds, indices, strict=True))
        ]

    def finish(self, built: Any) -> CopiedMetadata:
        """Let the backend's builder finish what it built."""
        inner = self.inner.finish(built.built)
        copied: CopiedMetadata = built if inner is built.built else attrs.evolve(built, built=inner)
        return copied

    def refreshed_fields(self, built: Any, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        """Return the pages to copy, read from another block table."""
        index, num_columns = built.index_cpu, metadata.block_table.shape[1]
        if num_columns != built.num_columns:
            row = torch.div(index, built.num_columns, rounding_mode="floor")
            index = index + row * (num_columns - built.num_columns)
        return {"pages": _pages(metadata, index)}

    def _index(self, metadata: CommonAttentionMetadata) -> torch.Tensor:
        """Return ``[num_pages], int64, host``: the indices of the pages to copy in the flattened block table."""
        mask = self._mask
        limits = AttentionMask() if mask is None or not (mask.causal and metadata.causal) else mask
        return torch.from_numpy(
            (static_block_indices if metadata.static_shapes else live_block_indices)(metadata, limits)
        )


def _pages(metadata: CommonAttentionMetadata, index: torch.Tensor) -> torch.Tensor:
    return metadata.block_table.reshape(-1).index_select(0, index.to(metadata.block_table.device, non_blocking=True))


def _over_copies(metadata: CommonAttentionMetadata, index: torch.Tensor) -> CommonAttentionMetadata:
    """Return the step with the block table of the copies, which start after the null page."""
    table = torch.zeros_like(metadata.block_table, memory_format=torch.contiguous_format)
    numbers = torch.arange(1, 1 + index.shape[0], dtype=table.dtype, device=table.device)
    # If a window reaches back to the sinks, their blocks have two copies with the same content.
    table.view(-1).index_copy_(0, index.to(table.device, non_blocking=True), numbers)
    return attrs.evolve(metadata, block_table=table)


def live_block_indices(metadata: CommonAttentionMetadata, mask: AttentionMask) -> IntArray:
    """Return the blocks that a query may see: those of the sinks, and all from the first query's window on.

    Args:
        metadata: The step.
        mask: The mask. If it has no window and no chunk, every block up to the request's end may be seen.

    Returns:
        ``[num_pages], int64, host``: indices in the flattened block table.
    """
    size, num_columns = metadata.block_size, metadata.block_table.shape[1]
    seq_lens = metadata.seq_lens_cpu.numpy().astype(np.int64)
    query_lens = np.diff(metadata.query_start_loc_cpu.numpy())
    first_query = seq_lens - query_lens
    low = np.zeros_like(seq_lens)
    if mask.window is not None:
        low = np.maximum(first_query + 1 - mask.window, 0)
    elif mask.chunk is not None:
        low = first_query - first_query % mask.chunk
    first_block, stop = low // size, np.where(query_lens > 0, -(-seq_lens // size), 0)
    num_sinks = np.minimum(first_block, -(-mask.num_sink_tokens // size))
    counts = np.maximum(stop - first_block, 0) + np.where(query_lens > 0, num_sinks, 0)
    rows = np.repeat(np.arange(len(counts)), counts)
    position = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
    columns = np.where(position < num_sinks[rows], position, position - num_sinks[rows] + first_block[rows])
    index: IntArray = rows * num_columns + columns
    return index


def static_block_indices(metadata: CommonAttentionMetadata, mask: AttentionMask) -> IntArray:
    """Return as many blocks as any batch of a graph needs: all blocks, or the most that a window reaches.

    Args:
        metadata: The step, at a graph's sizes.
        mask: As for ``live_block_indices``.

    Returns:
        ``[num_pages], int64, host``.
    """
    (num_rows, num_columns), size = metadata.block_table.shape, metadata.block_size
    starts = np.arange(num_rows, dtype=np.int64)[:, None] * num_columns
    num_sinks = -(-mask.num_sink_tokens // size)
    reach = metadata.max_query_len + (mask.window or mask.chunk or 0)
    num_reached = reach // size + 2
    if (mask.window is None and mask.chunk is None) or num_sinks + num_reached >= num_columns:
        every: IntArray = (starts + np.arange(num_columns)).ravel()
        return every
    first_query = metadata.seq_lens_cpu.numpy() - np.diff(metadata.query_start_loc_cpu.numpy())
    if mask.window is not None:
        low = np.maximum(first_query + 1 - mask.window, 0)
    else:
        low = first_query - first_query % (mask.chunk or 1)
    first_block = np.clip(low // size, 0, num_columns - num_reached)
    reached = first_block[:, None] + np.arange(num_reached)
    sinks = np.broadcast_to(np.arange(num_sinks), (num_rows, num_sinks))
    index: IntArray = (starts + np.concatenate([sinks, reached], axis=1)).ravel()
    return index
