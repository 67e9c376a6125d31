"""What hides tokens from the queries of a step, as the practical torch backend adds it to their scores."""

from __future__ import annotations

import math

import torch

from kvframe.builtin.torch_layout import Layout
from kvframe.builtin.torch_tiles import Rules

MAX_KEPT_BYTES = 1 << 22
"""Bytes of the masks that a builder keeps from one step to the next."""


def key_bias(
    memory: torch.Tensor, hidden_slots: torch.Tensor, padded_pages: torch.Tensor | None, block_size: int
) -> torch.Tensor:
    """Write and return what holds for all queries of a tile: ``memory``, ``[num_keys], device``.

    Args:
        memory: For the gathered tokens of a piece; what is in it does not matter.
        hidden_slots: As in a ``Piece``.
        padded_pages: Likewise.
        block_size: Tokens per page.
    """
    memory.zero_().index_fill_(0, hidden_slots, -math.inf)
    if padded_pages is not None:
        memory.view(-1, block_size).index_fill_(0, padded_pages, -math.inf)
    return memory


class Bands:
    """The masks of aligned tiles: from the last keys on, all see the same, so that a short one is part of a long one.

    They are kept from one step to the next, since they depend on no request.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """Take what all masks have in common."""
        self._dtype = dtype
        self._device = device
        self._kept: dict[tuple[int, int, int, int], torch.Tensor] = {}

    def mask(self, rules: Rules, num_queries: int, num_behind: int, num_keys: int) -> torch.Tensor:
        """Return what is added to the scores, ``[1, 1, group_size * num_queries, num_keys], device``, strided.

        Args:
            rules: Those of the group.
            num_queries: Queries of a tile.
            num_behind: Tokens behind the last query's own, up to the end of the last page.
            num_keys: Gathered tokens of each tile.
        """
        key = (rules.window, rules.group_size, num_queries, num_behind)
        band = self._kept.get(key)
        if band is None or band.shape[3] < num_keys:
            row_bytes = rules.group_size * num_queries * self._dtype.itemsize
            ample = 1 << (num_keys - 1).bit_length()
            is_kept = row_bytes * ample <= MAX_KEPT_BYTES
            band = self._make(rules, num_queries, num_behind, ample if is_kept else num_keys)
            if is_kept:
                if sum(each.nbytes for each in self._kept.values()) + band.nbytes > MAX_KEPT_BYTES:
                    self._kept.clear()
                self._kept[key] = band
        return band.narrow(3, band.shape[3] - num_keys, num_keys)

    def _make(self, rules: Rules, num_queries: int, num_behind: int, num_keys: int) -> torch.Tensor:
        # Made outside of inference mode, so that a later step may read it in either mode.
        with torch.inference_mode(False):
            column = torch.arange(num_keys, dtype=torch.int32, device=self._device)
            own = torch.arange(num_queries, dtype=torch.int32, device=self._device)[:, None]
            distance = own + (num_keys - num_behind - num_queries) - column
            hidden = (distance < 0) | (distance >= rules.window)
            band = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
            return band.masked_fill_(hidden, -math.inf).repeat(rules.group_size, 1)[None, None]


class QueryBias:
    """Adds to the bias of tiles with several queries what only some of these see."""

    def __init__(self, layout: Layout, own: torch.Tensor, sink_ends: torch.Tensor | None) -> None:
        """Take where the queries of all pieces stand.

        Args:
            layout: Where everything stands.
            own: As in ``Pieces``.
            sink_ends: Likewise.
        """
        self._layout = layout
        self._own = own.split_with_sizes((layout.counts * layout.queries).tolist())
        self._sinks = None if sink_ends is None else sink_ends.split_with_sizes(layout.counts.tolist())
        num_columns = int(layout.widths.max()) * layout.block_size
        self._column = torch.arange(num_columns, dtype=torch.float32, device=own.device)

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


def _hide(bias: torch.Tensor, distance: torch.Tensor) -> None:
    """Set to -inf where a distance, which is never 0, is negative; this is faster than a mask."""
    torch.minimum(bias, distance.mul_(math.inf), out=bias)
