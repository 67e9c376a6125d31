"""The pieces of a step: dense batches of tiles, as the practical torch backend's layers read them."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvframe.builtin.torch_bias import Bands, QueryBias, key_bias
from kvframe.builtin.torch_layout import Layout, QueryRows
from kvframe.builtin.torch_tiles import FRESH, OTHER, IntArray, column_of
from kvframe.contract.relative_bias import bias_columns

HOST = torch.device("cpu")

MAX_SHARED_KEYS = 1 << 12
"""Keys of a piece at most of which what hides them is made once for all layers: that of more is soon out of a cache."""

BoolArray = npt.NDArray[np.bool_]


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


@attrs.define(eq=False)  # Dozens are made in each step, and to freeze one takes four times as long.
class Piece:
    """Tiles that are computed as one dense batch of ``num_queries`` queries over ``num_keys`` gathered tokens.

    Attributes:
        num_tiles: Tiles in the batch.
        num_queries: Queries per tile; shorter tiles repeat one.
        num_keys: Gathered tokens per tile, whole pages.
        first_row: The first row of the packed batch of those that it reads and writes, one after the other; None where
            these do not follow one another.
        query_rows: ``[num_tiles * num_queries], int64, device``: rows of the packed batch that it reads, where they do
            not; else None.
        output_rows: ``[num_tiles * num_queries], int64, device``: the row behind each of them, 0 for what is repeated;
            None where tiles have one query each, and likewise.
        hidden_slots: ``[num_hidden], int64, device``: gathered tokens that no query of their tile sees and that may
            hold anything, NaN included; they are zeroed.
        padded_pages: ``[num_padded], int64, device``: gathered pages that no query of their tile sees, since they
            repeat another; None for none.
        hides_keys: Whether ``key_bias`` of these two is to be added to the scores.
        mask: ``[num_tiles or 1, 1, num_rows, num_keys], device``: else, 0 where a query sees a token and -inf where
            not, for ``group_size * num_queries`` rows or one that stands for all; None where all is seen, or the batch
            is causal.
        is_causal: Whether query ``i`` of each tile sees gathered tokens ``[0, i]``.
        bias_columns: ``[num_tiles * num_queries * num_keys], int32, device``: for each query and gathered token, the
            column of what ``bias_by_distance`` returns; None without a learned bias.
        parts: Its tokens, part by part, of a single query over more than are gathered at once; else empty.
    """

    num_tiles: int
    num_queries: int
    num_keys: int
    first_row: int | None
    query_rows: torch.Tensor | None
    output_rows: torch.Tensor | None
    hidden_slots: torch.Tensor
    padded_pages: torch.Tensor | None
    hides_keys: bool
    mask: torch.Tensor | None
    is_causal: bool
    bias_columns: torch.Tensor | None
    parts: tuple[Part, ...]


@attrs.frozen(eq=False)
class Cut:
    """What the host needs to know to make pieces.

    Attributes:
        layout: Where everything stands.
        causal: Whether queries see only their own and earlier positions.
        bands: The masks of each group's aligned tiles.
        dtype: Of all masks.
        num_hidden: Of each piece's ``hidden_slots``.
        num_padded: Of each piece's pages that are repeated.
        rows: The rows of the packed batch that the pieces read and write.
        parts: The first pages of each piece's parts, and the page behind them; None for a piece that is not cut.
    """

    layout: Layout
    causal: bool
    bands: Sequence[Bands]
    dtype: torch.dtype
    num_hidden: IntArray
    num_padded: IntArray
    rows: QueryRows
    parts: list[list[int] | None]


@attrs.define(eq=False)
class Pieces:
    """The pieces of several groups, made where they are used, once, when they are first asked for.

    What they are made of is worked out on the host and small: it goes to the device with all else of the step. The
    masks, which are large, never do.

    Attributes:
        cut_cpu: What stays on the host.
        slots: ``[num_hidden], int64``: the ``hidden_slots`` of all pieces.
        padded_pages: ``[num_padded], int64``: the ``padded_pages`` of all pieces.
        part_slots: The ``hidden_slots`` of each part of each piece that is cut.
        rows: ``[num_rows], int64``: rows of the packed batch that the pieces read.
        output_rows: ``[num_rows], int64``: the row behind each, 0 for what is repeated; None where nothing is.
        own: ``[num_rows], float32``: half a token behind where each query's own token stands in its tile's share, so
            that no distance between places is 0 and infinitely many of it have a sign; None where no mask is made of
            it.
        sink_ends: ``[num_tiles], float32``: half a token before the place behind each tile's sinks; None likewise, or
            without sinks.
        key_positions: ``[num_keys], int32``: of each gathered token in its request; None without a learned bias.
        query_positions: ``[num_rows], int32``: of each query likewise.
    """

    cut_cpu: Cut
    slots: torch.Tensor
    padded_pages: torch.Tensor
    part_slots: tuple[tuple[torch.Tensor, ...], ...]
    rows: torch.Tensor
    output_rows: torch.Tensor | None
    own: torch.Tensor | None
    sink_ends: torch.Tensor | None
    key_positions: torch.Tensor | None
    query_positions: torch.Tensor | None
    _made: tuple[Piece, ...] | None = None

    @classmethod
    def of(
        cls, layout: Layout, causal: bool, bands: Sequence[Bands], dtype: torch.dtype, padded_pages: IntArray
    ) -> Pieces:
        """Return what pieces are made of, on the host.

        Args:
            layout: Where everything stands.
            causal: Whether queries see only their own and earlier positions.
            bands: The masks of each group's aligned tiles.
            dtype: Of all masks.
            padded_pages: What ``Layout.padded_pages`` returned.
        """
        hidden, num_hidden = layout.hidden_tokens()
        num_padded = layout.per_piece(layout.padding)
        rows = layout.query_rows()
        adds_queries = causal and bool(((layout.kinds == OTHER) & (layout.queries > 1)).any())
        is_learned = any(rules.max_distance for rules in layout.rules)
        sink_columns = layout.sink_columns() if adds_queries else None
        bounds, part_slots = _cut_parts(layout, hidden, num_hidden)
        # Padding stands before the page that it repeats; a causal square, where it is behind, hides it by itself.
        padded = padded_pages - 1 - layout.first_page[layout.starts].repeat(num_padded)
        return cls(
            cut_cpu=Cut(layout, causal, bands, dtype, num_hidden, num_padded, rows, bounds),
            slots=torch.from_numpy(hidden),
            padded_pages=torch.from_numpy(padded),
            part_slots=part_slots,
            rows=torch.from_numpy(rows.read),
            output_rows=None if rows.written is None else torch.from_numpy(rows.written),
            own=_floats(layout.query_columns(rows.read), 0.5) if adds_queries else None,
            sink_ends=None if sink_columns is None else _floats(sink_columns, -0.5),
            key_positions=torch.from_numpy(layout.key_positions(padded_pages)) if is_learned else None,
            query_positions=torch.from_numpy(layout.query_positions(rows.read)) if is_learned else None,
        )

    def made(self) -> tuple[Piece, ...]:
        """Return the pieces, on the device that this lies on."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def _make(self) -> tuple[Piece, ...]:
        cut, layout = self.cut_cpu, self.cut_cpu.layout
        is_fresh = layout.kinds == FRESH
        hides = ~is_fresh & (cut.num_hidden + cut.num_padded > 0)
        if cut.causal:
            hides &= layout.queries == 1
        # On a CPU each layer makes what is large in its cache; all read what is made here.
        makes = hides & ((layout.num_pages * layout.block_size <= MAX_SHARED_KEYS) | (self.slots.device != HOST))
        leaps = cut.rows.first < 0
        hidden = self.slots.split_with_sizes(cut.num_hidden.tolist())
        padded = _split(self.padded_pages, cut.num_padded, cut.num_padded > 0)
        pieces = map(
            Piece,
            layout.counts.tolist(),
            layout.queries.tolist(),
            (layout.widths * layout.block_size).tolist(),
            [None if row < 0 else row for row in cut.rows.first.tolist()],
            _split(self.rows, cut.rows.sizes, leaps),
            _split(self.output_rows, cut.rows.sizes, leaps & (layout.queries > 1)),
            hidden,
            padded,
            (hides & ~makes).tolist(),
            self._masks(hidden, padded, makes),
            is_fresh.tolist(),
            self._bias_columns(),
            self._parts(),
        )
        return tuple(pieces)

    def _masks(
        self, hidden: Sequence[torch.Tensor], padded: Sequence[torch.Tensor | None], makes: BoolArray
    ) -> list[torch.Tensor | None]:
        """Return the mask of each piece that has one; of those of ``makes``, what hides keys."""
        cut, layout = self.cut_cpu, self.cut_cpu.layout
        found: list[torch.Tensor | None] = [None] * len(makes)
        if cut.causal:
            for piece, group, *sizes in layout.aligned().tolist():
                found[piece] = cut.bands[group].mask(layout.rules[group], *sizes)
            makes = makes | ((layout.kinds == OTHER) & (layout.queries > 1))
        add_queries = None if self.own is None else QueryBias(layout, self.own, self.sink_ends)
        for piece in makes.nonzero()[0].tolist():
            tiles, num_keys = int(layout.counts[piece]), int(layout.widths[piece]) * layout.block_size
            memory = torch.empty(tiles * num_keys, dtype=cut.dtype, device=self.slots.device)
            keys = key_bias(memory, hidden[piece], padded[piece], layout.block_size).view(tiles, 1, -1)
            if add_queries is None or layout.queries[piece] == 1:
                found[piece] = keys[:, None]
            else:
                found[piece] = add_queries(piece, keys)
        return found

    def _bias_columns(self) -> list[torch.Tensor | None]:
        cut, layout = self.cut_cpu, self.cut_cpu.layout
        found: list[torch.Tensor | None] = [None] * len(layout.counts)
        if self.key_positions is None or self.query_positions is None:
            return found
        keys = self.key_positions.split_with_sizes((layout.num_pages * layout.block_size).tolist())
        queries = self.query_positions.split_with_sizes(cut.rows.sizes.tolist())
        for piece, (group, tiles) in enumerate(zip(layout.groups.tolist(), layout.counts.tolist(), strict=True)):
            if limit := layout.rules[group].max_distance:
                distance = keys[piece].view(tiles, 1, -1) - queries[piece].view(tiles, -1, 1)
                found[piece] = bias_columns(distance, limit).view(-1)
        return found

    def _parts(self) -> list[tuple[Part, ...]]:
        return [
            () if bounds is None else tuple(map(Part, bounds[:-1], bounds[1:], slots))
            for bounds, slots in zip(self.cut_cpu.parts, self.part_slots, strict=True)
        ]


def _split(tensor: torch.Tensor | None, sizes: IntArray, wanted: BoolArray) -> list[torch.Tensor | None]:
    """Return each piece's share of a tensor, None for pieces that want none."""
    if tensor is None or not wanted.any():
        return [None] * len(sizes)
    shares = tensor.split_with_sizes(sizes.tolist())
    return [share if wants else None for share, wants in zip(shares, wanted.tolist(), strict=True)]


def _cut_parts(
    layout: Layout, hidden: IntArray, num_hidden: IntArray
) -> tuple[list[list[int] | None], tuple[tuple[torch.Tensor, ...], ...]]:
    """Return where the parts of each piece begin and end, in pages, and the ``hidden_slots`` of each part."""
    size = layout.block_size
    bounds: list[list[int] | None] = [None] * len(num_hidden)
    found: list[tuple[torch.Tensor, ...]] = [()] * len(num_hidden)
    limits = column_of(layout.rules, "piece_keys")[layout.groups]
    stops = num_hidden.cumsum()
    # Batches of several tiles were cut to the limit.
    for piece in ((layout.queries == 1) & (layout.num_pages * size > limits)).nonzero()[0].tolist():
        slots = hidden[stops[piece] - num_hidden[piece] : stops[piece]]
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
