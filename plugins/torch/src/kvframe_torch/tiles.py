"""Divide a chunk, one request with several queries, into tiles: some queries and the tokens that they see."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from kvframe.contract.specs import LayerSpec
from kvframe_torch.builder import Chunk
from kvframe_torch.spans import NO_WINDOW

MAX_ROWS = 256
"""The most rows of a tile's mask: its queries times the query heads of a KV head."""

MAX_BIAS_ROWS = 2048
"""The most rows of a tile's learned bias: its queries times all query heads, because each head has its own bias."""

LEAST_PROMPT = 1024
"""From so many tokens on, a CPU computes a whole prompt by torch's causal attention faster than by masks."""


class Tile(NamedTuple):
    """Consecutive queries of a chunk, and the runs of tokens that they see: one run, or two with sink tokens.

    Attributes:
        first: The index of its first query in the chunk.
        stop: The index after that of its last query.
        position: The first query's position in the request; meaningless if the keys are of another sequence.
        runs: For each run, the position of its first token, and the position after its last token.
        num_sinks: The number of sink tokens at the start, which the window does not hide.
        has_ranges: Whether a query sees later tokens, up to the end of a range.
    """

    first: int
    stop: int
    position: int
    runs: tuple[tuple[int, int], ...]
    num_sinks: int
    has_ranges: bool = False

    def cut(self, gathered: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """Return the keys or values of the tile's runs from those gathered for the chunk, ``[1, num_kv_heads, …]``."""
        runs = [
            gathered.narrow(2, begin - shift, end - begin)
            for (begin, end), shift in zip(reversed(self.runs), (chunk.shift, chunk.sink_shift), strict=False)
        ]
        return runs[0] if len(runs) == 1 else torch.cat(runs[::-1], dim=2)

    def distances(self, device: torch.device) -> torch.Tensor:
        """Return the position of each token minus that of each query, ``[num_queries, num_keys], int64, device``."""
        keys = torch.cat([torch.arange(*run, device=device) for run in self.runs])
        return keys - torch.arange(self.position, self.position + self.stop - self.first, device=device)[:, None]


class ChunkMasks:
    """Makes the tiles of chunks and their masks, for the layers of a group."""

    def __init__(self, layer: LayerSpec, device: torch.device) -> None:
        """Read the mask from one layer.

        Args:
            layer: Any layer of the group; all have the same mask.
            device: The layers' device.
        """
        assert layer.spec is not None
        assert layer.query is not None
        mask, num_heads = layer.spec.mask, layer.query.num_heads
        assert mask is not None
        self._device, self._group_size = device, num_heads // layer.spec.state_tensors()["k"].shape[1]
        self._window = NO_WINDOW if mask.window is None else mask.window
        self._least_prompt = LEAST_PROMPT if device.type == "cpu" else 2
        max_queries = MAX_ROWS // self._group_size
        if layer.query.relative_bias is not None:
            self._least_prompt, max_queries = NO_WINDOW, min(max_queries, MAX_BIAS_ROWS // num_heads)
        self._max_queries = max(1, max_queries)
        # By dtype, the mask of ``max_queries`` queries over the tokens up to the last query.
        self._bands: dict[torch.dtype, torch.Tensor] = {}

    def is_prompt(self, chunk: Chunk) -> bool:
        """Return whether torch's own causal attention computes a causal chunk at once; it must be a whole prompt."""
        return self._least_prompt <= chunk.num_queries == chunk.stop <= self._window

    def tiles(
        self, chunk: Chunk, causal: bool, at_once: bool, range_ends: tuple[int, ...] | None = None
    ) -> Iterator[Tile]:
        """Yield the tiles of a chunk.

        Args:
            chunk: The chunk.
            causal: Whether queries see only their own and earlier positions.
            at_once: Whether the whole chunk is one tile.
            range_ends: For each packed token, where the range ends whose later tokens it sees; None for no ranges.
        """
        size = chunk.num_queries if at_once else self._max_queries
        for first in range(0, chunk.num_queries, size):
            stop = min(first + size, chunk.num_queries)
            position, begin, end = chunk.position + first, chunk.start, chunk.stop
            if causal:
                begin, end = max(position + 1 - self._window, begin), chunk.position + stop
            last_end = 0
            if causal and range_ends is not None:
                last_end = max(range_ends[chunk.first_row + first : chunk.first_row + stop])
                end = max(end, last_end)
            num_sinks = max(0, min(chunk.sink_stop, end) - chunk.start)
            runs: tuple[tuple[int, int], ...] = ((begin, end),)
            if num_sinks:
                is_one_run = begin <= chunk.sink_stop
                runs = ((chunk.start, end),) if is_one_run else ((chunk.start, chunk.sink_stop), (begin, end))
            yield Tile(first, stop, position, runs, num_sinks, last_end > 0)

    def mask(self, tile: Tile, dtype: torch.dtype, range_ends: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mask of a causal tile, which is added to its scores: ``[num_queries * group_size, num_keys]``.

        Its rows are the query heads of a KV head, query after query. Without sink tokens, a value depends only on the
        distance between token and query, so the mask is a part of one matrix that is kept for later chunks.

        Args:
            tile: The tile.
            dtype: The type of the scores.
            range_ends: ``[num_queries], int64, device``: where the range of each query ends; None for no ranges.
        """
        if range_ends is not None and tile.has_ranges:
            queries = torch.arange(tile.position, tile.position + len(range_ends), device=self._device)
            return self._values(tile.distances(self._device), tile.num_sinks, dtype, range_ends - queries)
        if tile.num_sinks:
            return self._values(tile.distances(self._device), tile.num_sinks, dtype)
        num_rows = (tile.stop - tile.first) * self._group_size
        before, band = tile.position - tile.runs[0][0], self._bands.get(dtype)
        if band is None or band.shape[1] < before + self._max_queries:
            queries = torch.arange(self._max_queries, device=self._device)
            tokens = torch.arange(-2 * before, self._max_queries, device=self._device)
            band = self._bands[dtype] = self._values(tokens - queries[:, None], 0, dtype)
        first = band.shape[1] - self._max_queries - before
        mask = band[:num_rows, first : first + before + tile.stop - tile.first]
        # Other devices need rows that begin at multiples of 16 bytes.
        return mask if self._device.type == "cpu" else mask.contiguous()

    def _values(
        self, distances: torch.Tensor, num_sinks: int, dtype: torch.dtype, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the mask for distances: the position of each token, and of each end of a range, minus the query's."""
        hidden = distances > 0
        if ends is not None:
            hidden &= distances >= ends[:, None]
        hidden[:, num_sinks:] |= distances[:, num_sinks:] <= -self._window
        values = torch.zeros_like(distances, dtype=dtype).masked_fill_(hidden, -math.inf)
        return values.repeat_interleave(self._group_size, dim=0)
