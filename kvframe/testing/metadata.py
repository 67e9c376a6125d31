"""Makes a step's metadata on the host without a cache, and checks that metadata are consistent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvframe.attention.shapes import find_misfit
from kvframe.attention.values import find_contradiction, find_wrong_tensor
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.testing.case import Request


def make_metadata(requests: Sequence[Request], block_size: int) -> CommonAttentionMetadata:
    """Return a step's metadata on the host; each request has its own blocks, and may have no new tokens.

    Args:
        requests: The batch; it is not causal if the keys are of another sequence.
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
    """Return one sentence that says how metadata are inconsistent; empty if they are consistent."""
    return find_misfit(metadata) or find_contradiction(metadata) or find_wrong_tensor(metadata) or ""
