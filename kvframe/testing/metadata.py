"""A step's metadata on the host, made without a cache, and what such metadata must not contradict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvframe.attention.metadata import Axis, CommonAttentionMetadata
from kvframe.testing.case import Request


def make_metadata(requests: Sequence[Request], block_size: int) -> CommonAttentionMetadata:
    """Return a step's metadata on the host, each request in blocks of its own; a request may have no new tokens.

    Args:
        requests: The batch; where their keys are of another sequence, it is not causal.
        block_size: Tokens per block.
    """
    lens = np.array([(request.seq_len, request.num_new, request.num_generating) for request in requests])
    seq_lens, query_lens, num_generating = lens.T
    ends, is_cross = np.cumsum(query_lens), requests[0].num_keys is not None
    num_tokens = int(ends[-1])
    max_blocks = -(-int(seq_lens.max()) // block_size)
    block_table = 1 + np.arange(len(requests) * max_blocks, dtype=np.int32).reshape(len(requests), max_blocks)
    rows = np.repeat(np.arange(len(requests)), query_lens)
    slots = np.zeros(num_tokens, dtype=np.int64)
    if not is_cross:
        positions = np.arange(num_tokens) + (seq_lens - ends)[rows]
        slots = block_table[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    generating = np.flatnonzero(np.arange(num_tokens) >= (ends - num_generating)[rows])

    def both(values: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        host = torch.tensor(values, dtype=dtype)
        return host.clone(), host

    starts, starts_cpu = both([0, *ends], torch.int32)
    lens_device, lens_cpu = both(seq_lens, torch.int32)
    indices, indices_cpu = both(generating if len(generating) else [num_tokens - 1], torch.int64)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts_cpu,
        seq_lens=lens_device,
        seq_lens_cpu=lens_cpu,
        num_reqs=len(requests),
        num_actual_tokens=num_tokens,
        max_query_len=int(query_lens.max()),
        max_seq_len=int(seq_lens.max()),
        block_table=torch.from_numpy(block_table),
        slot_mapping=torch.from_numpy(slots),
        block_size=block_size,
        num_generating=len(generating),
        generating_indices=indices,
        generating_indices_cpu=indices_cpu,
        causal=not is_cross,
    )


def find_problem(metadata: CommonAttentionMetadata) -> str:
    """Return in one sentence how metadata contradicts itself; empty if it does not."""
    starts, seq_lens = metadata.query_start_loc_cpu, metadata.seq_lens_cpu
    query_lens = starts.diff()
    num_tokens, num_rows = metadata.slot_mapping.shape[0], metadata.generating_indices.shape[0]
    rows = {Axis.REQUEST: metadata.num_reqs, Axis.TOKEN: num_tokens}
    with_queries = seq_lens[query_lens > 0]
    claims = {
        "query_start_loc has not one entry more than requests": len(starts) == metadata.num_reqs + 1,
        "query_start_loc does not start at 0": int(starts[0]) == 0,
        "query_start_loc falls": bool((query_lens >= 0).all()),
        "num_actual_tokens is not where query_start_loc ends": int(starts[-1]) == metadata.num_actual_tokens,
        "seq_lens has not one entry a request": len(seq_lens) == metadata.num_reqs,
        "a request has more new tokens than tokens": not metadata.causal or bool((seq_lens >= query_lens).all()),
        "block_table has not one row a request": metadata.block_table.shape[0] == metadata.num_reqs,
        "max_query_len is too small": metadata.max_query_len >= int(query_lens.max()),
        "max_seq_len is too small": metadata.max_seq_len >= int(with_queries.max() if len(with_queries) else 0),
        "block_table has no room for the longest request": len(with_queries) == 0
        or metadata.block_table.shape[1] * metadata.block_size >= int(with_queries.max()),
        "slot_mapping has fewer tokens than the batch": num_tokens >= metadata.num_actual_tokens,
        "a padded token has a slot": not metadata.slot_mapping[metadata.num_actual_tokens :].any(),
        "generating_indices is empty, or shorter than it says": num_rows >= max(1, metadata.num_generating),
        "a generating token is none of the batch": int(metadata.generating_indices_cpu.max()) < num_tokens,
        **{
            f"{name} is not what it is on the host": torch.equal(
                getattr(metadata, name), getattr(metadata, f"{name}_cpu")
            )
            for name in ("query_start_loc", "seq_lens", "generating_indices")
        },
    }
    for name, extension in metadata.extensions.items():
        values, host = extension.values, extension.values_cpu
        claims[f"the extension {name!r} has not one row a {extension.axis}"] = (
            extension.axis is Axis.STEP or values.shape[0] == rows[extension.axis]
        )
        claims[f"the extension {name!r} is not what it is on the host"] = host is None or torch.equal(values, host)
    return next((problem for problem, holds in claims.items() if not holds), "")
