"""What hides tokens from the queries of a step, as the practical torch backend adds it to their scores."""

from __future__ import annotations

import math

import numpy as np
import torch

from kvframe.builtin.torch_layout import Layout


def tile_bias(
    num_keys: int, dtype: torch.dtype, hidden: torch.Tensor, padded_pages: torch.Tensor | None, block_size: int
) -> torch.Tensor:
    """Return what holds for all queries of a tile, for the tokens of all pieces: ``[num_keys], device``.

    Args:
        num_keys: Gathered tokens of all pieces.
        dtype: Of the bias.
        hidden: ``[num_hidden], int64, device``: tokens, counted through all pieces, that are hidden.
        padded_pages: ``[num_padded], int64, device``: pages, counted likewise, that are hidden; None for none.
        block_size: Tokens per page.
    """
    bias = _zeros(num_keys, dtype, hidden.device)
    bias.index_fill_(0, hidden, -math.inf)
    if padded_pages is not None:
        bias.view(-1, block_size).index_fill_(0, padded_pages, -math.inf)
    return bias


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


def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # NumPy asks for memory that is zeroed, and the system has such at hand; torch writes the zeros.
    return torch.from_numpy(np.zeros(size * dtype.itemsize, dtype=np.uint8)).view(dtype)


def _hide(bias: torch.Tensor, distance: torch.Tensor) -> None:
    """Set to -inf where a distance, which is never 0, is negative; this is faster than a mask."""
    torch.minimum(bias, distance.mul_(math.inf), out=bias)
