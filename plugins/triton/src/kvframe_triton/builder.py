"""The metadata of attention in Triton: a step's work items, planned on the host."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Self

import attrs
import torch
from kvframe_kernels.triton.attention import PagedAttention
from kvframe_kernels.triton.attention_plan import Batch, IntArray, Programs, Work

from kvframe.contract import (
    RANGE_ENDS,
    SEQ_STARTS,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    GraphCapture,
    lookahead_ends,
)


@attrs.frozen(eq=False)
class TritonMetadata:
    """A step's metadata for the layers of an attention group.

    Attributes:
        block_table: ``[num_reqs, max_blocks], int32, device``.
        numbers: ``[num_numbers], int32, device``: the work of all programs.
        programs: The programs, by shape.
        causal: Whether queries see only their own and earlier positions.
        has_starts: Whether the batch has hidden tokens.
        range_ends: ``[num_tokens], int32, device``: the ends of the tokens' ranges; None for none.
    """

    block_table: torch.Tensor
    numbers: torch.Tensor
    programs: tuple[Programs, ...]
    causal: bool
    has_starts: bool
    range_ends: torch.Tensor | None = None

    @classmethod
    def of(
        cls, batch: Batch, work: Work, block_table: torch.Tensor, metadata: CommonAttentionMetadata | None = None
    ) -> Self:
        """Return work as a tensor on the host, which is copied to the device with the step.

        Args:
            batch: The step as it was planned.
            work: Its work.
            block_table: ``[num_reqs, max_blocks], int32, device``.
            metadata: The step; None if ranges do not count.
        """
        range_ends = None if metadata is None else metadata.extensions.get(RANGE_ENDS)
        return cls(
            with_whole_rows(block_table),
            work.tensor,
            work.programs,
            batch.causal,
            batch.seq_starts is not None,
            None if batch.range_ends is None or range_ends is None else range_ends.values,
        )


class TritonMetadataBuilder(AttentionMetadataBuilder):
    """Divides a step into work items."""

    capture = GraphCapture.ALWAYS
    on_host = frozenset()
    table_fields = frozenset({"block_table"})

    def __init__(self, attention: PagedAttention, dtype: torch.dtype, lookahead: int | None = None) -> None:
        """Keep the properties of the group's layers.

        Args:
            attention: Their attention.
            dtype: The dtype that it is computed in.
            lookahead: How many later tokens a query sees in a window in both directions; None for other masks.
        """
        self._planner = attention.planner(dtype)
        self._mask = attention.mask
        self._causal = attention.causal
        self._lookahead = lookahead

    @property
    def reuse_key(self) -> Hashable:
        """The properties of the layers that the division of a step depends on."""
        return self._planner, self._mask, self._causal, self._lookahead

    def build(self, metadata: CommonAttentionMetadata) -> TritonMetadata:
        """Return the step's work items."""
        (built,) = self.build_together([(self, metadata)])
        return built

    @classmethod
    def build_together(cls, builds: Sequence[tuple[Self, CommonAttentionMetadata]]) -> list[TritonMetadata]:
        """Return the work items of all groups; groups whose layers differ only in their masks are planned together."""
        alike: dict[Hashable, list[int]] = {}
        for index, (builder, metadata) in enumerate(builds):
            key = builder._planner, batch_key(metadata, builder._causal), builder._lookahead
            alike.setdefault(key, []).append(index)
        found: dict[int, TritonMetadata] = {}
        for indices in alike.values():
            builder, metadata = builds[indices[0]]
            batch = batch_of(metadata, builder._causal, builder._lookahead)
            works = builder._planner.plan(batch, [builds[index][0]._mask for index in indices])
            for index, work in zip(indices, works, strict=True):
                step = builds[index][1]
                found[index] = TritonMetadata.of(batch, work, step.block_table, step)
                if builder._lookahead is not None and batch.range_ends is not None:
                    found[index] = attrs.evolve(found[index], range_ends=torch.from_numpy(batch.range_ends))
        return [found[index] for index in range(len(builds))]

    def refreshed_fields(self, built: Any, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        """Return the block table."""
        return {"block_table": with_whole_rows(metadata.block_table)}


def batch_of(metadata: CommonAttentionMetadata, causal: bool, lookahead: int | None = None) -> Batch:
    """Return a step as the planner takes it.

    Args:
        metadata: The step.
        causal: Whether the layers' mask hides tokens.
        lookahead: How many later tokens a query sees in a window in both directions; None for other masks.
    """
    range_ends = _host_values(metadata, RANGE_ENDS) if metadata.causal and causal else None
    if lookahead is not None and metadata.causal:
        range_ends = lookahead_ends(metadata, lookahead)
    return Batch(
        query_start_loc=metadata.query_start_loc_cpu.numpy(),
        seq_lens=metadata.seq_lens_cpu.numpy(),
        seq_starts=_host_values(metadata, SEQ_STARTS),
        num_tokens=metadata.slot_mapping.shape[0],
        causal=metadata.causal and causal,
        max_query_len=metadata.max_query_len,
        static=metadata.static_shapes,
        range_ends=range_ends,
    )


def _host_values(metadata: CommonAttentionMetadata, name: str) -> IntArray | None:
    """Return the values of an extension; None if the step does not have it."""
    if name not in metadata.extensions:
        return None
    values_cpu = metadata.extensions[name].values_cpu
    assert values_cpu is not None
    found: IntArray = values_cpu.numpy()
    return found


def batch_key(metadata: CommonAttentionMetadata, causal: bool) -> Hashable:
    """Return a key that is equal for equal results of ``batch_of``, among values that exist at the same time."""
    extensions = (metadata.extensions.get(name) for name in (SEQ_STARTS, RANGE_ENDS))
    return (
        id(metadata.query_start_loc_cpu),
        id(metadata.seq_lens_cpu),
        *(None if each is None else id(each.values_cpu) for each in extensions),
        metadata.slot_mapping.shape[0],
        metadata.causal and causal,
        metadata.max_query_len,
        metadata.static_shapes,
    )


def with_whole_rows(block_table: torch.Tensor) -> torch.Tensor:
    """Return the table with contiguous rows, as the kernel reads them."""
    return block_table if block_table.stride(1) == 1 else block_table.contiguous()
