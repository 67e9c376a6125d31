"""The backend ``torch``: it gathers pages and calls torch's own attention, on any device of torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch

from kvframe.contract.backend import AttentionBackend, KVCache
from kvframe.contract.capabilities import Capabilities
from kvframe.contract.merging import lse_dtype
from kvframe.contract.metadata import NUM_PROMPT_TOKENS, RANGE_ENDS, SEQ_STARTS
from kvframe.contract.relative_bias import bias_columns
from kvframe.contract.specs import LayerSpec
from kvframe_torch.attend import Part, attend, attend_by_scores, folded, score_dtype
from kvframe_torch.builder import TorchMetadata, TorchMetadataBuilder
from kvframe_torch.tiles import ChunkMasks

MAX_SCRATCH_ELEMENTS = 1 << 24
"""Up to so many elements, the memory of gathered tokens is kept for the next call."""


class Scratch:
    """Memory for gathered tokens that calls reuse, because the system takes long to map new memory.

    Invariant: only the last tensor that ``take`` returned is in use.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor in the reused memory; a large tensor gets memory of its own."""
        num_elements = math.prod(shape)
        if num_elements > MAX_SCRATCH_ELEMENTS:
            return torch.empty(shape, dtype=dtype, device=device)
        buffer = self._buffer
        if buffer.shape[0] < num_elements or buffer.dtype != dtype:
            # A tensor made outside of inference mode can be written to in both modes.
            with torch.inference_mode(False):
                buffer = self._buffer = torch.empty(num_elements, dtype=dtype, device=device)
        return buffer[:num_elements].view(shape)


class TorchBackend(AttentionBackend):
    """Serves causal, bidirectional and windowed attention, soft caps, sink tokens, learned sinks and learned biases."""

    capabilities = Capabilities(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({"float64", "float32", "float16", "bfloat16"}),
        masks=frozenset({"causal", "bidirectional", "window", "sink_tokens", "prompt", "ranges"}),
        extensions=frozenset({SEQ_STARTS, NUM_PROMPT_TOKENS, RANGE_ENDS}),
        soft_cap=True,
        sinks=True,
        relative_bias=True,
        separate_value_size=True,
        takes_copies=True,
        returns_lse=True,
    )

    def __init__(self, layers: Sequence[LayerSpec], device: torch.device) -> None:
        super().__init__(layers, device)
        self._masks = ChunkMasks(layers[0], device)
        self._scratch = {"k": Scratch(), "v": Scratch()}

    def make_builder(self) -> TorchMetadataBuilder:
        """Return the builder that divides a step into batches and chunks."""
        return TorchMetadataBuilder(self.layers[0], self.device)

    def forward(
        self,
        layer: LayerSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        metadata: Any,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the batches one after the other, then the chunks."""
        return self._forward(layer, query, kv_cache, metadata, sinks, out, None)

    def forward_with_lse(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, sinks: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the output by scores, because torch's own attention returns no log-sum-exp."""
        lse = query.new_full(query.shape[:2], -math.inf, dtype=lse_dtype(query.dtype))
        if sinks is not None:
            # No batch contains a request without keys; only its sink counts.
            lse.copy_(sinks.expand_as(lse))
        return self._forward(layer, query, kv_cache, metadata, sinks, None, lse), lse

    def _forward(
        self,
        layer: LayerSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        metadata: Any,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the output. Write the log-sum-exp to ``lse: [num_tokens, num_heads]`` unless it is None."""
        assert isinstance(metadata, TorchMetadata)
        assert layer.query is not None
        by_scores = lse is not None or sinks is not None or layer.query.soft_cap is not None
        output = query.new_zeros(*query.shape[:2], kv_cache["v"].shape[-1]) if out is None else out.zero_()
        inputs = layer, query, kv_cache, metadata
        for part in chain(self._batches(*inputs), self._tiles(*inputs, by_scores)):
            if by_scores:
                result, of_rows = attend_by_scores(part, layer.query, sinks)
                if lse is not None:
                    lse[part.rows] = of_rows
            else:
                result = attend(part, layer.query.scale)
            output[part.rows] = result
        return output

    def _batches(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: TorchMetadata
    ) -> Iterator[Part]:
        """Gather one batch after the other and yield it; its requests have one query each."""
        block_size = metadata.block_size
        for batch in metadata.batches:
            num_pages = batch.num_requests * batch.num_pages
            pages = metadata.pages[batch.first_page : batch.first_page + num_pages]
            first_token = batch.first_page * block_size
            hidden = metadata.hidden[batch.first_hidden : batch.first_hidden + batch.num_hidden]
            dead = hidden - first_token if first_token else hidden
            key, value = (self._gather(kv_cache, name, pages, dead, batch.num_requests) for name in "kv")
            tokens, bias = slice(first_token, first_token + num_pages * block_size), None
            if metadata.mask is not None:
                bias = metadata.mask[tokens].view(batch.num_requests, 1, 1, -1).to(query.dtype)
            if metadata.bias_columns is not None:
                columns = metadata.bias_columns[tokens].view(batch.num_requests, 1, -1)
                bias = self._learned_bias(layer, columns, key.shape[1], query.dtype, bias)
            rows = metadata.rows[batch.first_row : batch.first_row + batch.num_requests]
            of_rows = query.index_select(0, rows).unsqueeze(1)
            yield Part(rows, of_rows, key.to(query.dtype), value.to(query.dtype), bias)

    def _tiles(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: TorchMetadata, by_scores: bool
    ) -> Iterator[Part]:
        """Gather one chunk after the other and yield its tiles."""
        assert layer.query is not None
        dtype = score_dtype(query.dtype) if by_scores else query.dtype
        for chunk in metadata.chunks:
            pages = metadata.pages[chunk.first_page : chunk.first_page + chunk.num_pages]
            keys, values = (self._gather(kv_cache, name, pages, None, 1).to(dtype) for name in "kv")
            ends = metadata.range_ends_cpu
            is_prompt = metadata.causal and not by_scores and ends is None and self._masks.is_prompt(chunk)
            for tile in self._masks.tiles(chunk, metadata.causal, is_prompt, ends):
                rows = slice(chunk.first_row + tile.first, chunk.first_row + tile.stop)
                bias = None
                if metadata.causal and not is_prompt:
                    of_rows = None if metadata.range_ends is None else metadata.range_ends[rows]
                    bias = self._masks.mask(tile, dtype, of_rows)
                if layer.query.relative_bias is not None:
                    columns = bias_columns(tile.distances(query.device), layer.query.relative_bias.max_distance)
                    bias = self._learned_bias(layer, columns.unsqueeze(0), keys.shape[1], dtype, bias)
                key, value = tile.cut(keys, chunk), tile.cut(values, chunk)
                yield Part(rows, query[rows].unsqueeze(0), key, value, bias, is_prompt)

    def _gather(
        self, kv_cache: KVCache, name: str, pages: torch.Tensor, dead: torch.Tensor | None, num_requests: int
    ) -> torch.Tensor:
        """Gather the keys or values of pages; return a strided view, ``[num_requests, num_kv_heads, num_keys, size]``.

        Args:
            kv_cache: The layer's state tensors.
            name: ``k`` or ``v``.
            pages: ``[num_pages], device``: the block ids.
            dead: The gathered tokens that are set to 0, because their values may be NaN; None for none.
            num_requests: The number of requests that the pages belong to.
        """
        state = kv_cache[name]
        gathered = self._scratch[name].take((pages.shape[0], *state.shape[1:]), state.dtype, state.device)
        torch.index_select(state, 0, pages, out=gathered)
        if dead is not None:
            gathered.view(-1, *state.shape[2:]).index_fill_(0, dead, 0)
        return gathered.view(num_requests, -1, *state.shape[2:]).transpose(1, 2)

    def _learned_bias(
        self,
        layer: LayerSpec,
        columns: torch.Tensor,
        num_kv_heads: int,
        dtype: torch.dtype,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return a layer's learned bias for ``columns: [num_requests, num_queries, num_keys]``, plus a mask."""
        values = self.bias_tables[layer.name].index_select(1, columns.view(-1)).to(dtype)
        bias = folded(values.view(-1, *columns.shape).permute(1, 2, 0, 3), num_kv_heads)
        return bias if mask is None else bias + mask
