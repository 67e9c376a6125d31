"""Divides a chunk, which is one request with several queries, into tiles: some queries and the tokens that they see."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from kvframe.contract.specs import LayerSpec
from kvframe_torch.builder import Chunk
from kvframe_torch.spans import NO_WINDOW

MAX_ROWS = 256
"""Queries of a tile, times the query heads of a KV head: the rows of its mask."""

MAX_BIAS_ROWS = 2048
"""Queries of a tile, times all query heads, with a learned bias: it differs from head to head."""

LEAST_PROMPT = 1024
"""Tokens of a whole prompt for which a CPU takes longer with masks than to compute what a causal mask hides."""


class Tile(NamedTuple):
    """Consecutive queries of a chunk, and the runs of tokens that at least one of them sees: one, or two with sinks.

    Attributes:
        first: The first of the chunk's queries.
        stop: The query after the last one.
        position: The first query's position in the request; without meaning if the keys are of another sequence.
        runs: The position of the first token of each run, and of the token after the last one.
        num_sinks: Sink tokens, which come first: the window does not hide them.
    """

    first: int
    stop: int
    position: int
    runs: tuple[tuple[int, int], ...]
    num_sinks: int

    def cut(self, gathered: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """Return the keys or values of the runs of all that was gathered for the chunk, ``[1, num_kv_heads, …]``."""
        runs = [
            gathered.narrow(2, begin - shift, end - begin)
            for (begin, end), shift in zip(reversed(self.runs), (chunk.shift, chunk.sink_shift), strict=False)
        ]
        return runs[0] if len(runs) == 1 else torch.cat(runs[::-1], dim=2)

    def distances(self, device: torch.device) -> torch.Tensor:
        """Return the position of each token less that of each query, ``[num_queries, num_keys], int64, device``."""
        keys = torch.cat([torch.arange(*run, device=device) for run in self.runs])
        return keys - torch.arange(self.position, self.position + self.stop - self.first, device=device)[:, None]


class ChunkMasks:
    """Says which tokens the queries of chunks see, for the layers of a group."""

    def __init__(self, layer: LayerSpec, device: torch.device) -> None:
        """Take what the layers have in common.

        Args:
            layer: Any of them.
            device: Where they run.
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
        # Of each dtype, the mask of ``max_queries`` queries over tokens up to the last query.
        self._bands: dict[torch.dtype, torch.Tensor] = {}

    def is_prompt(self, chunk: Chunk) -> bool:
        """Return whether a causal chunk is a whole prompt that is computed at once, by torch's own causal attention."""
        return self._least_prompt <= chunk.num_queries == chunk.stop <= self._window

    def tiles(self, chunk: Chunk, causal: bool, at_once: bool) -> Iterator[Tile]:
        """Yield the tiles of a chunk, or the whole.

        Args:
            chunk: The chunk.
            causal: Whether queries see only their own and earlier positions.
            at_once: Whether there is one tile.
        """
        size = chunk.num_queries if at_once else self._max_queries
        for first in range(0, chunk.num_queries, size):
            stop = min(first + size, chunk.num_queries)
            position, begin, end = chunk.position + first, chunk.start, chunk.stop
            if causal:
                begin, end = max(position + 1 - self._window, begin), chunk.position + stop
            num_sinks = max(0, min(chunk.sink_stop, end) - chunk.start)
            runs: tuple[tuple[int, int], ...] = ((begin, end),)
            if num_sinks:
                is_one_run = begin <= chunk.sink_stop
                runs = ((chunk.start, end),) if is_one_run else ((chunk.start, chunk.sink_stop), (begin, end))
            yield Tile(first, stop, position, runs, num_sinks)

    def mask(self, tile: Tile, dtype: torch.dtype) -> torch.Tensor:
        """Return what is added to the scores of a causal tile, ``[num_queries * group_size, num_keys], device``.

        Its rows are the query heads of a KV head for one query after the other. Without sink tokens, it depends only on
        how far a token is from the query. So it is part of one matrix, which is kept for all chunks to come.
        """
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
        # Other devices read masks in steps of 16 bytes.
        return mask if self._device.type == "cpu" else mask.contiguous()

    def _values(self, distances: torch.Tensor, num_sinks: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a mask, given the position of each token less that of each query."""
        hidden = distances > 0
        hidden[:, num_sinks:] |= distances[:, num_sinks:] <= -self._window
        values = torch.zeros_like(distances, dtype=dtype).masked_fill_(hidden, -math.inf)
        return values.repeat_interleave(self._group_size, dim=0)
