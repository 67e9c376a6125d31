"""Build the torch backend's metadata: the pages that a step gathers, and what each query sees of them."""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import attrs
import numpy as np
import torch

from kvframe.contract.backend import AttentionMetadataBuilder
from kvframe.contract.metadata import NUM_PROMPT_TOKENS, RANGE_ENDS, SEQ_STARTS, CommonAttentionMetadata
from kvframe.contract.relative_bias import bias_columns
from kvframe.contract.specs import LayerSpec
from kvframe_torch.tiles import IntArray, Queries, Rules, Tiles, batch_edges, ranges

MAX_KEPT_PAIRS = 1 << 23
"""Up to so many pairs of a query and a key, a step's masks are kept from layer to layer."""


class Batch(NamedTuple):
    """Tiles that one call computes.

    Attributes:
        num_tiles: The number of tiles.
        num_queries: The queries of each tile.
        num_keys: The gathered tokens of each tile.
        rows: ``[num_tiles * num_queries], int64, device``: the packed token of each query.
        dead: ``[num_dead], int64, device``: the gathered tokens that no query of their tile sees. They may be NaN.
        runs: The part of ``TorchMetadata.runs`` of these queries.
        positions: The part of ``TorchMetadata.positions``; None without a learned bias.
        masks: By dtype, the masks that earlier layers made.
        keeps_masks: Whether later layers use a mask.
    """

    num_tiles: int
    num_queries: int
    num_keys: int
    rows: torch.Tensor
    dead: torch.Tensor
    runs: torch.Tensor
    positions: torch.Tensor | None
    masks: dict[torch.dtype, torch.Tensor]
    keeps_masks: bool

    def mask(self, dtype: torch.dtype) -> torch.Tensor:
        """Return what is added to the scores: ``[num_tiles, 1, num_queries, num_keys]``, 0 or -inf."""
        if dtype in self.masks:
            return self.masks[dtype]
        keys, (low, stop, *sinks) = self._keys(), self._of_queries(self.runs)
        hidden = (keys < low).logical_or_(keys >= stop)
        if sinks:
            hidden &= (keys < sinks[0]).logical_or_(keys >= sinks[1])
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -math.inf)
        if self.keeps_masks:
            self.masks[dtype] = mask
        return mask

    def learned_bias(self, table: torch.Tensor) -> torch.Tensor:
        """Return a learned bias, ``[num_tiles, num_heads, num_queries, num_keys]``, in the dtype of its table.

        Args:
            table: What ``bias_by_distance`` returned.
        """
        assert self.positions is not None
        keys, (position, *among_sinks, sink_stop) = self._keys(), self._of_queries(self.positions)
        if among_sinks:
            position = torch.where(keys < sink_stop, among_sinks[0], position)
        distances = keys - position
        values = table.index_select(1, bias_columns(distances, table.shape[1] // 2).view(-1))
        return values.view(-1, *distances.shape[:1], *distances.shape[2:]).transpose(0, 1)

    def _keys(self) -> torch.Tensor:
        return torch.arange(self.num_keys, dtype=torch.int32, device=self.runs.device)

    def _of_queries(self, numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return each row of numbers, ``[num_tiles, 1, num_queries, 1]``."""
        return numbers.view(-1, self.num_tiles, 1, self.num_queries, 1).unbind()


@attrs.frozen(eq=False)
class TorchMetadata:
    """The metadata that the layers of an attention group read in a step.

    Attributes:
        sizes: For each batch, the number of its tiles, the queries and the pages of each tile, and its dead tokens.
        block_size: Tokens per page.
        pages: ``[num_pages], int32, device``: the block ids to gather, batch after batch.
        rows: ``[num_queries], int64, device``: the packed token of each query, batch after batch.
        dead: ``[num_dead], int64, device``: the tokens, counted in their batch, that no query of their tile sees.
        runs: ``[2 or 4, num_queries], int32, device``: the first token that each query sees and the token after the
            last one, counted among the gathered tokens of its tile; then the same of sink tokens, if there are any.
        positions: ``[2 or 3, num_queries], int32, device``: the position of each query, counted like the tokens of its
            window; if there are sink tokens, also counted like these; and the token after the pages of these. None
            without a learned bias.
        places_cpu: ``[num_pages], int32, host``: the places of ``pages`` in the flattened block table.
        table_stride: The distance between rows of that table.
        cut: What ``batches`` returns, once it was called. Groups that differ in their block tables alone share it.
    """

    sizes: tuple[tuple[int, int, int, int], ...]
    block_size: int
    pages: torch.Tensor
    rows: torch.Tensor
    dead: torch.Tensor
    runs: torch.Tensor
    positions: torch.Tensor | None
    places_cpu: torch.Tensor
    table_stride: int
    cut: list[Batch] = attrs.Factory(list)

    def batches(self) -> list[Batch]:
        """Return the parts of the tensors that each call reads; the first layer cuts them."""
        if not self.cut and self.sizes:
            num_tiles, num_queries, num_pages, num_dead = zip(*self.sizes, strict=True)
            num_rows = [*map(operator.mul, num_tiles, num_queries)]
            num_keys = [each * self.block_size for each in num_pages]
            is_kept = [sum(map(operator.mul, num_rows, num_keys)) <= MAX_KEPT_PAIRS] * len(num_rows)
            of_rows = self.rows.split(num_rows), self.dead.split(num_dead), self.runs.split(num_rows, dim=1)
            positions = [None] * len(num_rows) if self.positions is None else self.positions.split(num_rows, dim=1)
            masks: list[dict[torch.dtype, torch.Tensor]] = [{} for _ in num_rows]
            self.cut.extend(map(Batch, num_tiles, num_queries, num_keys, *of_rows, positions, masks, is_kept))
        return self.cut


class TorchMetadataBuilder(AttentionMetadataBuilder):
    """Divides a step into batches, on the host."""

    on_host = frozenset({"block_table"})
    table_fields = frozenset({"pages"})

    def __init__(self, layer: LayerSpec, device: torch.device) -> None:
        """Read the rules from any layer of the group; all have the same."""
        self._rules = Rules.of(layer, device)

    @property
    def reuse_key(self) -> Hashable:
        """The values that decide what is gathered and seen."""
        return self._rules

    @classmethod
    def build_together(cls, builds: Sequence[tuple[Self, CommonAttentionMetadata]]) -> list[TorchMetadata]:
        """Return the metadata of all groups. Groups that differ in their block tables alone share all other fields.

        A window that no request of the step has reached counts as no window.
        """
        known: dict[Hashable, TorchMetadata] = {}
        found = []
        for builder, step in builds:
            extensions = (step.extensions.get(name) for name in (SEQ_STARTS, NUM_PROMPT_TOKENS, RANGE_ENDS))
            values = (step.query_start_loc_cpu, step.seq_lens_cpu, *extensions)
            key = builder._rules.reached(step), step.block_size, *map(id, values)
            if key in known:
                found.append(attrs.evolve(known[key], **builder.refreshed_fields(known[key], step)))
            else:
                found.append(known.setdefault(key, builder.build(step)))
        return found

    def build(self, metadata: CommonAttentionMetadata) -> TorchMetadata:
        """Return the step's batches."""
        rules, size = self._rules.reached(metadata), metadata.block_size
        queries = Queries.of(metadata, rules)
        tiles = Tiles.of(queries, size, rules.max_queries)
        edges = batch_edges(tiles.num_queries, tiles.num_pages, size, rules)
        of_batch, num_tiles = edges[:-1], edges[1:] - edges[:-1]
        widths = tiles.num_pages[of_batch].repeat(num_tiles)
        offsets = (np.arange(len(widths)) - of_batch.repeat(num_tiles)) * widths
        dead, num_dead = tiles.dead(widths, offsets, size)
        sizes = num_tiles, tiles.num_queries[of_batch], tiles.num_pages[of_batch], np.add.reduceat(num_dead, of_batch)
        table, stride = _flat(metadata.block_table)
        places_cpu = torch.from_numpy(tiles.places(queries.request[tiles.first] * stride, widths))

        rows = ranges(tiles.first, tiles.num_queries)
        shifts, positions = (tiles.skipped * size).repeat(tiles.num_queries, axis=1), None
        if rules.max_distance is not None:
            sinks = (tiles.num_sinks * size).repeat(tiles.num_queries)
            positions = _int32(np.array([*(queries.position[rows] - shifts), sinks]))
        return TorchMetadata(
            sizes=tuple(zip(*(each.tolist() for each in sizes), strict=True)),
            block_size=size,
            pages=table.index_select(0, places_cpu),
            rows=torch.from_numpy(rows),
            dead=torch.from_numpy(dead),
            runs=_int32(queries.runs[:, rows] - shifts.repeat(2, axis=0)),
            positions=positions,
            places_cpu=places_cpu,
            table_stride=stride,
        )

    def refreshed_fields(self, built: Any, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        """Return the block ids of another block table."""
        (table, stride), places = _flat(metadata.block_table), built.places_cpu
        if stride != built.table_stride:
            places = places + places // built.table_stride * (stride - built.table_stride)
        return {"pages": table.index_select(0, places)}


def _flat(table: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return a flat view of a block table, which may be a part of a wider one, and the distance between its rows."""
    (num_rows, num_columns), stride = table.shape, table.stride(0)
    if table.stride(1) == 1 and stride > num_columns > 0:
        return table.as_strided(((num_rows - 1) * stride + num_columns,), (1,)), stride
    return table.reshape(-1), num_columns


def _int32(numbers: IntArray) -> torch.Tensor:
    return torch.from_numpy(numbers.astype(np.int32))
