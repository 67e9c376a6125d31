"""The pieces of a step: dense batches of tiles, as the practical torch backend's layers read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvframe.attention.relative_bias import bias_columns
from kvframe.builtin.torch_layout import Layout, QueryRows
from kvframe.builtin.torch_tiles import IntArray


@attrs.frozen(eq=False)
class Part:
    """Gathered tokens, whole pages, of one long tile.

    Attributes:
        first_page: The tile's page that it starts with.
        stop_page: The tile's page behind it.
        hidden_slots: ``[num_hidden], int64, device``: as in a piece, counted from the part's first token.
    """

    first_page: int
    stop_page: int
    hidden_slots: torch.Tensor


@attrs.frozen(eq=False)
class Piece:
    """Tiles that are computed as one dense batch of ``num_queries`` queries over ``num_keys`` gathered tokens.

    Attributes:
        num_tiles: Tiles in the batch.
        num_queries: Queries per tile; shorter tiles repeat their last one.
        num_keys: Gathered tokens per tile, whole pages.
        query_rows: ``[num_tiles * num_queries], int64, device``: rows of the packed batch; None for its first rows in
            order.
        output_rows: ``[num_outputs], int64, device``: rows to write, where tiles repeat queries; None for all.
        output_index: ``[num_outputs], int64, device``: the dense batch's rows that hold them.
        hidden_slots: ``[num_hidden], int64, device``: gathered tokens that no query of their tile sees and that may
            hold anything, NaN included; they are zeroed.
        bias: ``[num_tiles, 1, num_rows, num_keys], device``: 0 where a query sees a token, else -inf; one row for
            all or, for several queries, ``group_size * num_queries``. None where all is seen, or the batch is causal.
        is_causal: Whether query ``i`` of each tile sees gathered tokens ``[0, i]``.
        bias_columns: ``[num_tiles * num_queries * num_keys], int32, device``: for each query and gathered token, the
            column of what ``bias_by_distance`` returns; None without a learned bias.
        parts: Its tokens, part by part, of a single query over more than are gathered at once; else empty.
    """

    num_tiles: int
    num_queries: int
    num_keys: int
    query_rows: torch.Tensor | None
    output_rows: torch.Tensor | None
    output_index: torch.Tensor | None
    hidden_slots: torch.Tensor
    bias: torch.Tensor | None
    is_causal: bool
    bias_columns: torch.Tensor | None
    parts: tuple[Part, ...]


Rows = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Of a piece: ``query_rows``, ``output_rows`` and ``output_index``."""


