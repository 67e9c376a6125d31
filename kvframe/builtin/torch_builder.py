"""The practical torch backend's metadata: a step as pieces, each a dense batch of tiles of about the same length.

All index arithmetic of a step is done on the host, for all groups at once. A layer then gathers the pieces' pages and
calls one attention per piece, so a step with any number of decodes is a few gathers and attentions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Self

import attrs
import numpy as np
import torch

from kvframe.builtin.torch_bias import Bands
from kvframe.builtin.torch_layout import Layout
from kvframe.builtin.torch_pieces import Piece, Pieces
from kvframe.builtin.torch_tiles import NO_LIMIT, Rules
from kvframe.contract.backend import AttentionMetadataBuilder
from kvframe.contract.formats import StateTensor
from kvframe.contract.metadata import SEQ_STARTS, CommonAttentionMetadata
from kvframe.contract.specs import LayerSpec

MAX_FOLDED_QUERIES = 256
"""Rows of a masked tile, the queries of one KV head's group side by side: bounds the mask's memory."""

MAX_BIASED_QUERIES = 2048
"""Rows of a tile with a learned bias, which differs from head to head: the queries of all heads."""

MAX_PIECE_KEYS = 1 << 16
"""Gathered tokens of a piece of more than one tile: bounds the gathered copy's memory."""

MAX_PIECE_BYTES = 1 << 23
"""Bytes of a CPU's piece of more than one tile, of keys or of values: the copy is read again while a cache holds it."""

FREE_PADDING_ELEMENTS = 3 << 17
"""Key and value elements that decodes may gather in vain before a second piece, with its own calls, costs less."""


