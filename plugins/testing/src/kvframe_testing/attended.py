"""Finds the slots that each query attends to, to compare them before and after a wrapper.

Attention depends on the set of slots only: the order of the slots and of the batch's rows does not matter.
"""

from __future__ import annotations

import attrs
import torch

from kvframe.contract.metadata import (
    RANGE_ENDS,
    SEQ_STARTS,
    CommonAttentionMetadata,
)
from kvframe.contract.specs import KVCacheSpec, LayerSpec
from kvframe.contract.wrapper import DROPS_TOKENS, FieldUse, MetadataWrapper
from kvframe_testing.reference import visible_tokens


def find_difference(
    wrapper: MetadataWrapper, layer: LayerSpec, metadata: CommonAttentionMetadata, result: CommonAttentionMetadata
) -> str:
    """Return one sentence that says how a wrapper's result changes attention; empty if it does not change it.

    For a wrapper that drops tokens, the generating tokens are compared. If the wrapper resets ``causal``, the original
    batch is taken with the wrapper's value.
    """
    kept_tokens, drops = [*range(metadata.num_actual_tokens)], DROPS_TOKENS in wrapper.effects
    if drops and metadata.generating_indices_cpu is not None:
        kept_tokens = metadata.generating_indices_cpu[: metadata.num_generating].tolist()
    if result.num_actual_tokens != len(kept_tokens):
        condition = "generate" if drops else "go in, and it does not declare that it drops tokens"
        return f"{result.num_actual_tokens} tokens come out where {len(kept_tokens)} {condition}"
    spec_before, spec_after = layer.spec, wrapper.wrapped_layer(layer).spec
    if spec_before is None or spec_after is None:
        return ""
    is_reset = wrapper.fields["causal"] is FieldUse.RESET
    declared = attrs.evolve(metadata, causal=result.causal) if is_reset else metadata
    slots_before = attended_slots(declared, spec_before)
    slots_after = attended_slots(result, spec_after)
    slots, new_slots = metadata.slot_mapping.tolist(), result.slot_mapping.tolist()
    for row, token in enumerate(kept_tokens):
        if slots[token] != new_slots[row]:
            return f"token {token} of the batch has the slot {slots[token]} before and {new_slots[row]} after"
        if slots_before[token] != slots_after[row]:
            lost, new = sorted(slots_before[token] - slots_after[row]), sorted(slots_after[row] - slots_before[token])
            return f"token {token} of the batch no longer attends to the slots {lost}, and attends to {new} instead"
    return ""


def attended_slots(metadata: CommonAttentionMetadata, spec: KVCacheSpec) -> list[set[int]]:
    """Return the slots that each packed token attends to, without padding; -1 for tokens without a block."""
    starts, hidden = metadata.query_start_loc_cpu.tolist(), [0] * metadata.num_reqs
    if SEQ_STARTS in metadata.extensions:
        hidden = metadata.extensions[SEQ_STARTS].values.tolist()
    ends = metadata.extensions[RANGE_ENDS].values.tolist() if RANGE_ENDS in metadata.extensions else []
    slots: list[set[int]] = []
    for request, seq_len in enumerate(metadata.seq_lens_cpu.tolist()):
        start, stop = starts[request : request + 2]
        visible = visible_tokens(
            spec,
            seq_len - (stop - start),
            seq_len,
            causal=metadata.causal,
            num_hidden=hidden[request],
            range_ends=ends[start:stop],
        )
        blocks, positions = metadata.block_table[request].long(), torch.arange(seq_len)
        in_table = positions < len(blocks) * metadata.block_size
        block_of = blocks[(positions // metadata.block_size).clamp(max=len(blocks) - 1)]
        slot_of = torch.where(in_table, block_of * metadata.block_size + positions % metadata.block_size, -1)
        slots += [{*slot_of[row].tolist()} for row in visible]
    return slots
