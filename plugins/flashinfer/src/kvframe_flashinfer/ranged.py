"""Divides a step with ranges of prompts into batches that each have one mask, because a plan has one."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np
import torch

from kvframe.contract import RANGE_ENDS, CommonAttentionMetadata, RangeRuns
from kvframe_flashinfer.pages import IntArray


@attrs.frozen(eq=False)
class MaskBatch:
    """A step, or those of its queries that have one mask.

    Attributes:
        common: The batch, on the host; its host copies, ``block_table`` and ``block_size`` are its own.
        rows: ``[num_rows], int64``: where its queries are in the step; None for the first ones.
        causal: Whether its queries see no token after them.
    """

    common: CommonAttentionMetadata
    rows: IntArray | None
    causal: bool


def has_ranges(metadata: CommonAttentionMetadata) -> bool:
    """Return whether a batch that is causal has ranges of prompts that see each other both ways."""
    return metadata.causal and RANGE_ENDS in metadata.extensions


def mask_batches(metadata: CommonAttentionMetadata, first: int = 0) -> Iterator[MaskBatch]:
    """Yield the queries in no range, and those in a range, of the requests from ``first`` on; none without queries.

    Args:
        metadata: A step with ranges, ``block_table`` on the host.
        first: The first request.
    """
    runs = RangeRuns.of(metadata)
    starts, requests = runs.query_start_loc.numpy(), runs.requests.numpy()
    # A step computes ranges as a whole, so a run in a range ends with it.
    seq_lens = metadata.seq_lens_cpu.numpy()[requests] - runs.num_later.numpy()
    for causal in (True, False):
        chosen = ((requests >= first) & (runs.is_causal.numpy() == causal)).nonzero()[0]
        if not len(chosen):
            continue
        query_lens = np.diff(starts)[chosen]
        query_start_loc = np.zeros(len(chosen) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=query_start_loc[1:])
        common = attrs.evolve(
            metadata,
            query_start_loc_cpu=torch.from_numpy(query_start_loc),
            seq_lens_cpu=torch.from_numpy(seq_lens[chosen]),
            block_table=metadata.block_table.index_select(0, runs.requests[torch.from_numpy(chosen)]),
        )
        rows = (starts[chosen] - query_start_loc[:-1]).repeat(query_lens) + np.arange(query_start_loc[-1])
        yield MaskBatch(common, rows.astype(np.int64), causal)
