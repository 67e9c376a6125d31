"""Small batches for the tests of the wrapper."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from kvframe.contract import CommonAttentionMetadata

MakeBatch = Callable[..., CommonAttentionMetadata]


def _make_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_size: int = 2,
    *,
    max_blocks: int | None = None,
    num_padding: int = 0,
    static_query_len: int | None = None,
) -> CommonAttentionMetadata:
    """Return a batch in which block ``b`` of request ``r`` has the id ``100 * (r + 1) + b``.

    Args:
        query_lens: New tokens of each request; 0 for a padded row.
        seq_lens: Tokens of each request after the step.
        block_size: Tokens per block.
        max_blocks: Columns of the block table; unless given, as many as the longest request needs.
        num_padding: Padded tokens.
        static_query_len: ``max_query_len`` of a batch with ``static_shapes``; None for one without.
    """
    query_start_loc = torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32)
    num_tokens = int(query_start_loc[-1])
    is_static = static_query_len is not None
    max_blocks = -(-max(seq_lens) // block_size) if max_blocks is None else max_blocks
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    last = torch.tensor([max(0, num_tokens - 1)])
    return CommonAttentionMetadata(
        query_start_loc=query_start_loc,
        query_start_loc_cpu=query_start_loc.clone(),
        seq_lens=lens,
        seq_lens_cpu=lens.clone(),
        num_reqs=len(seq_lens),
        num_actual_tokens=num_tokens,
        max_query_len=max(query_lens) if static_query_len is None else static_query_len,
        max_seq_len=max_blocks * block_size if is_static else max(seq_lens),
        block_table=(100 * torch.arange(1, len(seq_lens) + 1)[:, None] + torch.arange(max_blocks)).int(),
        slot_mapping=torch.arange(num_tokens + num_padding),
        block_size=block_size,
        num_generating=1,
        generating_indices=last,
        generating_indices_cpu=last.clone(),
        static_shapes=is_static,
    )


@pytest.fixture(scope="session")
def make_batch() -> MakeBatch:
    """Return the function that makes batches."""
    return _make_batch
