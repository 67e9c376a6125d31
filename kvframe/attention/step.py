"""From a step's batch to its metadata, once for each cache group."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvframe.attention.metadata import CommonAttentionMetadata
from kvframe.cache.block_table import BlockTable

IntArray = npt.NDArray[np.int64]


@attrs.frozen(kw_only=True, eq=False)
class StepBatch:
    """What one step computes, on the host.

    Attributes:
        rows: ``[num_reqs]``: each request's row in the block tables.
        num_computed: ``[num_reqs]``: tokens that were computed before.
        query_lens: ``[num_reqs]``: tokens that this step computes.
        logits_indices: ``[num_generating]``: the packed tokens whose logits are needed.
    """

    rows: IntArray
    num_computed: IntArray
    query_lens: IntArray
    logits_indices: IntArray

    @property
    def token_positions(self) -> tuple[IntArray, IntArray]:
        """For each packed token, its request's index in the batch and its position: ``[num_tokens]`` both."""
        requests = np.repeat(np.arange(len(self.rows)), self.query_lens)
        starts = np.cumsum(self.query_lens) - self.query_lens
        return requests, np.arange(len(requests)) + np.repeat(self.num_computed - starts, self.query_lens)


def build_metadata(
    batch: StepBatch, tables: Sequence[BlockTable], device: torch.device
) -> tuple[CommonAttentionMetadata, ...]:
    """Return the step's metadata, one per block table.

    Args:
        batch: At least one request, each with at least one token.
        tables: The groups' block tables, with room for every token of the batch.
        device: Where the backends run.
    """
    num_reqs = len(batch.rows)
    query_start_loc = np.zeros(num_reqs + 1, dtype=np.int32)
    np.cumsum(batch.query_lens, out=query_start_loc[1:])
    seq_lens = (batch.num_computed + batch.query_lens).astype(np.int32)
    requests, positions = batch.token_positions
    query_start_loc_cpu, seq_lens_cpu = torch.from_numpy(query_start_loc), torch.from_numpy(seq_lens)
    query_start_loc_device = query_start_loc_cpu.to(device, non_blocking=True)
    seq_lens_device = seq_lens_cpu.to(device, non_blocking=True)
    logits_indices = torch.from_numpy(batch.logits_indices).to(device, non_blocking=True)
    max_query_len, max_seq_len = int(batch.query_lens.max()), int(seq_lens.max())
    metadata = []
    for table in tables:
        size = table.block_size
        block_table = table.ids[batch.rows, : -(-max_seq_len // size)]
        slots = block_table[requests, positions // size].astype(np.int64) * size + positions % size
        metadata.append(
            CommonAttentionMetadata(
                query_start_loc=query_start_loc_device,
                query_start_loc_cpu=query_start_loc_cpu,
                seq_lens=seq_lens_device,
                seq_lens_cpu=seq_lens_cpu,
                num_reqs=num_reqs,
                num_actual_tokens=len(requests),
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
                block_table=torch.from_numpy(block_table).to(device, non_blocking=True),
                slot_mapping=torch.from_numpy(slots).to(device, non_blocking=True),
                block_size=size,
                logits_indices=logits_indices,
            )
        )
    return tuple(metadata)
