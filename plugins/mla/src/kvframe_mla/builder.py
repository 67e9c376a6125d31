"""The metadata of latent attention: chooses each request's form by cost, then groups requests into dense batches."""

from __future__ import annotations

import attrs
import numpy as np
import torch

from kvframe.contract import (
    RANGE_ENDS,
    SEQ_STARTS,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    GraphCapture,
)
from kvframe_mla.cost import Cost
from kvframe_mla.dense_batches import (
    ABSORBED,
    EXPANDED,
    SQUARE,
    HostDenseBatch,
    IntArray,
    Tiles,
    group_tiles,
    lay_out,
    most_tiles,
)


@attrs.frozen(eq=False)
class DenseBatch:
    """Tiles that are computed as one dense batch of ``num_queries`` queries over ``num_tokens`` gathered tokens.

    Attributes:
        form: ``ABSORBED``, ``SQUARE`` or ``EXPANDED``.
        num_tiles: Tiles in the batch.
        num_queries: Queries per tile; shorter tiles repeat their last one.
        num_tokens: Gathered tokens per tile, whole pages.
        pages: ``[num_tiles * num_pages], int32, device``: block ids to gather.
        query_rows: ``[num_tiles * num_queries], int64, device``: rows of the packed batch.
        outputs: ``[num_outputs], int64, device``: the queries that are not repetitions; None for all.
        output_rows: ``[num_outputs], int64, device``: the rows of these in the packed batch.
        last_seen: ``[num_tiles, num_queries], int64, device``: the last gathered token that each query sees.
        low: ``[num_tiles, 1], int64, device``: the first gathered token that they see; None if that is 0 for all.
        hidden: ``[num_hidden], int64, device``: gathered tokens that no query sees. They may hold anything, including
            NaN, and are set to zero. In a step of a graph, ``[num_tiles * num_tokens], bool, device``.
    """

    form: int
    num_tiles: int
    num_queries: int
    num_tokens: int
    pages: torch.Tensor
    query_rows: torch.Tensor
    outputs: torch.Tensor | None
    output_rows: torch.Tensor
    last_seen: torch.Tensor
    low: torch.Tensor | None
    hidden: torch.Tensor


