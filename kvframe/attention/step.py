"""From a step's batch to its metadata, for all cache groups at once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvframe.attention.metadata import NO_EXTENSIONS, CommonAttentionMetadata, Extension
from kvframe.cache.block_table import BlockTables

IntArray = npt.NDArray[np.int64]


@attrs.frozen(kw_only=True, eq=False, slots=False)
class StepBatch:
    """What one step computes, on the host.

    Attributes:
        rows: ``[num_reqs]``: each request's row in the block tables.
        num_computed: ``[num_reqs]``: tokens that were computed before.
        query_lens: ``[num_reqs]``: tokens that this step computes, at least one each.
        generating_indices: ``[num_generating]``: the packed tokens that generate, in order; those of a request are its
            last ones.
        extensions: Further inputs of the step, by name; they reach the wrappers and backends of every group.
    """

    rows: IntArray
    num_computed: IntArray
    query_lens: IntArray
    generating_indices: IntArray
    extensions: Mapping[str, Extension] = NO_EXTENSIONS

    @cached_property
    def token_positions(self) -> tuple[IntArray, IntArray]:
        """For each packed token, its request's index in the batch and its position: ``[num_tokens]`` both."""
        requests = np.repeat(np.arange(len(self.rows)), self.query_lens)
        starts = np.cumsum(self.query_lens) - self.query_lens
        return requests, np.arange(len(requests)) + (self.num_computed - starts)[requests]


def build_metadata(batch: StepBatch, tables: BlockTables, device: torch.device) -> tuple[CommonAttentionMetadata, ...]:
    """Return the step's metadata, one per block table.

    The tables of one block size are read together, with one index operation and one copy to the device.

    Args:
        batch: At least one request, each with at least one token.
        tables: The groups' block tables, with room for every token of the batch.
        device: Where the backends run.
    """
    num_reqs = len(batch.rows)
    query_start_loc = np.zeros(num_reqs + 1, dtype=np.int32)
    np.cumsum(batch.query_lens, out=query_start_loc[1:])
    num_tokens = int(query_start_loc[-1])
    seq_lens = (batch.num_computed + batch.query_lens).astype(np.int32)
    requests, positions = batch.token_positions
    num_generating = len(batch.generating_indices)
    # One row at least, so that no layer is ever given an empty batch.
    generating = batch.generating_indices if num_generating else np.array([num_tokens - 1])
    query_start_loc_cpu, seq_lens_cpu = torch.from_numpy(query_start_loc), torch.from_numpy(seq_lens)
    generating_cpu = torch.from_numpy(generating)
    query_start_loc_device = query_start_loc_cpu.to(device, non_blocking=True)
    seq_lens_device = seq_lens_cpu.to(device, non_blocking=True)
    generating_device = generating_cpu.to(device, non_blocking=True)
    max_query_len, max_seq_len = int(batch.query_lens.max()), int(seq_lens.max())
    found: dict[int, CommonAttentionMetadata] = {}
    for stack in tables.stacks:
        size = stack.block_size
        block_tables = stack.ids[:, batch.rows, : -(-max_seq_len // size)]
        blocks, offsets = np.divmod(positions, size)
        slots = block_tables[:, requests, blocks] * np.int64(size) + offsets
        block_tables_device = torch.from_numpy(block_tables).to(device, non_blocking=True).unbind()
        slots_device = torch.from_numpy(slots).to(device, non_blocking=True).unbind()
        for group, block_table, slot_mapping in zip(stack.groups, block_tables_device, slots_device, strict=True):
            found[group] = CommonAttentionMetadata(
                query_start_loc=query_start_loc_device,
                query_start_loc_cpu=query_start_loc_cpu,
                seq_lens=seq_lens_device,
                seq_lens_cpu=seq_lens_cpu,
                num_reqs=num_reqs,
                num_actual_tokens=num_tokens,
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
                block_table=block_table,
                slot_mapping=slot_mapping,
                block_size=size,
                num_generating=num_generating,
                generating_indices=generating_device,
                generating_indices_cpu=generating_cpu,
                extensions=batch.extensions,
            )
    return tuple(found[group] for group in range(len(tables)))
