"""The metadata of a step: dense batches of tiles, made on the host, and their block masks, made on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import torch

from kvframe.contract import AttentionMetadataBuilder, CommonAttentionMetadata
from kvframe_flex.kernel import Places, find_blocks, keep_static
from kvframe_flex.pages import SINK, HostPiece, IntArray, Sight, cut_pieces

MIN_CAPACITY = 1 << 14
"""The smallest capacity of a piece in positions. It is part of a compiled kernel, and doubles when it is too small."""


@attrs.frozen(eq=False)
class Piece:
    """Tiles that are computed as one dense batch.

    Attributes:
        num_tiles: Tiles in the batch.
        num_queries: Queries per tile; shorter tiles repeat their last one.
        num_keys: Gathered tokens per tile, whole pages.
        causal: Whether the layers' mask function applies.
        query_rows: ``[num_tiles * num_queries], int64, device``: rows of the packed batch; None if they are its first
            rows in order.
        outputs: ``[num_outputs], int64, device``: the queries that are not repetitions; None for all.
        output_rows: ``[num_outputs], int64, device``: the rows of these in the packed batch; None likewise.
        hidden: ``[num_hidden], int64, device``: gathered tokens that no query sees, which may hold anything.
        key_positions: ``[num_tiles * num_keys], int32, device``: the positions of the gathered tokens, or ``HIDDEN``,
            or ``SINK``.
        query_positions: ``[num_tiles * num_queries], int32, device``: the positions of the queries.
        sizes: ``[3], int64, device``: as in ``Places``.
        places: These positions as the kernel reads them; None until the piece is copied to the device.
    """

    num_tiles: int
    num_queries: int
    num_keys: int
    causal: bool
    query_rows: torch.Tensor | None
    outputs: torch.Tensor | None
    output_rows: torch.Tensor | None
    hidden: torch.Tensor
    key_positions: torch.Tensor
    query_positions: torch.Tensor
    sizes: torch.Tensor
    places: Places | None = None

    @classmethod
    def of(cls, piece: HostPiece, causal: bool, num_rows: int) -> Piece:
        """Return a piece, on the host.

        Args:
            piece: The piece on the host.
            causal: Whether the layers' mask function applies.
            num_rows: Rows of the packed batch.
        """
        num_all = len(piece.query_rows)
        in_order = num_all == num_rows and bool((piece.query_rows == np.arange(num_all)).all())
        repeats = len(piece.outputs) < num_all
        return cls(
            num_tiles=piece.num_tiles,
            num_queries=piece.num_queries,
            num_keys=piece.num_keys,
            causal=causal,
            query_rows=None if in_order else _whole(piece.query_rows),
            outputs=_whole(piece.outputs) if repeats else None,
            output_rows=None if in_order else _whole(piece.query_rows[piece.outputs]),
            hidden=_whole(piece.hidden),
            key_positions=_whole(piece.key_positions, np.int32),
            query_positions=_whole(piece.query_positions, np.int32),
            sizes=torch.tensor([len(piece.key_positions), piece.num_queries, piece.num_keys]),
        )

    def finish(self, sight: Sight) -> Piece:
        """Return the piece with its ``places``, made on the device, because the mask from which blocks follow is large.

        Args:
            sight: The visible tokens of the layers' queries.
        """
        return attrs.evolve(self, places=self._places(sight))

    def _places(self, sight: Sight) -> Places:
        keys, queries = self.key_positions, self.query_positions
        num_positions = len(keys) + len(queries)
        positions = keys.new_empty(max(MIN_CAPACITY, 1 << (num_positions - 1).bit_length()))
        positions[: len(keys)] = keys
        positions[len(keys) : num_positions] = queries
        sizes = self.sizes.clone()
        keep_static(positions, sizes)
        key, query = keys.view(self.num_tiles, 1, -1), queries.view(self.num_tiles, -1, 1)
        seen = (key >= 0).expand(-1, self.num_queries, -1)
        if self.causal:
            seen = seen & sight.sees(query, key)
        if sight.has_sinks:
            seen = seen | (key == SINK)
        return Places(positions, sizes, *find_blocks(seen))


@attrs.frozen(eq=False)
class FlexMetadata:
    """A step's metadata for the layers of an attention group.

    Attributes:
        pieces: The dense batches.
        pages: For each piece ``[num_tiles * num_pages], int32, device``: block ids to gather.
        page_rows_cpu: ``[num_pages], int64, host``: the rows of the block table with the pages of all pieces.
        page_columns_cpu: ``[num_pages], int64, host``: likewise the columns.
    """

    pieces: tuple[Piece, ...]
    pages: tuple[torch.Tensor, ...]
    page_rows_cpu: torch.Tensor
    page_columns_cpu: torch.Tensor


class FlexMetadataBuilder(AttentionMetadataBuilder):
    """Makes the pieces of a step."""

    on_host = True
    table_fields = frozenset({"pages"})

    def __init__(self, sight: Sight, num_heads: int, is_compiled: bool) -> None:
        """Keep the properties of the group's layers.

        Args:
            sight: The visible tokens of their queries.
            num_heads: Their query heads.
            is_compiled: Whether kernels are compiled. A compiled kernel never has all scores in memory.
        """
        self._sight = sight
        self._num_heads_at_once = 1 if is_compiled else num_heads

    def build(self, metadata: CommonAttentionMetadata) -> FlexMetadata:
        """Return the step's pieces."""
        mask = self._sight.mask
        causal = metadata.causal and (mask is None or mask.causal)
        host = [*cut_pieces(metadata, self._sight, causal, self._num_heads_at_once)]
        nothing = np.empty(0, dtype=np.int64)
        rows = _whole(np.concatenate([nothing, *(piece.page_rows for piece in host)]))
        columns = _whole(np.concatenate([nothing, *(piece.page_columns for piece in host)]))
        return FlexMetadata(
            pieces=tuple(Piece.of(piece, causal, metadata.slot_mapping.shape[0]) for piece in host),
            pages=metadata.block_table[rows, columns].split_with_sizes([len(piece.page_rows) for piece in host]),
            page_rows_cpu=rows,
            page_columns_cpu=columns,
        )

    def finish(self, built: Any) -> FlexMetadata:
        """Return the metadata with the pieces' block masks."""
        finished: FlexMetadata = attrs.evolve(built, pieces=tuple(piece.finish(self._sight) for piece in built.pieces))
        return finished

    def refreshed_fields(self, built: Any, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        """Return the pages of all pieces."""
        pages = metadata.block_table[built.page_rows_cpu, built.page_columns_cpu]
        return {"pages": pages.split_with_sizes([len(each) for each in built.pages])}


def _whole(numbers: IntArray, dtype: type[np.signedinteger[Any]] = np.int64) -> torch.Tensor:
    return torch.from_numpy(numbers.astype(dtype, copy=False))
