"""The metadata of a step: dense batches of tiles, and for each its block mask, made once for all layers of a group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvframe.attention.backend import AttentionMetadataBuilder
from kvframe.attention.metadata import CommonAttentionMetadata
from kvframe_flex.kernel import Places, find_blocks, keep_static
from kvframe_flex.pages import SINK, HostPiece, Sight, cut_pieces

MIN_CAPACITY = 1 << 14
"""Positions that a piece has room for at least; the room is part of a compiled kernel, and doubles when it is full."""


@attrs.frozen(eq=False)
class Piece:
    """Tiles that are computed as one dense batch.

    Attributes:
        num_tiles: Tiles in the batch.
        num_queries: Queries per tile; shorter tiles repeat their last one.
        num_keys: Gathered tokens per tile, whole pages.
        query_rows: ``[num_tiles * num_queries], int64, device``: rows of the packed batch; None where they are its
            first ones in order.
        outputs: ``[num_outputs], int64, device``: which of these are no repetitions; None for all.
        output_rows: ``[num_outputs], int64, device``: the rows of the packed batch that they are; None likewise.
        hidden: ``[num_hidden], int64, device``: gathered tokens that no query sees, which may hold anything.
        places: Where queries and tokens stand.
    """

    num_tiles: int
    num_queries: int
    num_keys: int
    query_rows: torch.Tensor | None
    outputs: torch.Tensor | None
    output_rows: torch.Tensor | None
    hidden: torch.Tensor
    places: Places


@attrs.frozen(eq=False)
class FlexMetadata:
    """What the layers of an attention group read in a step.

    Attributes:
        causal: Whether the layers' mask function holds.
        pieces: The dense batches.
        pages: For each ``[num_tiles * num_pages], int32, device``: block ids to gather.
        page_rows: ``[num_pages], int64, device``: of all pieces, the rows of the block table where they stand.
        page_columns: ``[num_pages], int64, device``: likewise the columns.
    """

    causal: bool
    pieces: tuple[Piece, ...]
    pages: tuple[torch.Tensor, ...]
    page_rows: torch.Tensor
    page_columns: torch.Tensor


class FlexMetadataBuilder(AttentionMetadataBuilder):
    """Makes the pieces of a step.

    It is not ``on_host``: its block masks are large and made on the device, of arrays that it brings there in one copy
    of its own.
    """

    table_fields = frozenset({"pages"})

    def __init__(self, sight: Sight, num_heads: int, device: torch.device, is_compiled: bool) -> None:
        """Take what the layers of the group have in common.

        Args:
            sight: What their queries see.
            num_heads: Their query heads.
            device: Where the pieces are used.
            is_compiled: Whether they are for a compiled kernel, which never has all scores at a time.
        """
        self._sight = sight
        self._num_heads_at_once = 1 if is_compiled else num_heads
        self._device = device
        self._is_compiled = is_compiled

    def build(self, metadata: CommonAttentionMetadata) -> FlexMetadata:
        """Return the step's pieces."""
        mask = self._sight.mask
        causal = metadata.causal and (mask is None or mask.causal)
        host = [*cut_pieces(metadata, self._sight, causal, self._num_heads_at_once)]
        nothing = np.empty(0, dtype=np.int64)
        arrays = [
            np.concatenate([nothing, *(piece.page_rows for piece in host)]),
            np.concatenate([nothing, *(piece.page_columns for piece in host)]),
        ]
        for piece in host:
            arrays += [piece.query_rows, piece.outputs, piece.query_rows[piece.outputs], piece.hidden]
            arrays += [piece.key_positions, piece.query_positions, self._sizes(piece)]
        rows, columns, *rest = self._to_device(arrays)
        pieces = [
            self._make(piece, causal, rest[7 * index : 7 * index + 7], metadata.slot_mapping.shape[0])
            for index, piece in enumerate(host)
        ]
        pages = metadata.block_table[rows, columns].split_with_sizes([len(piece.page_rows) for piece in host])
        return FlexMetadata(causal, tuple(pieces), tuple(pages), rows, columns)

    def refreshed_fields(self, built: Any, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        """Return the pages of all pieces."""
        pages = metadata.block_table[built.page_rows, built.page_columns]
        return {"pages": tuple(pages.split_with_sizes([len(each) for each in built.pages]))}

    @staticmethod
    def _sizes(piece: HostPiece) -> npt.NDArray[np.int64]:
        return np.array([len(piece.key_positions), piece.num_queries, piece.num_keys], dtype=np.int64)

    def _make(self, piece: HostPiece, causal: bool, uploaded: list[torch.Tensor], num_rows: int) -> Piece:
        query_rows, outputs, output_rows, hidden, keys, queries, sizes = uploaded
        num_all = len(piece.query_rows)
        in_order = num_all == num_rows and bool((piece.query_rows == np.arange(num_all)).all())
        repeats = len(piece.outputs) < num_all
        return Piece(
            num_tiles=piece.num_tiles,
            num_queries=piece.num_queries,
            num_keys=piece.num_keys,
            query_rows=None if in_order else query_rows,
            outputs=outputs if repeats else None,
            output_rows=None if in_order else output_rows,
            hidden=hidden,
            places=self._places(piece, causal, keys.int(), queries.int(), sizes),
        )

    def _places(
        self, piece: HostPiece, causal: bool, keys: torch.Tensor, queries: torch.Tensor, sizes: torch.Tensor
    ) -> Places:
        num_positions = len(keys) + len(queries)
        positions = keys.new_empty(max(MIN_CAPACITY, 1 << (num_positions - 1).bit_length()))
        positions[: len(keys)] = keys
        positions[len(keys) : num_positions] = queries
        sizes = sizes.clone()
        keep_static(positions, sizes)
        key, query = keys.view(piece.num_tiles, 1, -1), queries.view(piece.num_tiles, -1, 1)
        seen = (key >= 0).expand(-1, piece.num_queries, -1)
        if causal:
            seen = seen & self._sight.sees(query, key)
        if self._sight.has_sinks:
            seen = seen | (key == SINK)
        return Places(positions, sizes, *find_blocks(seen))

    def _to_device(self, arrays: list[npt.NDArray[Any]]) -> tuple[torch.Tensor, ...]:
        """Copy arrays of whole numbers to the device as one."""
        there = torch.from_numpy(np.concatenate(arrays)).to(self._device, non_blocking=True)
        return there.split_with_sizes([len(array) for array in arrays])
