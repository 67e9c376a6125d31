"""Build the torch backend's metadata: the pages that a step gathers, and what each query sees of them."""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Self

import attrs
import numpy as np
import torch

from kvframe.contract.backend import AttentionMetadataBuilder
from kvframe.contract.metadata import RANGE_ENDS, SEQ_STARTS, CommonAttentionMetadata
from kvframe.contract.relative_bias import bias_columns
from kvframe.contract.specs import LayerSpec
from kvframe_torch.tiles import IntArray, Rules, Spans, batch_edges, ranges

MAX_KEPT_PAIRS = 1 << 23
"""Up to so many pairs of a query and a key, a step's masks are kept from layer to layer."""


class Batch(NamedTuple):
    """Tiles that one call computes. A *tile* is some consecutive queries of one request.

    A request with many queries is divided into several tiles; its pages are gathered once, for the first of them.

    Attributes:
        num_tiles: The number of tiles.
        num_queries: The queries of each tile.
        num_pages: The pages to gather for each tile; 0 to read those of the batch before this one.
        num_keys: The gathered tokens that each tile reads.
        num_sinks: How many of these come first, before tokens that the tile does not read.
        num_unread: The number of tokens that the tile does not read.
        num_open: How many of the tokens that it reads come before any that some query does not see.
        rows: ``[num_tiles * num_queries], int64, device``: the packed token of each query.
        dead: ``[num_dead], int64, device``: the gathered tokens that no query of their request sees. They may be NaN.
        runs: The part of ``TorchMetadata.runs`` of these queries.
        positions: The part of ``TorchMetadata.positions``; None without a bias by distance.
        masks: By dtype, the masks that earlier layers made.
        keeps_masks: Whether later layers use a mask.
    """

    num_tiles: int
    num_queries: int
    num_pages: int
    num_keys: int
    num_sinks: int
    num_unread: int
    num_open: int
    rows: torch.Tensor
    dead: torch.Tensor
    runs: torch.Tensor
    positions: torch.Tensor | None
    masks: dict[torch.dtype, torch.Tensor]
    keeps_masks: bool

    def read(self, gathered: torch.Tensor) -> torch.Tensor:
        """Return the part of gathered keys or values, ``[num_tiles, num_kv_heads, …, size]``, that the tiles read."""
        sinks, stop = self.num_sinks, self.num_unread + self.num_keys
        if not sinks or not self.num_unread:
            return gathered[:, :, self.num_unread : stop]
        return torch.cat((gathered[:, :, :sinks], gathered[:, :, sinks + self.num_unread : stop]), dim=2)

    def mask(self, dtype: torch.dtype) -> torch.Tensor:
        """Return what is added to the scores: ``[num_tiles, 1, num_queries, num_keys]``, 0 or -inf."""
        if dtype in self.masks:
            return self.masks[dtype]
        keys, (low, stop, *sinks) = self._keys()[self.num_open :], self._of_queries(self.runs)
        hidden = (keys < low).logical_or_(keys >= stop)
        if sinks:
            hidden &= (keys < sinks[0]).logical_or_(keys >= sinks[1])
        mask = torch.zeros(*hidden.shape[:3], self.num_keys, dtype=dtype, device=hidden.device)
        mask[..., self.num_open :].masked_fill_(hidden, -math.inf)
        if self.keeps_masks:
            self.masks[dtype] = mask
        return mask

    def learned_bias(self, table: torch.Tensor) -> torch.Tensor:
        """Return a learned bias, ``[num_tiles, num_heads, num_queries, num_keys]``, in the dtype of its table.

        Args:
            table: What ``bias_by_distance`` returned.
        """
        distances = self._distances()
        values = table.index_select(1, bias_columns(distances, table.shape[1] // 2).view(-1))
        return values.view(-1, *distances.shape[:1], *distances.shape[2:]).transpose(0, 1)

    def alibi_bias(self, slopes: torch.Tensor) -> torch.Tensor:
        """Return the bias of ALiBi, ``[num_tiles, num_heads, num_queries, num_keys]``, in the dtype of the slopes.

        Args:
            slopes: ``[num_heads], device``.
        """
        return self._distances().abs() * -slopes[:, None, None]

    def _distances(self) -> torch.Tensor:
        """Return the distance of each key from each query, ``[num_tiles, 1, num_queries, num_keys]``."""
        assert self.positions is not None
        keys, (position, *among_sinks, sink_stop) = self._keys(), self._of_queries(self.positions)
        if among_sinks:
            position = torch.where(keys < sink_stop, among_sinks[0], position)
        return keys - position

    def _keys(self) -> torch.Tensor:
        return torch.arange(self.num_keys, dtype=torch.int32, device=self.runs.device)

    def _of_queries(self, numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return each row of numbers, ``[num_tiles, 1, num_queries, 1]``."""
        return numbers.view(-1, self.num_tiles, 1, self.num_queries, 1).unbind()


@attrs.frozen(eq=False)
class TorchMetadata:
    """The metadata that the layers of an attention group read in a step.

    Attributes:
        sizes: For each batch, the first seven fields of ``Batch``, and the number of its dead tokens.
        block_size: Tokens per page.
        pages: ``[num_pages], int32, device``: the block ids to gather, batch after batch.
        rows: ``[num_queries], int64, device``: the packed token of each query, batch after batch.
        dead: ``[num_dead], int64, device``: the gathered tokens, counted in their batch, that no query of their
            request sees.
        runs: ``[2 or 4, num_queries], int32, device``: the first token that each query sees and the token after the
            last one, counted among the tokens that its tile reads; then the same of sink tokens, if there are any.
        positions: ``[2 or 3, num_queries], int32, device``: the position of each query, counted like the tokens of its
            window; if there may be sink tokens, also counted like these; and where the window's tokens begin. None
            without a bias by distance.
        places_cpu: ``[num_pages], int32, host``: the places of ``pages`` in the flattened block table.
        table_stride: The distance between rows of that table.
        cut: What ``batches`` returns, once it was called. Groups that differ in their block tables alone share it.
    """

    sizes: tuple[tuple[int, ...], ...]
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
            *of_batch, num_dead = zip(*self.sizes, strict=True)
            num_tiles, num_queries, _, num_keys, *_ = of_batch
            num_rows = [*map(operator.mul, num_tiles, num_queries)]
            is_kept = [sum(map(operator.mul, num_rows, num_keys)) <= MAX_KEPT_PAIRS] * len(num_rows)
            of_rows = self.rows.split(num_rows), self.dead.split(num_dead), self.runs.split(num_rows, dim=1)
            positions = [None] * len(num_rows) if self.positions is None else self.positions.split(num_rows, dim=1)
            masks: list[dict[torch.dtype, torch.Tensor]] = [{} for _ in num_rows]
            self.cut.extend(map(Batch, *of_batch, *of_rows, positions, masks, is_kept))
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
        alike: dict[Hashable, dict[Rules, list[int]]] = {}
        for index, (builder, step) in enumerate(builds):
            extensions = (step.extensions.get(name) for name in (SEQ_STARTS, RANGE_ENDS))
            values = map(id, (step.query_start_loc_cpu, step.seq_lens_cpu, *extensions))
            rules = builder._rules.reached(step)
            key = rules.alike, step.block_size, _flat(step.block_table)[1], *values
            alike.setdefault(key, {}).setdefault(rules, []).append(index)
        found: dict[int, TorchMetadata] = {}
        for groups in alike.values():
            step = builds[min(min(groups.values()))][1]
            for fields, indices in zip(divide(step, [*groups]), groups.values(), strict=True):
                for index in indices:
                    table, stride = _flat(builds[index][1].block_table)
                    pages = table.index_select(0, fields["places_cpu"])
                    found[index] = TorchMetadata(block_size=step.block_size, pages=pages, table_stride=stride, **fields)
        return [found[index] for index in range(len(builds))]

    def build(self, metadata: CommonAttentionMetadata) -> TorchMetadata:
        """Return the step's batches."""
        (built,) = self.build_together([(self, metadata)])
        return built

    def refreshed_fields(self, built: Any, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        """Return the block ids of another block table."""
        (table, stride), places = _flat(metadata.block_table), built.places_cpu
        if stride != built.table_stride:
            places = places + places // built.table_stride * (stride - built.table_stride)
        return {"pages": table.index_select(0, places)}


def divide(step: CommonAttentionMetadata, rules: Sequence[Rules]) -> list[dict[str, Any]]:
    """Return the fields of each group's ``TorchMetadata`` that do not depend on the blocks of its block table.

    Args:
        step: The step of any group; all have the same lengths and block size, and equally wide block tables.
        rules: The groups' rules, which are ``alike``.
    """
    spans, size = Spans.of(step, rules), step.block_size
    edges = batch_edges(spans.num_queries, spans.num_pages, size, rules)
    of_batch, num_spans = edges[:-1], edges[1:] - edges[:-1]
    widths = spans.num_pages[of_batch].repeat(num_spans)
    offsets = (np.arange(len(widths)) - of_batch.repeat(num_spans)) * widths
    dead, num_dead = spans.dead(widths, offsets, size)
    places = spans.places(spans.request * _flat(step.block_table)[1], widths)

    # A batch whose spans have more queries than a tile becomes one batch for each tile of its spans.
    num_tiles, most = -(-spans.num_queries[of_batch] // rules[0].max_queries), rules[0].max_queries
    batch, number = np.arange(len(of_batch)).repeat(num_tiles), ranges(np.zeros_like(num_tiles), num_tiles)
    if has_tiles := len(batch) > len(of_batch):
        spans = spans.tiles(ranges(of_batch[batch], num_spans[batch]), number.repeat(num_spans[batch]) * most, most)
    rows = ranges(spans.first, spans.num_queries)
    runs = spans.runs(rows, step, rules)
    num_tiles, is_first = num_spans[batch], number == 0
    first_tile = num_tiles.cumsum() - num_tiles
    num_queries, num_pages = spans.num_queries[first_tile], widths[of_batch][batch]
    num_keys, num_sinks, num_unread = num_pages * size, np.zeros_like(batch), np.zeros_like(batch)
    num_rows = num_tiles * num_queries
    first_row = num_rows.cumsum() - num_rows
    if has_tiles:
        num_sinks, num_unread, num_keys = _read(runs, first_row, size)
        runs[:2] -= num_unread.repeat(num_rows)
    num_open = np.minimum.reduceat(runs[1], first_row) * (np.maximum.reduceat(runs[0], first_row) == 0)
    of_rows = {"runs": runs}
    if rules[0].has_bias:
        unread = num_unread.repeat(num_tiles)
        shifts = spans.skipped * size
        shifts[0] += unread
        begin = np.where(unread > 0, num_sinks.repeat(num_tiles), spans.num_sinks * size).repeat(spans.num_queries)
        of_rows["positions"] = np.array([*(spans.positions(rows) - shifts.repeat(spans.num_queries, axis=1)), begin])

    num_dead_of_batch = np.add.reduceat(num_dead, of_batch)[batch]
    columns = (num_tiles, num_queries, num_pages * is_first, num_keys, num_sinks, num_unread, num_open)
    sizes = zip(*(each.tolist() for each in (*columns, num_dead_of_batch * is_first)), strict=True)
    num_sizes = np.bincount(of_batch[batch] * len(rules) // max(1, len(widths)), minlength=len(rules)).tolist()
    arrays = {"places_cpu": (places, widths), "rows": (rows, spans.num_queries), "dead": (dead, num_dead)}
    split = {
        name: torch.from_numpy(array).split(counts.reshape(len(rules), -1).sum(axis=1).tolist())
        for name, (array, counts) in arrays.items()
    }
    for name, numbers in of_rows.items():
        by_group = numbers.reshape(len(numbers), len(rules), -1).swapaxes(0, 1)
        split[name] = torch.from_numpy(by_group.astype(np.int32, order="C")).unbind()
    return [
        {
            "sizes": tuple(islice(sizes, num)),
            "positions": None,
            "cut": [],
            **dict(zip(split, tensors, strict=True)),
        }
        for num, *tensors in zip(num_sizes, *split.values(), strict=True)
    ]


def _read(runs: IntArray, begins: IntArray, size: int) -> tuple[IntArray, IntArray, IntArray]:
    """Return what ``Batch`` calls ``num_sinks``, ``num_unread`` and ``num_keys``, from the first row of each batch."""
    num_sinks = np.maximum.reduceat(runs[3], begins) if len(runs) > 2 else np.zeros_like(begins)
    num_unread = np.maximum(np.minimum.reduceat(runs[0], begins) - num_sinks, 0) // size * size
    return num_sinks, num_unread, -(-np.maximum.reduceat(runs[1], begins) // size) * size - num_unread


def _flat(table: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return a flat view of a block table, which may be a part of a wider one, and the distance between its rows."""
    (num_rows, num_columns), stride = table.shape, table.stride(0)
    if table.stride(1) == 1 and stride > num_columns > 0:
        return table.as_strided(((num_rows - 1) * stride + num_columns,), (1,)), stride
    return table.reshape(-1), num_columns
