"""Padding: a step's metadata at the sizes that a captured graph was made for."""

from __future__ import annotations

import attrs
import torch

from kvframe.attention.metadata import Axis, CommonAttentionMetadata, change_extensions
from kvframe.errors import BatchError


def pad_metadata(
    metadata: CommonAttentionMetadata,
    *,
    num_reqs: int,
    num_tokens: int,
    num_generating: int,
    max_query_len: int,
    max_seq_len: int | None = None,
) -> CommonAttentionMetadata:
    """Return the step at a graph's sizes, with ``static_shapes`` set; the real rows are unchanged.

    Added requests have no tokens, added tokens lie in the null page, added generating rows repeat the last one.

    Args:
        metadata: The step; never written to.
        num_reqs: The graph's requests.
        num_tokens: Its packed tokens.
        num_generating: Its generating rows, at least one.
        max_query_len: The most new tokens of a request in any batch that it is replayed for; at most ``num_tokens``.
        max_seq_len: The longest request in any such batch, whose blocks the block table then has room for; None for
            this step's own.

    Raises:
        BatchError: The step does not fit into these sizes, or the sizes not together.
    """
    max_seq_len = metadata.max_seq_len if max_seq_len is None else max_seq_len
    sizes = {
        "num_reqs": (num_reqs, metadata.num_reqs),
        "num_tokens": (num_tokens, max(metadata.slot_mapping.shape[0], max_query_len)),
        "num_generating": (num_generating, metadata.generating_indices.shape[0]),
        "max_query_len": (max_query_len, metadata.max_query_len),
        "max_seq_len": (max_seq_len, metadata.max_seq_len),
    }
    for name, (given, least) in sizes.items():
        if given < least:
            raise BatchError(f"a graph with {name} = {given} is too small for this step, which needs at least {least}")
    block_table = _pad(metadata.block_table, num_reqs)
    num_blocks = max(block_table.shape[1], -(-max_seq_len // metadata.block_size))
    return attrs.evolve(
        metadata,
        query_start_loc=_repeat_last(metadata.query_start_loc, num_reqs + 1),
        query_start_loc_cpu=_repeat_last(metadata.query_start_loc_cpu, num_reqs + 1),
        seq_lens=_pad(metadata.seq_lens, num_reqs),
        seq_lens_cpu=_pad(metadata.seq_lens_cpu, num_reqs),
        num_reqs=num_reqs,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        block_table=torch.nn.functional.pad(block_table, (0, num_blocks - block_table.shape[1])),
        slot_mapping=_pad(metadata.slot_mapping, num_tokens),
        generating_indices=_repeat_last(metadata.generating_indices, num_generating),
        generating_indices_cpu=_repeat_last(metadata.generating_indices_cpu, num_generating),
        static_shapes=True,
        extensions=change_extensions(
            metadata.extensions,
            {Axis.REQUEST: lambda values: _pad(values, num_reqs), Axis.TOKEN: lambda values: _pad(values, num_tokens)},
        ),
    )


def _pad(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Return the tensor with rows of zeros behind it."""
    return torch.cat([tensor, tensor.new_zeros(size - tensor.shape[0], *tensor.shape[1:])])


def _repeat_last(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Return the tensor with its last element repeated behind it."""
    return torch.cat([tensor, tensor[-1:].expand(size - tensor.shape[0])])
