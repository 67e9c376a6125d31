"""The metadata of a step: dense batches of tiles, made on the host, and their block masks, made on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import torch

from kvframe.contract import AttentionMetadataBuilder, CommonAttentionMetadata
from kvframe_flex.kernel import Places, find_blocks, keep_static, seen_with_ends
from kvframe_flex.pages import SINK, HostDenseBatch, IntArray, Visibility, make_dense_batches

MIN_CAPACITY = 1 << 14
"""The smallest capacity of a dense batch in positions. It is part of a compiled kernel, and doubles when exceeded."""


@attrs.frozen(eq=False)
class DenseBatch:
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
        query_ends: ``[num_tiles * num_queries], int32, device``: as in ``HostDenseBatch``; None likewise.
        sizes: ``[4], int64, device``: as in ``Places``.
        places: These positions as the kernel reads them; None until the dense batch is copied to the device.
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
    query_ends: torch.Tensor | None
    sizes: torch.Tensor
    places: Places | None = None

    @classmethod
    def of(cls, dense: HostDenseBatch, causal: bool, num_rows: int) -> DenseBatch:
        """Return a dense batch, on the host.

        Args:
            dense: The dense batch on the host.
            causal: Whether the layers' mask function applies.
            num_rows: Rows of the packed batch.
        """
        num_all = len(dense.query_rows)
        in_order = num_all == num_rows and bool((dense.query_rows == np.arange(num_all)).all())
        repeats = len(dense.outputs) < num_all
        return cls(
            num_tiles=dense.num_tiles,
            num_queries=dense.num_queries,
            num_keys=dense.num_keys,
            causal=causal,
            query_rows=None if in_order else _whole(dense.query_rows),
            outputs=_whole(dense.outputs) if repeats else None,
            output_rows=None if in_order else _whole(dense.query_rows[dense.outputs]),
            hidden=_whole(dense.hidden),
            key_positions=_whole(dense.key_positions, np.int32),
            query_positions=_whole(dense.query_positions, np.int32),
            query_ends=None if dense.query_ends is None else _whole(dense.query_ends, np.int32),
            sizes=torch.tensor([len(dense.key_positions), dense.num_queries, dense.num_keys, num_all]),
        )

    def finish(self, visibility: Visibility) -> DenseBatch:
        """Return the dense batch with its ``places``, made on the device, because the mask of all pairs is large.

        Args:
            visibility: The visible tokens of the layers' queries.
        """
        return attrs.evolve(self, places=self._places(visibility))

    def _places(self, visibility: Visibility) -> Places:
        keys, queries, ends = self.key_positions, self.query_positions, self.query_ends
        every = [keys, queries] if ends is None else [keys, queries, ends]
        num_positions = sum(map(len, every))
        positions = keys.new_empty(max(MIN_CAPACITY, 1 << (num_positions - 1).bit_length()))
        torch.cat(every, out=positions[:num_positions])
        sizes = self.sizes.clone()
        keep_static(positions, sizes)
        key, query = keys.view(self.num_tiles, 1, -1), queries.view(self.num_tiles, -1, 1)
        seen = (key >= 0).expand(-1, self.num_queries, -1)
        if self.causal and ends is not None:
            seen = seen & seen_with_ends(visibility.sees, query, key, ends.view(self.num_tiles, -1, 1))
        elif self.causal:
            seen = seen & visibility.sees(query, key)
        if visibility.has_sinks:
            seen = seen | (key == SINK)
        return Places(positions, sizes, *find_blocks(seen), has_ends=ends is not None)


@attrs.frozen(eq=False)
class FlexMetadata:
    """A step's metadata for the layers of an attention group.

    Attributes:
        dense_batches: The dense batches.
        pages: For each dense batch ``[num_tiles * num_pages], int32, device``: block ids to gather.
        page_rows_cpu: ``[num_pages], int64, host``: the rows of the block table with the pages of all dense batches.
        page_columns_cpu: ``[num_pages], int64, host``: likewise the columns.
    """

    dense_batches: tuple[DenseBatch, ...]
    pages: tuple[torch.Tensor, ...]
    page_rows_cpu: torch.Tensor
    page_columns_cpu: torch.Tensor


class FlexMetadataBuilder(AttentionMetadataBuilder):
    """Makes the dense batches of a step."""

    on_host = frozenset({"block_table"})
    table_fields = frozenset({"pages"})

    def __init__(self, visibility: Visibility, num_heads: int, is_compiled: bool) -> None:
        """Keep the properties of the group's layers.

        Args:
            visibility: The visible tokens of their queries.
            num_heads: Their query heads.
            is_compiled: Whether kernels are compiled. A compiled kernel never has all scores in memory.
        """
        self._visibility = visibility
        self._num_heads_at_once = 1 if is_compiled else num_heads

    def build(self, metadata: CommonAttentionMetadata) -> FlexMetadata:
        """Return the step's dense batches."""
        mask = self._visibility.mask
        causal = metadata.causal and (mask is None or not mask.sees_all)
        host = [*make_dense_batches(metadata, self._visibility, causal, self._num_heads_at_once)]
        nothing = np.empty(0, dtype=np.int64)
        rows = _whole(np.concatenate([nothing, *(dense.page_rows for dense in host)]))
        columns = _whole(np.concatenate([nothing, *(dense.page_columns for dense in host)]))
        return FlexMetadata(
            dense_batches=tuple(DenseBatch.of(dense, causal, metadata.slot_mapping.shape[0]) for dense in host),
            pages=metadata.block_table[rows, columns].split_with_sizes([len(dense.page_rows) for dense in host]),
            page_rows_cpu=rows,
            page_columns_cpu=columns,
        )

    def finish(self, built: Any) -> FlexMetadata:
        """Return the metadata with the dense batches' block masks."""
        finished: FlexMetadata = attrs.evolve(
            built, dense_batches=tuple(dense.finish(self._visibility) for dense in built.dense_batches)
        )
        return finished

    def refreshed_fields(self, built: Any, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        """Return the pages of all dense batches."""
        pages = metadata.block_table[built.page_rows_cpu, built.page_columns_cpu]
        return {"pages": pages.split_with_sizes([len(each) for each in built.pages])}


def _whole(numbers: IntArray, dtype: type[np.signedinteger[Any]] = np.int64) -> torch.Tensor:
    return torch.from_numpy(numbers.astype(dtype, copy=False))