class MLAMetadataBuilder(AttentionMetadataBuilder):
    """Makes the dense batches of a step."""

    capture = GraphCapture.ALWAYS
    on_host = frozenset({"block_table"})

    def __init__(self, cost: Cost, num_heads: int) -> None:
        """Keep the properties of the group's layers.

        Args:
            cost: Decides a request's form.
            num_heads: Query heads.
        """
        self._cost = cost
        self._num_heads = num_heads

    def build(self, metadata: CommonAttentionMetadata) -> tuple[DenseBatch, ...]:
        """Return the step's dense batches; at the sizes of a graph, all requests absorbed over its whole context."""
        if metadata.static_shapes:
            return self._build_static(metadata)
        tiles = self._tiles(metadata)
        if not len(tiles.request):
            return ()
        size = metadata.block_size
        dense_batches = group_tiles(tiles.split(self._num_heads, size), self._num_heads, size)
        range_ends = _range_ends(metadata)
        return tuple(_as_tensors(lay_out(part, size, range_ends), metadata) for part in dense_batches)

    def _build_static(self, metadata: CommonAttentionMetadata) -> tuple[DenseBatch, ...]:
        """Return dense batches whose shapes follow from those of the batch: a tile for each request.

        A request without tokens repeats one that has some, so that it writes to no other row.
        """
        starts, stop, low = _lengths_of(metadata)
        num_reqs, num_pages = metadata.block_table.shape
        num_tokens, num_queries = num_pages * metadata.block_size, metadata.max_query_len
        counts, last_row = np.diff(starts), metadata.slot_mapping.shape[0] - 1
        request: IntArray = np.where(counts > 0, np.arange(num_reqs), np.argmax(counts))
        own = np.minimum(np.arange(num_queries), np.maximum(counts[request] - 1, 0)[:, None])
        rows = np.minimum(starts[request][:, None] + own, last_row)
        last_seen = np.maximum(stop - counts, 0)[request][:, None] + own
        if (range_ends := _range_ends(metadata)) is not None:
            last_seen = np.maximum(last_seen, range_ends[rows] - 1)
        tokens = np.arange(num_tokens)
        hidden = (tokens < low[request][:, None]) | (tokens >= stop[request][:, None])
        pages = metadata.block_table[torch.from_numpy(request)]
        found, most = [], most_tiles(ABSORBED, num_queries, num_tokens, self._num_heads)
        for first in range(0, num_reqs, most):
            part = slice(first, first + most)
            query_rows = torch.from_numpy(rows[part].reshape(-1))
            found.append(
                DenseBatch(
                    form=ABSORBED,
                    num_tiles=len(request[part]),
                    num_queries=num_queries,
                    num_tokens=num_tokens,
                    pages=pages[part].reshape(-1),
                    query_rows=query_rows,
                    outputs=None,
                    output_rows=query_rows,
                    last_seen=torch.from_numpy(last_seen[part]),
                    low=torch.from_numpy(low[request][part, None]) if SEQ_STARTS in metadata.extensions else None,
                    hidden=torch.from_numpy(hidden[part].reshape(-1)),
                )
            )
        return tuple(found)

    def _tiles(self, metadata: CommonAttentionMetadata) -> Tiles:
        """Return one tile for each request with a new token."""
        starts, stop, low = _lengths_of(metadata)
        num_queries = np.diff(starts)
        position = stop - num_queries
        absorbs = self._cost.absorbs(num_queries, stop - low)
        is_square = (position == 0) & (low == 0) & (RANGE_ENDS not in metadata.extensions)
        tiles = Tiles(
            form=np.where(absorbs, ABSORBED, np.where(is_square, SQUARE, EXPANDED)),
            request=np.arange(len(stop)),
            first_row=starts[:-1],
            position=position,
            num_queries=num_queries,
            low=low,
            stop=stop,
            first_page=low // metadata.block_size,
            num_pages=-(-stop // metadata.block_size) - low // metadata.block_size,
        )
        return tiles if num_queries.all() else tiles.take(np.flatnonzero(num_queries))


def _lengths_of(metadata: CommonAttentionMetadata) -> tuple[IntArray, IntArray, IntArray]:
    """Return where each request's queries start, its tokens, and the first token that its queries see."""
    starts, stop = metadata.query_start_loc_cpu.numpy().astype(np.int64), metadata.seq_lens_cpu.numpy()
    low = np.zeros(len(stop), dtype=np.int64)
    if SEQ_STARTS in metadata.extensions:
        values_cpu = metadata.extensions[SEQ_STARTS].values_cpu
        assert values_cpu is not None
        low = values_cpu.numpy().astype(np.int64)
    return starts, stop.astype(np.int64), low


def _range_ends(metadata: CommonAttentionMetadata) -> IntArray | None:
    """Return where the range of each new token ends, 0 for none; None if the step has no ranges."""
    if RANGE_ENDS not in metadata.extensions:
        return None
    values_cpu = metadata.extensions[RANGE_ENDS].values_cpu
    assert values_cpu is not None
    return values_cpu.numpy().astype(np.int64)


def _as_tensors(dense: HostDenseBatch, metadata: CommonAttentionMetadata) -> DenseBatch:
    arrays = [dense.page_rows, dense.page_columns, dense.query_rows, dense.outputs]
    arrays += [dense.last_seen.reshape(-1), dense.low, dense.hidden]
    page_rows, page_columns, query_rows, outputs, last_seen, low, hidden = (
        torch.from_numpy(array.astype(np.int64, copy=False)) for array in arrays
    )
    repeats = len(dense.outputs) < len(dense.query_rows)
    return DenseBatch(
        form=dense.form,
        num_tiles=len(dense.low),
        num_queries=dense.num_queries,
        num_tokens=dense.num_pages * metadata.block_size,
        pages=metadata.block_table[page_rows, page_columns],
        query_rows=query_rows,
        outputs=outputs if repeats else None,
        output_rows=query_rows.index_select(0, outputs) if repeats else query_rows,
        last_seen=last_seen.view(dense.last_seen.shape),
        low=low[:, None] if dense.low.any() else None,
        hidden=hidden,
    )
