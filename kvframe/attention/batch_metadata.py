"""Turns the batch of a step into its metadata, one value per cache group, and finds where its tokens are stored."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvframe.attention.nested import replace_tensors
from kvframe.cache.block_table import BlockTables, TableStack
from kvframe.contract.metadata import (
    NO_EXTENSIONS,
    RANGE_ENDS,
    SEQ_STARTS,
    Axis,
    CommonAttentionMetadata,
    Extension,
)
from kvframe.contract.order import IntArray
from kvframe.contract.slots import Slots
from kvframe.contract.specs import TOKENS

NO_INPUTS: Mapping[str, Any] = MappingProxyType({})


@attrs.frozen(kw_only=True, eq=False, slots=False)
class StepBatch:
    """What one step computes, on the host.

    Attributes:
        rows: ``[num_reqs]``: each request's row in the block tables.
        num_computed: ``[num_reqs]``: tokens that were computed before.
        query_lens: ``[num_reqs]``: tokens that this step computes, at least one of a request.
        generating_indices: ``[num_generating]``: the packed tokens that generate, in order; those of a request are its
            last ones.
        extensions: Further inputs of the step, by name; they reach the wrappers and backends of every group.
        input_lens: For each input sequence beside tokens, ``[num_reqs]``: its tokens; 0 for a request that has none. No
            request has a sequence that is missing.
        stores_input: Likewise, ``[num_reqs], bool``: whether the step stores its state; false if it was stored before.
        range_ends: ``[num_tokens]``: the extension ``RANGE_ENDS``; None if no new token is in a range.
    """

    rows: IntArray
    num_computed: IntArray
    query_lens: IntArray
    generating_indices: IntArray
    extensions: Mapping[str, Extension] = NO_EXTENSIONS
    input_lens: Mapping[str, IntArray] = NO_INPUTS
    stores_input: Mapping[str, npt.NDArray[np.bool_]] = NO_INPUTS
    range_ends: IntArray | None = None

    def seq_lens(self, sequence: str) -> npt.NDArray[np.int32]:
        """Return ``[num_reqs], int32``: the tokens that queries see of a sequence: of an input, all of them."""
        if sequence == TOKENS:
            return (self.num_computed + self.query_lens).astype(np.int32)
        return self.input_lens.get(sequence, np.zeros(len(self.rows))).astype(np.int32)

    @cached_property
    def max_query_len(self) -> int:
        """The most tokens that a request computes."""
        return int(self.query_lens.max())

    @cached_property
    def token_positions(self) -> tuple[IntArray, IntArray]:
        """For each packed token, its request's index in the batch and its position: ``[num_tokens]`` both."""
        if self.max_query_len == 1 == self.query_lens.min():
            return np.arange(len(self.rows)), self.num_computed.copy()
        requests = np.repeat(np.arange(len(self.rows)), self.query_lens)
        starts = np.cumsum(self.query_lens) - self.query_lens
        return requests, np.arange(len(requests)) + (self.num_computed - starts)[requests]


