"""The metadata of attention in Triton: a step's work items, cut on the host."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import attrs
import torch
from kvframe_kernels.triton.attention import DeviceWork, PagedAttention
from kvframe_kernels.triton.attention_plan import NUM_PART_FIELDS, Batch, Work

from kvframe.attention.backend import AttentionMetadataBuilder
from kvframe.attention.capture import GraphCapture
from kvframe.attention.metadata import SEQ_STARTS, CommonAttentionMetadata

NO_PARTS = torch.empty(0, NUM_PART_FIELDS, dtype=torch.int32)
"""One for all work that has none: what is the same tensor is brought to the device once."""


@attrs.frozen(eq=False)
class TritonMetadata:
    """What the layers of an attention group read in a step.

    Attributes:
        block_table: ``[num_reqs, max_blocks], int32, device``.
        work: The work items, by shape of programs.
        causal: Whether queries see only their own and earlier positions.
        has_starts: Whether the batch has tokens that are hidden.
    """

    block_table: torch.Tensor
    work: tuple[DeviceWork, ...]
    causal: bool
    has_starts: bool


class TritonMetadataBuilder(AttentionMetadataBuilder):
    """Cuts a step into work items."""

    capture = GraphCapture.ALWAYS
    on_host = True
    table_fields = frozenset({"block_table"})

    def __init__(self, attention: PagedAttention, dtype: torch.dtype) -> None:
        """Take what the layers of the group have in common.

        Args:
            attention: Their attention.
            dtype: The dtype that it is computed in.
        """
        self._attention = attention
        self._dtype = dtype

    @property
    def reuse_key(self) -> Hashable:
        """What of the layers decides how a step is cut."""
        return self._attention.plan_key(self._dtype)

    def build(self, metadata: CommonAttentionMetadata) -> TritonMetadata:
        """Return the step's work items."""
        batch = batch_of(metadata, self._attention.causal)
        return TritonMetadata(
            block_table=with_whole_rows(metadata.block_table),
            work=as_tensors(self._attention.plan(batch, self._dtype)),
            causal=batch.causal,
            has_starts=batch.seq_starts is not None,
        )

    def refreshed_fields(self, built: Any, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        """Return the block table."""
        return {"block_table": with_whole_rows(metadata.block_table)}


def batch_of(metadata: CommonAttentionMetadata, causal: bool) -> Batch:
    """Return a step as its work is cut; ``causal`` is what the layers' mask says."""
    seq_starts = None
    if SEQ_STARTS in metadata.extensions:
        values_cpu = metadata.extensions[SEQ_STARTS].values_cpu
        assert values_cpu is not None
        seq_starts = values_cpu.numpy()
    return Batch(
        query_start_loc=metadata.query_start_loc_cpu.numpy(),
        seq_lens=metadata.seq_lens_cpu.numpy(),
        seq_starts=seq_starts,
        num_tokens=metadata.slot_mapping.shape[0],
        causal=metadata.causal and causal,
        max_query_len=metadata.max_query_len,
        static=metadata.static_shapes,
    )


def with_whole_rows(block_table: torch.Tensor) -> torch.Tensor:
    """Return the table with the entries of a row side by side, as the kernel reads them."""
    return block_table if block_table.stride(1) == 1 else block_table.contiguous()


def as_tensors(work: Sequence[Work]) -> tuple[DeviceWork, ...]:
    """Return the same work as tensors on the host, which the step's copy brings to the device."""
    return tuple(
        DeviceWork(
            each.tiling,
            each.heads,
            torch.from_numpy(each.items),
            torch.from_numpy(each.parts) if len(each.parts) else NO_PARTS,
            each.num_slots,
        )
        for each in work
    )
