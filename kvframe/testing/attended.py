"""Finds the slots that each query attends to, to compare them before and after a wrapper.

Attention depends on the set of slots only: the order of the slots and of the batch's rows does not matter.
"""

from __future__ import annotations

import attrs

from kvframe.contract.metadata import (
    NO_EXTENSIONS,
    RANGE_ENDS,
    SEQ_STARTS,
    CommonAttentionMetadata,
)
from kvframe.contract.specs import KVCacheSpec, LayerSpec
from kvframe.contract.wrapper import CHANGES_MASK, DROPS_TOKENS, FieldUse, MetadataWrapper


def find_difference(
    wrapper: MetadataWrapper, layer: LayerSpec, metadata: CommonAttentionMetadata, wrapped: CommonAttentionMetadata
) -> str:
    """Return one sentence that says how a wrapper changes attention; empty if it does not change it.

    For a wrapper that drops tokens, the generating tokens are compared. For a wrapper that changes the mask, attention
    after it is compared with the mask of ``wrapped_layer`` over the original batch. If the wrapper resets ``causal``,
    the original batch is taken with the wrapper's value.
    """
    kept_tokens, drops = [*range(metadata.num_actual_tokens)], DROPS_TOKENS in wrapper.effects
    if drops and metadata.generating_indices_cpu is not None:
        kept_tokens = metadata.generating_indices_cpu[: metadata.num_generating].tolist()
    if wrapped.num_actual_tokens != len(kept_tokens):
        which = "generate" if drops else "go in, and it does not declare that it drops tokens"
        return f"{wrapped.num_actual_tokens} tokens come out where {len(kept_tokens)} {which}"
    after = wrapper.wrapped_layer(layer).spec
    before = after if CHANGES_MASK in wrapper.effects else layer.spec
    if before is None or after is None:
        return ""
    expected = attended_slots(_as_declared(wrapper, layer, metadata, wrapped), before)
    attended = attended_slots(wrapped, after)
    slots, new_slots = metadata.slot_mapping.tolist(), wrapped.slot_mapping.tolist()
    for row, token in enumerate(kept_tokens):
        if slots[token] != new_slots[row]:
            return f"token {token} of the batch has the slot {slots[token]} before and {new_slots[row]} after"
        if expected[token] != attended[row]:
            lost, new = sorted(expected[token] - attended[row]), sorted(attended[row] - expected[token])
            return f"token {token} of the batch no longer attends to the slots {lost}, and attends to {new} instead"
    return ""


def attended_slots(metadata: CommonAttentionMetadata, spec: KVCacheSpec) -> list[set[int]]:
    """Return the slots that each packed token attends to, without padding; -1 for tokens without a block."""
    is_local = metadata.causal and (spec.mask is None or not spec.mask.sees_all)
    num_later = 0 if spec.mask is None else spec.mask.lookahead or 0
    starts, tables = metadata.query_start_loc_cpu.tolist(), metadata.block_table.tolist()
    hidden = [0] * metadata.num_reqs
    if SEQ_STARTS in metadata.extensions:
        hidden = metadata.extensions[SEQ_STARTS].values.tolist()
    ends = metadata.extensions[RANGE_ENDS].values.tolist() if RANGE_ENDS in metadata.extensions else None
    slots: list[set[int]] = []
    for request, seq_len in enumerate(metadata.seq_lens_cpu.tolist()):
        blocks = tables[request]
        num_new = starts[request + 1] - starts[request]
        for position in range(seq_len - num_new, seq_len):
            ranges: tuple[tuple[int, int], ...] = ((0, seq_len),)
            if is_local:
                ranges = (*spec.live_ranges(position), (position, min(seq_len, position + 1 + num_later)))
            tokens = [token for start, stop in ranges for token in range(max(start, hidden[request]), stop)]
            if is_local and spec.is_sparse:
                assert spec.mask_function is not None
                tokens = [token for token in tokens if spec.mask_function(position, token)]
            if ends is not None and is_local:
                tokens += range(position + 1, ends[len(slots)])
            slots.append({_slot(blocks, token, metadata.block_size) for token in tokens})
    return slots


def _slot(blocks: list[int], token: int, block_size: int) -> int:
    index, offset = divmod(token, block_size)
    return blocks[index] * block_size + offset if index < len(blocks) else -1


def _as_declared(
    wrapper: MetadataWrapper, layer: LayerSpec, metadata: CommonAttentionMetadata, wrapped: CommonAttentionMetadata
) -> CommonAttentionMetadata:
    """Return the original batch with the values that the wrapper declares to reset."""
    if wrapper.fields["causal"] is FieldUse.RESET:
        metadata = attrs.evolve(metadata, causal=wrapped.causal)
    if CHANGES_MASK in wrapper.effects and SEQ_STARTS in wrapper.added_extensions(layer):
        extensions = {name: extension for name, extension in wrapped.extensions.items() if name == SEQ_STARTS}
        metadata = attrs.evolve(metadata, extensions=extensions or NO_EXTENSIONS)
    return metadata
