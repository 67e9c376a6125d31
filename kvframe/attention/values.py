"""Checks the values of a step's metadata: a kernel that reads a wrong one reads foreign memory.

Numbers and host copies are checked if a wrapper changed them. The tensors that kernels read are checked if they lie on
the host. On a device they are checked only if the stack's ``audit`` is on, because the check waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvframe.contract.metadata import RANGE_ENDS, SEQ_STARTS, CommonAttentionMetadata

if TYPE_CHECKING:
    import torch

    from kvframe.contract.order import IntArray

_COPIED = ("query_start_loc", "seq_lens", "generating_indices")


def find_contradiction(metadata: CommonAttentionMetadata, source: CommonAttentionMetadata | None = None) -> str | None:
    """Return in one sentence how the numbers and host copies of metadata contradict each other; None if they do not.

    Takes a few operations on arrays of one number per request, and asks no device.

    Args:
        metadata: The metadata; ``find_misfit`` finds nothing.
        source: The input of the wrapper that made it. What both have in common is not checked. None to check all.
    """
    if source is None or not _same_rows(metadata, source):
        problem = _find_wrong_rows(metadata)
        if problem is not None:
            return problem
    if source is None or not _same_generating(metadata, source):
        problem = _find_wrong_generating(metadata)
        if problem is not None:
            return problem
    if not metadata.extensions:
        return None
    for name, find in _EXTENSIONS.items():
        extension = metadata.extensions.get(name)
        if extension is None or extension.values_cpu is None:
            continue
        if source is None or extension is not source.extensions.get(name):
            problem = find(metadata, extension.values_cpu.numpy())
            if problem is not None:
                return problem
    return None


def find_wrong_tensor(
    metadata: CommonAttentionMetadata,
    source: CommonAttentionMetadata | None = None,
    num_block_ids: int | None = None,
) -> str | None:
    """Return in one sentence which tensor that kernels read is wrong; None if none is. Waits for their device.

    Args:
        metadata: The metadata; ``find_contradiction`` finds nothing.
        source: The input of the wrapper that made it. Tensors of both are not checked. None to check all.
        num_block_ids: Pages that a block id may name; None if that is not known.
    """
    for name in _COPIED:
        tensor, cpu_copy = getattr(metadata, name), getattr(metadata, f"{name}_cpu")
        if source is not None and tensor is getattr(source, name) and cpu_copy is getattr(source, f"{name}_cpu"):
            continue
        if tensor is cpu_copy:
            continue
        is_bound = name == "seq_lens" and not metadata.exact_lens
        if (tensor.cpu() > cpu_copy).any() if is_bound else (tensor.cpu() != cpu_copy).any():
            return f"{name} is not what {name}_cpu says"
    for name, extension in metadata.extensions.items():
        tensor, copy = extension.values, extension.values_cpu
        if source is not None and source.extensions.get(name) is extension:
            continue
        if copy is not None and tensor is not copy and (tensor.cpu() != copy).any():
            return f"the extension {name!r} is not what it is on the host"
    if source is None or metadata.block_table is not source.block_table:
        problem = _find_wrong_id("block_table", metadata.block_table, num_block_ids)
        if problem is not None:
            return problem
    if source is None or metadata.slot_mapping is not source.slot_mapping:
        num_slots = None if num_block_ids is None else num_block_ids * metadata.block_size
        problem = _find_wrong_id("slot_mapping", metadata.slot_mapping, num_slots)
        if problem is not None:
            return problem
        num_tokens, num_actual = metadata.slot_mapping.shape[0], metadata.num_actual_tokens
        if num_tokens > num_actual and metadata.slot_mapping[num_actual:].any():
            return "a padded token has a slot other than 0"
    return None


def find_foreign_id(metadata: CommonAttentionMetadata, source: CommonAttentionMetadata) -> str | None:
    """Return in one sentence which block or slot of a wrapper's result its input does not have; None if there is none.

    Waits for their device, and takes time in proportion to the block tables.

    Args:
        metadata: The wrapper's result.
        source: Its input.
    """
    for name in ("block_table", "slot_mapping"):
        result_ids, input_ids = getattr(metadata, name), getattr(source, name)
        if result_ids is input_ids:
            continue
        foreign = set(result_ids.unique().tolist()) - set(input_ids.unique().tolist()) - {0}
        if foreign:
            return f"{name} names {min(foreign)}, which is none of those that the wrapper was given"
    return None


def _same_rows(metadata: CommonAttentionMetadata, source: CommonAttentionMetadata) -> bool:
    return (
        metadata.query_start_loc_cpu is source.query_start_loc_cpu
        and metadata.seq_lens_cpu is source.seq_lens_cpu
        and metadata.num_actual_tokens == source.num_actual_tokens
        and metadata.max_query_len == source.max_query_len
        and metadata.max_seq_len == source.max_seq_len
        and metadata.causal == source.causal
        and metadata.slot_mapping.shape == source.slot_mapping.shape
        and metadata.block_table.shape == source.block_table.shape
    )


def _find_wrong_rows(metadata: CommonAttentionMetadata) -> str | None:
    if metadata.num_reqs < 1:
        return "there is no request"
    starts, seq_lens = metadata.query_start_loc_cpu.numpy(), metadata.seq_lens_cpu.numpy()
    query_lens = starts[1:] - starts[:-1]
    num_tokens, num_actual = metadata.slot_mapping.shape[0], metadata.num_actual_tokens
    if starts[0] != 0:
        return f"query_start_loc starts at {starts[0]}, not at 0"
    if query_lens.min() < 0:
        return f"query_start_loc falls after request {query_lens.argmin()}"
    if starts[-1] != num_actual:
        return f"query_start_loc ends at {starts[-1]}, and num_actual_tokens is {num_actual}"
    if num_actual > num_tokens:
        return f"slot_mapping has {num_tokens} tokens, and num_actual_tokens is {num_actual}"
    if not query_lens.max() <= metadata.max_query_len <= max(1, num_tokens):
        return (
            f"max_query_len is {metadata.max_query_len}, and the longest request has {query_lens.max()} of the step's "
            f"{num_tokens} tokens"
        )
    capacity = metadata.block_table.shape[1] * metadata.block_size
    shortest, longest = seq_lens.min(), seq_lens.max()
    if shortest < 0:
        return f"seq_lens of request {seq_lens.argmin()} is {shortest}"
    if longest > capacity:
        return f"seq_lens of request {seq_lens.argmax()} is {longest}, and block_table has blocks of {capacity} tokens"
    if not longest <= metadata.max_seq_len <= capacity:
        return (
            f"max_seq_len is {metadata.max_seq_len}, the longest request has {longest} tokens, and block_table has "
            f"blocks of {capacity}"
        )
    if metadata.causal:
        num_computed = seq_lens - query_lens
        if num_computed.min() < 0:
            row = num_computed.argmin()
            return f"request {row} has {query_lens[row]} new tokens, and seq_lens of it is {seq_lens[row]}"
    return None


def _same_generating(metadata: CommonAttentionMetadata, source: CommonAttentionMetadata) -> bool:
    return (
        metadata.generating_indices_cpu is source.generating_indices_cpu
        and metadata.num_generating == source.num_generating
        and metadata.num_actual_tokens == source.num_actual_tokens
        and metadata.slot_mapping.shape == source.slot_mapping.shape
    )


def _find_wrong_generating(metadata: CommonAttentionMetadata) -> str | None:
    if metadata.generating_indices_cpu is None:
        return None
    indices, count = metadata.generating_indices_cpu.numpy(), metadata.num_generating
    num_tokens, num_actual = metadata.slot_mapping.shape[0], metadata.num_actual_tokens
    if not 0 <= count <= num_actual or len(indices) < max(1, count):
        return f"num_generating is {count}, of {num_actual} tokens and {len(indices)} generating_indices"
    if indices.min() < 0 or indices.max() >= max(1, num_tokens) or (count and indices[count - 1] >= num_actual):
        return f"generating_indices names tokens from {indices.min()} to {indices.max()}, and there are {num_actual}"
    if (indices[1:] < indices[:-1]).any() or (indices[1:count] <= indices[: max(0, count - 1)]).any():
        return "generating_indices does not rise from token to token"
    return None


def _find_wrong_seq_starts(metadata: CommonAttentionMetadata, starts: IntArray) -> str | None:
    seq_lens = metadata.seq_lens_cpu.numpy()
    latest = seq_lens
    if metadata.causal:
        query_lens = metadata.query_start_loc_cpu.numpy()
        latest = seq_lens - query_lens[1:] + query_lens[:-1]
    if starts.min() < 0 or (starts > latest).any():
        return f"the extension {SEQ_STARTS!r} does not lie between 0 and each request's first new token"
    return None


def _find_wrong_range_ends(metadata: CommonAttentionMetadata, ends: IntArray) -> str | None:
    import numpy as np  # loaded by now, and not by a plugin's manifest that imports this module

    if not metadata.causal or not ends.any():
        return None
    starts, seq_lens = metadata.query_start_loc_cpu.numpy(), metadata.seq_lens_cpu.numpy()
    ends = ends[: starts[-1]]
    query_lens = starts[1:] - starts[:-1]
    positions = np.arange(len(ends)) + (seq_lens - starts[1:]).repeat(query_lens)
    if ((ends != 0) & ((ends <= positions) | (ends > seq_lens.repeat(query_lens)))).any():
        return f"the extension {RANGE_ENDS!r} does not lie between each token and the end of its request"
    return None


_EXTENSIONS = {
    SEQ_STARTS: _find_wrong_seq_starts,
    RANGE_ENDS: _find_wrong_range_ends,
}


def _find_wrong_id(name: str, ids: torch.Tensor, limit: int | None) -> str | None:
    values = ids.cpu().numpy()
    if not values.size:
        return None
    lowest, highest = values.min(), values.max()
    if lowest < 0 or (limit is not None and highest >= limit):
        wrong = lowest if lowest < 0 else highest
        return f"{name} names {wrong}" + ("" if limit is None else f", and there are {limit} in all")
    return None
