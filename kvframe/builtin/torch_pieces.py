"""The pieces of a step: dense batches of tiles, as the practical torch backend's layers read them."""

from __future__ import annotations

import attrs
import numpy as np
import torch

from kvframe.attention.relative_bias import bias_columns
from kvframe.builtin.torch_bias import QueryBias, tile_bias
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


@attrs.frozen(eq=False)
class Cut:
    """What the host needs to know to make pieces.

    Attributes:
        layout: Where everything stands.
        causal: Whether queries see only their own and earlier positions.
        dtype: Of the bias.
        num_actual_tokens: Of each group's step.
        num_hidden: Of each piece's ``hidden_slots``.
        num_keys: Gathered tokens of each piece.
        has_unseen: Whether some gathered tokens of a piece are not seen by any query of their tile.
        read: The rows of the packed batch that the pieces read and write.
        parts: The first pages of each piece's parts, and the page behind them; None for a piece that is not cut.
    """

    layout: Layout
    causal: bool
    dtype: torch.dtype
    num_actual_tokens: list[int]
    num_hidden: list[int]
    num_keys: list[int]
    has_unseen: list[bool]
    read: QueryRows
    parts: list[list[int] | None]


@attrs.define(eq=False)
class Pieces:
    """The pieces of several groups, made where they are used, once, when they are first asked for.

    What they are made of is worked out on the host and small: it goes to the device with all else of the step. The
    biases, which are large, never do.

    Attributes:
        cut_cpu: What stays on the host.
        slots: ``[num_hidden], int64``: the ``hidden_slots`` of all pieces.
        part_slots: Those of each part of each piece that is cut.
        rows: ``[num_rows], int64``: rows of the packed batch that the pieces read.
        output_rows: ``[num_outputs], int64``: rows that they write; None where no tile repeats queries.
        output_index: ``[num_outputs], int64``: the row of its piece that holds each; None likewise.
        hidden: ``[num_hidden], int64``: tokens, counted through all pieces, that a bias hides; None without any bias.
        padded_pages: ``[num_padded], int64``: pages, counted likewise, that a bias hides; None likewise.
        own: ``[num_rows], float32``: half a token behind where each query's own token stands in its tile's share, so
            that no distance between places is 0 and infinitely many of it have a sign; None where nothing but the ends
            of tiles hides anything.
        sink_ends: ``[num_tiles], float32``: half a token before the place behind each tile's sinks; None likewise, or
            without sinks.
        key_positions: ``[num_keys], int32``: of each gathered token in its request; None without a learned bias.
        query_positions: ``[num_rows], int32``: of each query likewise.
    """

    cut_cpu: Cut
    slots: torch.Tensor
    part_slots: tuple[tuple[torch.Tensor, ...], ...]
    rows: torch.Tensor
    output_rows: torch.Tensor | None
    output_index: torch.Tensor | None
    hidden: torch.Tensor | None
    padded_pages: torch.Tensor | None
    own: torch.Tensor | None
    sink_ends: torch.Tensor | None
    key_positions: torch.Tensor | None
    query_positions: torch.Tensor | None
    _made: tuple[Piece, ...] | None = None

    @classmethod
    def of(
        cls, layout: Layout, causal: bool, dtype: torch.dtype, num_actual_tokens: list[int], padded_pages: IntArray
    ) -> Pieces:
        """Return what pieces are made of, on the host.

        Args:
            layout: Where everything stands.
            causal: Whether queries see only their own and earlier positions.
            dtype: Of the bias.
            num_actual_tokens: Of each group's step.
            padded_pages: What ``Layout.padded_pages`` returned.
        """
        hidden, num_hidden = layout.hidden_tokens()
        num_keys = layout.counts * layout.widths * layout.block_size
        first_key = num_keys.cumsum() - num_keys
        has_unseen = (num_hidden > 0) | (np.add.reduceat(layout.padding, layout.starts) > 0)
        read = layout.query_rows()
        adds_queries = causal and bool((layout.queries > 1).any())
        has_bias = adds_queries or bool(has_unseen.any())
        is_learned = any(rules.max_distance for rules in layout.rules)
        sink_columns = layout.sink_columns() if adds_queries else None
        bounds, part_slots = _cut_parts(layout, hidden, num_hidden, num_keys)
        cut = Cut(
            layout=layout,
            causal=causal,
            dtype=dtype,
            num_actual_tokens=num_actual_tokens,
            num_hidden=num_hidden.tolist(),
            num_keys=num_keys.tolist(),
            has_unseen=has_unseen.tolist(),
            read=read,
            parts=bounds,
        )
        uneven = read.uneven
        return cls(
            cut_cpu=cut,
            slots=torch.from_numpy(hidden - first_key.repeat(num_hidden)),
            part_slots=part_slots,
            rows=torch.from_numpy(read.rows),
            output_rows=None if uneven is None else torch.from_numpy(uneven.rows),
            output_index=None if uneven is None else torch.from_numpy(uneven.index),
            hidden=torch.from_numpy(hidden) if has_bias else None,
            # Padding stands before the page that it repeats, and a causal square, where it is behind, has no bias.
            padded_pages=torch.from_numpy(padded_pages - 1) if has_bias and len(padded_pages) else None,
            own=_floats(layout.query_columns(read.rows), 0.5) if adds_queries else None,
            sink_ends=None if sink_columns is None else _floats(sink_columns, -0.5),
            key_positions=torch.from_numpy(layout.key_positions(padded_pages)) if is_learned else None,
            query_positions=torch.from_numpy(layout.query_positions(read.rows)) if is_learned else None,
        )

    def made(self) -> tuple[Piece, ...]:
        """Return the pieces, on the device that this lies on."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def _make(self) -> tuple[Piece, ...]:
        cut, layout = self.cut_cpu, self.cut_cpu.layout
        columns = zip(
            layout.counts.tolist(),
            layout.queries.tolist(),
            (layout.widths * layout.block_size).tolist(),
            self._rows(),
            self.slots.split_with_sizes(cut.num_hidden),
            self._biases(),
            layout.is_fresh,
            self._bias_columns(),
            self._parts(),
            strict=True,
        )
        return tuple(Piece(tiles, queries, keys, *rows, *others) for tiles, queries, keys, rows, *others in columns)

    def _rows(self) -> list[Rows]:
        layout, read, num_tokens = self.cut_cpu.layout, self.cut_cpu.read, self.cut_cpu.num_actual_tokens
        sizes = read.sizes.tolist()
        found: list[Rows] = [(rows, None, None) for rows in self.rows.split_with_sizes(sizes)]
        if read.uneven is not None and self.output_rows is not None and self.output_index is not None:
            written = read.uneven.sizes.tolist()
            rows, index = self.output_rows.split_with_sizes(written), self.output_index.split_with_sizes(written)
            for piece, (size, num_new) in enumerate(zip(sizes, written, strict=True)):
                if num_new < size:
                    found[piece] = (found[piece][0], rows[piece], index[piece])
        num_pieces = np.bincount(layout.groups, minlength=len(num_tokens)).tolist()
        for piece, (group, size) in enumerate(zip(layout.groups, sizes, strict=True)):
            # The tiles of a piece that is alone were not sorted: these are all rows, in order.
            if num_pieces[group] == 1 and size == num_tokens[group] and found[piece][1] is None:
                found[piece] = (None, None, None)
        return found

    def _biases(self) -> list[torch.Tensor | None]:
        cut, layout = self.cut_cpu, self.cut_cpu.layout
        found: list[torch.Tensor | None] = [None] * len(cut.num_keys)
        if self.hidden is None:
            return found
        has_rows = (layout.queries > 1).tolist()
        add_queries = None if self.own is None else QueryBias(layout, self.own, self.sink_ends)
        every = tile_bias(sum(cut.num_keys), cut.dtype, self.hidden, self.padded_pages, layout.block_size)
        shares = every.split_with_sizes(cut.num_keys)
        for piece, tiles in enumerate(layout.counts.tolist()):
            if layout.is_fresh[piece]:
                continue
            if add_queries is not None and has_rows[piece]:
                found[piece] = add_queries(piece, shares[piece].view(tiles, 1, -1))
            elif cut.has_unseen[piece]:
                found[piece] = shares[piece].view(tiles, 1, 1, -1)
        return found

    def _bias_columns(self) -> list[torch.Tensor | None]:
        cut, layout = self.cut_cpu, self.cut_cpu.layout
        found: list[torch.Tensor | None] = [None] * len(cut.num_keys)
        if self.key_positions is None or self.query_positions is None:
            return found
        keys = self.key_positions.split_with_sizes(cut.num_keys)
        queries = self.query_positions.split_with_sizes(cut.read.sizes.tolist())
        for piece, (group, tiles) in enumerate(zip(layout.groups, layout.counts.tolist(), strict=True)):
            if limit := layout.rules[group].max_distance:
                distance = keys[piece].view(tiles, 1, -1) - queries[piece].view(tiles, -1, 1)
                found[piece] = bias_columns(distance, limit).view(-1)
        return found

    def _parts(self) -> list[tuple[Part, ...]]:
        return [
            () if bounds is None else tuple(map(Part, bounds[:-1], bounds[1:], slots))
            for bounds, slots in zip(self.cut_cpu.parts, self.part_slots, strict=True)
        ]


def _cut_parts(
    layout: Layout, hidden: IntArray, num_hidden: IntArray, num_keys: IntArray
) -> tuple[list[list[int] | None], tuple[tuple[torch.Tensor, ...], ...]]:
    """Return where the parts of each piece begin and end, in pages, and the ``hidden_slots`` of each part."""
    size = layout.block_size
    bounds: list[list[int] | None] = [None] * len(num_keys)
    found: list[tuple[torch.Tensor, ...]] = [()] * len(num_keys)
    limits = np.array([rules.piece_keys for rules in layout.rules])[layout.groups]
    stops, hidden_stops = num_keys.cumsum(), num_hidden.cumsum()
    # Batches of several tiles were cut to the limit.
    for piece in ((layout.queries == 1) & (num_keys > limits)).nonzero()[0].tolist():
        slots = hidden[hidden_stops[piece] - num_hidden[piece] : hidden_stops[piece]]
        slots = slots - (stops[piece] - num_keys[piece])
        num_pages, pages_each = int(layout.widths[piece]), max(1, int(limits[piece]) // size)
        pages = [*range(0, num_pages, pages_each), num_pages]
        ends = np.searchsorted(slots, np.array(pages) * size).tolist()
        bounds[piece] = pages
        found[piece] = tuple(
            torch.from_numpy(slots[start:end] - first * size)
            for first, start, end in zip(pages, ends, ends[1:], strict=False)
        )
    return bounds, tuple(found)


def _floats(places: IntArray, shift: float) -> torch.Tensor:
    return torch.from_numpy(places.astype(np.float32) + np.float32(shift))