def build_metadata(batch: StepBatch, tables: BlockTables, device: torch.device) -> tuple[CommonAttentionMetadata, ...]:
    """Return the step's metadata, one per block table.

    The tables of one block size and sequence are read together, with one index operation and one copy to the device. A
    group that keeps state of an input sequence sees the queries of the step over that sequence: its lengths and blocks,
    no order between queries and keys, and no slot for any query.

    Args:
        batch: At least one request, each with at least one token.
        tables: The groups' block tables, with blocks for every token of the batch and of its inputs.
        device: Where the backends run.
    """
    query_start_loc = np.zeros(len(batch.rows) + 1, dtype=np.int32)
    np.cumsum(batch.query_lens, out=query_start_loc[1:])
    num_tokens = int(query_start_loc[-1])
    # At least one row, so that no layer is given an empty batch.
    generating = batch.generating_indices if len(batch.generating_indices) else np.array([num_tokens - 1])
    query_start_loc_cpu, generating_cpu = torch.from_numpy(query_start_loc), torch.from_numpy(generating)
    extensions = batch.extensions
    if batch.range_ends is not None:
        ends_cpu = torch.from_numpy(batch.range_ends.astype(np.int32))
        extensions = {**extensions, RANGE_ENDS: Extension(ends_cpu, Axis.TOKEN, ends_cpu)}
    lens_of: dict[str, torch.Tensor] = {}
    metadata_of: dict[int, CommonAttentionMetadata] = {}
    for stack in tables.stacks:
        is_of_tokens = stack.sequence == TOKENS
        seq_lens = batch.seq_lens(stack.sequence)
        lens_cpu = lens_of.setdefault(stack.sequence, torch.from_numpy(seq_lens))
        max_seq_len = int(seq_lens.max())
        # At least one column, so that no backend is given an empty table.
        width = max(1, -(-max_seq_len // stack.block_size))
        block_tables = torch.from_numpy(stack.ids[:, batch.rows, :width]).unbind()
        if is_of_tokens:
            slots = _slots(stack, batch.rows, *batch.token_positions)
        else:
            slots = np.zeros((len(stack.groups), num_tokens), dtype=np.int64)
        for group, block_table, slot_mapping in zip(
            stack.groups, block_tables, torch.from_numpy(slots).unbind(), strict=True
        ):
            metadata_of[group] = CommonAttentionMetadata(
                query_start_loc=query_start_loc_cpu,
                query_start_loc_cpu=query_start_loc_cpu,
                seq_lens=lens_cpu,
                seq_lens_cpu=lens_cpu,
                num_reqs=len(batch.rows),
                num_actual_tokens=num_tokens,
                max_query_len=batch.max_query_len,
                max_seq_len=max_seq_len,
                block_table=block_table,
                slot_mapping=slot_mapping,
                block_size=stack.block_size,
                num_generating=len(batch.generating_indices),
                generating_indices=generating_cpu,
                generating_indices_cpu=generating_cpu,
                # A sequence of an input is in no order.
                causal=is_of_tokens,
                extensions=extensions if is_of_tokens else batch.extensions,
            )
    for group, first_tokens in tables.first_tokens.items():
        first_cpu = torch.from_numpy(first_tokens[batch.rows].astype(np.int32))
        hidden = {**extensions, SEQ_STARTS: Extension(first_cpu, Axis.REQUEST, first_cpu)}
        metadata_of[group] = attrs.evolve(metadata_of[group], extensions=hidden)
    metadata = tuple(metadata_of[group] for group in sorted(metadata_of))
    if device.type == "cpu":
        return metadata
    return replace_tensors(metadata, lambda tensor: tensor.to(device, non_blocking=True))


# --- where tokens are stored ------------------------------------------------------------------------------------------


def input_slots(batch: StepBatch, tables: BlockTables, device: torch.device) -> dict[int, Slots]:
    """Return where a step stores the state of new inputs, ``[num_input_tokens]``, by group.

    These slots are not part of the batch metadata, because wrappers change which queries a backend sees, and never what
    is stored. The tokens of new inputs are packed in the order of their requests.

    Args:
        batch: The step.
        tables: The groups' block tables, with blocks for its inputs.
        device: Where the backends run.

    Returns:
        The slots; no entry for a group that stores nothing.
    """
    slots_of: dict[int, Slots] = {}
    for stack in tables.stacks:
        is_new = batch.stores_input.get(stack.sequence)
        if is_new is None or not is_new.any():
            continue
        lens = np.where(is_new, batch.input_lens[stack.sequence], 0)
        request_indices = np.repeat(np.arange(len(lens)), lens)
        starts = np.cumsum(lens) - lens
        positions = np.arange(len(request_indices)) - starts[request_indices]
        slots = _slots(stack, batch.rows, request_indices, positions)
        mappings = torch.from_numpy(slots).to(device, non_blocking=True).unbind()
        for group, mapping in zip(stack.groups, mappings, strict=True):
            slots_of[group] = split_mapping(mapping, stack.block_size)
    return slots_of


def split_mapping(mapping: torch.Tensor, block_size: int) -> Slots:
    """Return the slots of a step's tokens, with their block ids and offsets.

    Args:
        mapping: ``[num_stored], int64, device``: the slot of each row that a layer is given; negative if it is not
            stored.
        block_size: Tokens per block.
    """
    if not mapping.is_cpu:
        return Slots(mapping, block_size)
    blocks, offsets = np.divmod(np.maximum(mapping.numpy(), 0), block_size)
    return Slots(mapping, block_size, (torch.from_numpy(blocks), torch.from_numpy(offsets)))


def _slots(stack: TableStack, rows: IntArray, requests: IntArray, positions: IntArray) -> IntArray:
    """Return the slots of packed tokens, ``[num_groups, num_tokens]``: ``block_id * block_size + offset``.

    Args:
        stack: The tables.
        rows: ``[num_reqs]``: the requests' rows.
        requests: ``[num_tokens]``: of each token, its request's index in the batch.
        positions: ``[num_tokens]``: its position in the stack's sequence.
    """
    blocks, offsets = np.divmod(positions, stack.block_size)
    slots: IntArray = stack.ids[:, rows[requests], blocks] * np.int64(stack.block_size) + offsets
    return slots