class PieceMaker:
    """Makes the pieces of a layout, with one copy to the device for each kind of array."""

    def __init__(self, layout: Layout, causal: bool, dtype: torch.dtype, device: torch.device) -> None:
        """Take what the pieces have in common.

        Args:
            layout: Where everything stands.
            causal: Whether queries see only their own and earlier positions.
            dtype: Of the bias.
            device: Where the pieces are used.
        """
        self._layout = layout
        self._causal = causal
        self._dtype = dtype
        self._device = device

    def make(self, num_actual_tokens: list[int], padded_pages: IntArray) -> list[Piece]:
        """Return the pieces.

        Args:
            num_actual_tokens: Of each group's step.
            padded_pages: What ``Layout.padded_pages`` returned.
        """
        layout = self._layout
        hidden, num_hidden = layout.hidden_tokens()
        num_keys = layout.counts * layout.widths * layout.block_size
        slots = upload(hidden - (num_keys.cumsum() - num_keys).repeat(num_hidden), self._device)
        has_unseen = (num_hidden > 0) | (np.add.reduceat(layout.padding, layout.starts) > 0)
        read = layout.query_rows()
        biases = self._biases(hidden, padded_pages, num_keys.tolist(), has_unseen.tolist(), read.rows)
        columns = zip(
            layout.counts.tolist(),
            layout.queries.tolist(),
            (layout.widths * layout.block_size).tolist(),
            self._rows(read, num_actual_tokens),
            slots.split_with_sizes(num_hidden.tolist()),
            biases,
            layout.is_fresh,
            self._bias_columns(padded_pages, num_keys.tolist(), read),
            self._parts(hidden, num_hidden, num_keys),
            strict=True,
        )
        return [Piece(tiles, queries, keys, *rows, *others) for tiles, queries, keys, rows, *others in columns]

    def _rows(self, read: QueryRows, num_actual_tokens: list[int]) -> list[Rows]:
        layout = self._layout
        sizes = read.sizes.tolist()
        found: list[Rows] = [(rows, None, None) for rows in upload(read.rows, self._device).split_with_sizes(sizes)]
        if read.uneven is not None:
            written = read.uneven.sizes.tolist()
            rows = upload(read.uneven.rows, self._device).split_with_sizes(written)
            index = upload(read.uneven.index, self._device).split_with_sizes(written)
            for piece, (size, num_new) in enumerate(zip(sizes, written, strict=True)):
                if num_new < size:
                    found[piece] = (found[piece][0], rows[piece], index[piece])
        num_pieces = np.bincount(layout.groups, minlength=len(num_actual_tokens)).tolist()
        for piece, (group, size) in enumerate(zip(layout.groups, sizes, strict=True)):
            # The tiles of a piece that is alone were not sorted: these are all rows, in order.
            if num_pieces[group] == 1 and size == num_actual_tokens[group] and found[piece][1] is None:
                found[piece] = (None, None, None)
        return found

    def _biases(
        self, hidden: IntArray, padded_pages: IntArray, num_keys: list[int], has_unseen: list[bool], rows: IntArray
    ) -> list[torch.Tensor | None]:
        layout = self._layout
        has_rows = (layout.queries > 1).tolist()
        adds_queries = self._causal and any(has_rows)
        found: list[torch.Tensor | None] = [None] * len(num_keys)
        if not any(has_unseen) and not adds_queries:
            return found
        add_queries = _QueryBias(layout, rows, self._device) if adds_queries else None
        shares = self._tile_bias(hidden, padded_pages, sum(num_keys)).split_with_sizes(num_keys)
        for piece, tiles in enumerate(layout.counts.tolist()):
            if layout.is_fresh[piece]:
                continue
            if add_queries is not None and has_rows[piece]:
                found[piece] = add_queries(piece, shares[piece].view(tiles, 1, -1))
            elif has_unseen[piece]:
                found[piece] = shares[piece].view(tiles, 1, 1, -1)
        return found

    def _bias_columns(self, padded_pages: IntArray, num_keys: list[int], read: QueryRows) -> list[torch.Tensor | None]:
        layout = self._layout
        limits = [each.max_distance for each in layout.rules]
        found: list[torch.Tensor | None] = [None] * len(num_keys)
        if not any(limits):
            return found
        keys = upload(layout.key_positions(padded_pages), self._device).split_with_sizes(num_keys)
        queries = upload(layout.query_positions(read.rows), self._device).split_with_sizes(read.sizes.tolist())
        for piece, (group, tiles) in enumerate(zip(layout.groups, layout.counts.tolist(), strict=True)):
            if limits[group]:
                distance = keys[piece].view(tiles, 1, -1) - queries[piece].view(tiles, -1, 1)
                found[piece] = bias_columns(distance, limits[group]).view(-1)
        return found

    def _parts(self, hidden: IntArray, num_hidden: IntArray, num_keys: IntArray) -> list[tuple[Part, ...]]:
        layout, size = self._layout, self._layout.block_size
        found: list[tuple[Part, ...]] = [()] * len(num_keys)
        limits = np.array([rules.piece_keys for rules in layout.rules])[layout.groups]
        stops, hidden_stops = num_keys.cumsum(), num_hidden.cumsum()
        # Batches of several tiles were cut to the limit.
        for piece in ((layout.queries == 1) & (num_keys > limits)).nonzero()[0].tolist():
            slots = hidden[hidden_stops[piece] - num_hidden[piece] : hidden_stops[piece]]
            slots = slots - (stops[piece] - num_keys[piece])
            num_pages, pages_each = int(layout.widths[piece]), max(1, int(limits[piece]) // size)
            parts = []
            for first in range(0, num_pages, pages_each):
                stop = min(first + pages_each, num_pages)
                start, end = np.searchsorted(slots, (first * size, stop * size))
                parts.append(Part(first, stop, upload(slots[start:end] - first * size, self._device)))
            found[piece] = tuple(parts)
        return found

    def _tile_bias(self, hidden: IntArray, padded_pages: IntArray, num_keys: int) -> torch.Tensor:
        """Return what holds for all queries of a tile, for the tokens of all pieces: ``[num_keys], device``."""
        bias = _zeros(num_keys, self._dtype, self._device)
        bias.index_fill_(0, upload(hidden, self._device), -math.inf)
        if len(padded_pages):
            # Padding stands before the page that it repeats, and a causal square, where it is behind, has no bias.
            pages = upload(padded_pages - 1, self._device)
            bias.view(-1, self._layout.block_size).index_fill_(0, pages, -math.inf)
        return bias


class _QueryBias:
    """Adds to the bias of tiles with several queries what only some of these see."""

    def __init__(self, layout: Layout, rows: IntArray, device: torch.device) -> None:
        self._layout = layout
        # Half a token is added, so that no distance between places is 0 and infinitely many of it have a sign.
        own = upload(layout.query_columns(rows).astype(np.float32) + np.float32(0.5), device)
        self._own = own.split_with_sizes((layout.counts * layout.queries).tolist())
        self._sinks: Sequence[torch.Tensor] | None = None
        behind_sinks = layout.sink_columns()
        if behind_sinks is not None:
            ends = upload(behind_sinks.astype(np.float32) - np.float32(0.5), device)
            self._sinks = ends.split_with_sizes(layout.counts.tolist())
        self._column = torch.arange(int(layout.widths.max()) * layout.block_size, dtype=torch.float32, device=device)

    def __call__(self, piece: int, row: torch.Tensor) -> torch.Tensor:
        """Return the bias of a piece, ``[num_tiles, 1, group_size * num_queries, num_keys]``.

        All tiles end at the same place but for part of a page: only what lies about their ends, or a window before
        these, is seen by some queries and not by others.

        Args:
            piece: The number of the piece.
            row: ``[num_tiles, 1, num_keys], device``: what holds for all queries of a tile.
        """
        layout, rules = self._layout, self._layout.rules[self._layout.groups[piece]]
        num_queries, num_keys = int(layout.queries[piece]), row.shape[2]
        bias = row.expand(-1, num_queries, -1).contiguous()
        own = self._own[piece].view(row.shape[0], num_queries, 1)
        first = num_keys - num_queries - layout.block_size
        start = max(first, 0)
        _hide(bias[:, :, start:], own - self._column[start:num_keys])
        if rules.window < num_keys:
            start, stop = max(first - rules.window, 0), num_keys - rules.window
            behind = self._column[start:stop] - (own - rules.window)
            if self._sinks is not None:
                behind = torch.maximum(behind, self._sinks[piece][:, None, None] - self._column[start:stop])
            _hide(bias[:, :, start:stop], behind)
        return bias[:, None] if rules.group_size == 1 else bias[:, None].repeat(1, 1, rules.group_size, 1)


def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # NumPy asks for memory that is zeroed, and the system has such at hand; torch writes the zeros.
    return torch.from_numpy(np.zeros(size * dtype.itemsize, dtype=np.uint8)).view(dtype)


def _hide(bias: torch.Tensor, distance: torch.Tensor) -> None:
    """Set to -inf where a distance, which is never 0, is negative; this is faster than a mask."""
    torch.minimum(bias, distance.mul_(math.inf), out=bias)


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return an array of the host on the device."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)