@attrs.frozen(eq=False)
class TorchMetadata:
    """What the layers of an attention group read in a step.

    Attributes:
        all_pieces: The dense batches, among those of other groups; None where no request has a new token.
        first_piece: The group's first one.
        pages: For each of its pieces ``[num_tiles * num_pages], int32, device``: block ids to gather.
        page_index_cpu: ``[num_pages], int32, host``: where those of all pieces stand in the memory of the block table.
        table_start: Where that block table starts there.
        row_stride: From one row of it to the next.
    """

    all_pieces: Pieces | None
    first_piece: int
    pages: tuple[torch.Tensor, ...]
    page_index_cpu: torch.Tensor
    table_start: int
    row_stride: int

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The dense batches; made when they are first asked for."""
        if self.all_pieces is None:
            return ()
        return self.all_pieces.made()[self.first_piece : self.first_piece + len(self.pages)]


class TorchMetadataBuilder(AttentionMetadataBuilder):
    """Makes the pieces of a step: on the host what they are made of, and of that, on the device, what is large."""

    on_host = True
    table_fields = frozenset({"pages"})

    def __init__(self, layer: LayerSpec, device: torch.device) -> None:
        """Take what the layers of the group have in common.

        Args:
            layer: Any layer of the group.
            device: Where the pieces are used.
        """
        assert layer.spec is not None
        assert layer.query is not None
        state, mask = layer.spec.state_tensors(), layer.spec.mask
        assert mask is not None
        group_size = layer.query.num_heads // state["k"].shape[1]
        bias = layer.query.relative_bias
        biased_heads = 0 if bias is None else layer.query.num_heads
        max_rows = MAX_FOLDED_QUERIES // group_size
        token_elements = sum(math.prod(tensor.shape[1:]) for tensor in state.values())
        self._rules = Rules(
            causal=mask.causal,
            window=NO_LIMIT if mask.window is None else mask.window,
            num_sink_tokens=0 if mask.window is None else mask.num_sink_tokens,
            takes_causal=layer.query.soft_cap is None and not layer.query.has_sinks and bias is None,
            group_size=group_size,
            max_queries=max(1, min(max_rows, MAX_BIASED_QUERIES // biased_heads) if biased_heads else max_rows),
            free_padding=FREE_PADDING_ELEMENTS // token_elements,
            biased_heads=biased_heads,
            max_distance=0 if bias is None else bias.max_distance,
            piece_keys=_piece_keys(state.values(), device),
        )
        self._dtype: torch.dtype = getattr(torch, state["k"].dtype)
        self._device = device
        self._bands = Bands(self._dtype, device)

    @property
    def reuse_key(self) -> Hashable:
        """What of the mask and of the layers' sizes decides how a step is cut, and the dtype of what is added."""
        return self._rules, self._dtype

    def build(self, metadata: CommonAttentionMetadata) -> TorchMetadata:
        """Return the step's pieces: the decodes, then fresh prefills, then everything else."""
        (built,) = self.build_together([(self, metadata)])
        return built

    @classmethod
    def build_together(cls, builds: Sequence[tuple[Self, CommonAttentionMetadata]]) -> list[TorchMetadata]:
        """Return the pieces of all groups; those of one block size are laid out together."""
        firsts: dict[Hashable, int] = {}
        alike: dict[Hashable, list[int]] = {}
        same: dict[int, int] = {}
        jobs = [_Job.of(builder._rules, builder._bands, metadata) for builder, metadata in builds]
        for number, ((builder, metadata), job) in enumerate(zip(builds, jobs, strict=True)):
            kind = (metadata.block_size, job.causal, builder._dtype, builder._device)
            first = firsts.setdefault((kind, job.key), number)
            if first == number:
                alike.setdefault(kind, []).append(number)
            else:
                same[number] = first
        found: dict[int, TorchMetadata] = {}
        for numbers in alike.values():
            builder = builds[numbers[0]][0]
            results = _build_alike([jobs[number] for number in numbers], builder._dtype, builder._device)
            found.update(zip(numbers, results, strict=True))
        for number, first in same.items():
            builder, metadata = builds[number]
            found[number] = attrs.evolve(found[first], **builder.refreshed_fields(found[first], metadata))
        return [found[number] for number in range(len(builds))]

    def refreshed_fields(self, built: Any, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        """Return the pages of all pieces."""
        table, index = _Table.of(metadata.block_table), built.page_index_cpu
        if table.row_stride != built.row_stride:
            row = torch.div(index - built.table_start, built.row_stride, rounding_mode="floor")
            index = index + row * (table.row_stride - built.row_stride)
        shift = table.start - built.table_start
        if shift < 0:
            index, shift = index + shift, 0
        return {
            "pages": table.ids(shift)
            .index_select(0, index.to(table.rows.device, non_blocking=True))
            .split_with_sizes([len(each) for each in built.pages])
        }


def _piece_keys(state: Iterable[StateTensor], device: torch.device) -> int:
    """Return the gathered tokens of a piece at most."""
    if device.type != "cpu":
        return MAX_PIECE_KEYS
    token_bytes = max(tensor.num_bytes // tensor.shape[0] for tensor in state)
    return min(MAX_PIECE_KEYS, max(1, MAX_PIECE_BYTES // token_bytes))


@attrs.define(eq=False)
class _Table:
    """A block table where it lies: as a rule among those of other groups.

    Attributes:
        rows: ``[num_rows, max_blocks], int32, device``: the table; a row's ids lie side by side.
        start: Where its first row starts in the memory that it lies in.
        row_stride: From one row to the next.
        place: The same for tables in the same memory.
    """

    rows: torch.Tensor
    start: int
    row_stride: int
    place: int

    @classmethod
    def of(cls, table: torch.Tensor) -> _Table:
        """Return where a block table lies; one whose rows do not lie one after the other is copied."""
        row_stride, column_stride = table.stride()
        if column_stride != 1 or row_stride < table.shape[1]:
            table = table.contiguous()
            row_stride = table.stride(0)
        return cls(table, int(table.storage_offset()), row_stride, table.untyped_storage().data_ptr())

    def ids(self, start: int = 0) -> torch.Tensor:
        """Return the memory that it lies in, from ``start`` on: ``[num_ids], int32, device``."""
        num_ids = self.rows.untyped_storage().nbytes() // self.rows.element_size()
        return self.rows.as_strided((num_ids - start,), (1,), start)


@attrs.define(eq=False)
class _Job:
    """What one group's metadata is made of.

    Attributes:
        step: The group's batch metadata.
        rules: The group's rules, as far as they matter for this step.
        table: The group's block table.
        bands: The masks of the group's aligned tiles.
        causal: Whether queries see only their own and earlier positions.
        key: Equal for groups that differ in their block ids only.
    """

    step: CommonAttentionMetadata
    rules: Rules
    table: _Table
    bands: Bands
    causal: bool
    key: Hashable

    @classmethod
    def of(cls, rules: Rules, bands: Bands, step: CommonAttentionMetadata) -> _Job:
        """Return what a group's metadata is made of."""
        if rules.window != NO_LIMIT and rules.window >= step.max_seq_len:
            # No request is as long as the window, which then hides nothing.
            rules = attrs.evolve(rules, window=NO_LIMIT, num_sink_tokens=0)
        table = _Table.of(step.block_table)
        starts = step.extensions.get(SEQ_STARTS)
        requests = (id(step.query_start_loc_cpu), id(step.seq_lens_cpu), id(starts), step.num_actual_tokens)
        return cls(step, rules, table, bands, step.causal and rules.causal, (rules, requests, table.row_stride))


def _build_alike(jobs: Sequence[_Job], dtype: torch.dtype, device: torch.device) -> list[TorchMetadata]:
    """Return the metadata of groups with one block size, all or none of them causal."""
    tables, causal = [job.table for job in jobs], jobs[0].causal
    layout = Layout.of([job.step for job in jobs], [job.rules for job in jobs], causal, jobs[0].step.block_size)
    if layout is None:
        nothing = torch.empty(0, dtype=torch.int32)
        return [TorchMetadata(None, 0, (), nothing, table.start, table.row_stride) for table in tables]
    padded_pages = layout.padded_pages()
    pieces = Pieces.of(layout, causal, [job.bands for job in jobs], dtype, padded_pages)
    if device.type == "cpu":
        pieces.made()  # There is no way to go first: what a step's metadata takes is all spent before its first layer.
    starts, row_strides = np.array([(table.start, table.row_stride) for table in tables], dtype=np.int32).T
    group = layout.tiles.group
    index = torch.from_numpy(layout.page_index(layout.tiles.request * row_strides[group] + starts[group], padded_pages))
    num_pages = layout.num_pages.tolist()
    ends = np.searchsorted(layout.groups, np.arange(len(jobs) + 1)).tolist()
    group_pages = [sum(num_pages[first:stop]) for first, stop in itertools.pairwise(ends)]
    pages = _take_pages(tables, index, group_pages).split_with_sizes(num_pages)
    return [
        TorchMetadata(pieces, first, pages[first:stop], page_index, table.start, table.row_stride)
        for (first, stop), page_index, table in zip(
            itertools.pairwise(ends), index.split_with_sizes(group_pages), tables, strict=True
        )
    ]


def _take_pages(tables: Sequence[_Table], index: torch.Tensor, group_pages: Sequence[int]) -> torch.Tensor:
    """Return the block ids of all groups, for where they stand in the tables' memory; one gather for each memory."""
    index = index.to(tables[0].rows.device, non_blocking=True)
    found, first = [], 0
    for _, run in itertools.groupby(zip(tables, group_pages, strict=True), lambda pair: pair[0].place):
        members = list(run)
        stop = first + sum(count for _, count in members)
        found.append(members[0][0].ids().index_select(0, index[first:stop]))
        first = stop
    return found[0] if len(found) == 1 else torch.cat(found)
