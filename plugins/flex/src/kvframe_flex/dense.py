"""FlexAttention by its definition (Dong et al., arXiv 2412.05496) over dense scores, for systems without a compiler.

The two functions are called once, with broadcast arrays of all indices. All scores are in memory at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def dense_flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score: Callable[..., Any] | None,
    is_seen: Callable[..., Any],
    blocks: torch.Tensor,
    full_blocks: torch.Tensor,
    block_size: int,
    scale: float,
    first_head: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the log-sum-exp of some heads: zeros and -inf for queries that see no key.

    Args:
        query: ``[num_tiles, num_heads, num_queries, head_size], device``.
        key: ``[num_tiles, num_kv_heads, num_keys, head_size], device``.
        value: ``[num_tiles, num_kv_heads, num_keys, head_size_v], device``.
        score: ``score(score, tile, head, query_index, key_index)`` returns the changed score; None for no change.
        is_seen: ``is_seen(tile, head, query_index, key_index)`` returns whether a query sees a key.
        blocks: ``[num_tiles, 1, query_blocks, key_blocks], bool, device``: blocks for which ``is_seen`` is called.
        full_blocks: The same shape: blocks in which every query sees every key.
        block_size: Queries, and keys, of a block.
        scale: Factor on the products.
        first_head: The first query head of ``query`` among all heads, as ``score`` and ``is_seen`` count them.

    Returns:
        ``[num_tiles, num_heads, num_queries, head_size_v]``; and ``[num_tiles, num_heads, num_queries], float32``.
    """
    num_tiles, num_heads, num_queries, head_size = query.shape
    num_kv_heads, num_keys = key.shape[1:3]
    device = query.device
    tile, head, query_index, key_index = (
        torch.arange(size, device=device).view([size if axis == place else 1 for axis in range(4)])
        for place, size in enumerate((num_tiles, num_heads, num_queries, num_keys))
    )
    head = head + first_head
    folded = query.reshape(num_tiles, num_kv_heads, -1, head_size)
    # Products are computed in a wider dtype and rounded once, so the order of a matrix library's sums does not matter.
    wide = torch.float64 if query.dtype == torch.float32 else torch.float32
    scores = (folded.to(wide) @ key.to(wide).transpose(2, 3)).mul_(scale).float()
    scores = scores.view(num_tiles, num_heads, num_queries, num_keys)
    if score is not None:
        scores = score(scores, tile, head, query_index, key_index)
    rows, columns = query_index.flatten() // block_size, key_index.flatten() // block_size
    asked, full = (each.index_select(2, rows).index_select(3, columns) for each in (blocks, full_blocks))
    seen = full | (asked & is_seen(tile, head, query_index, key_index))
    scores = scores.masked_fill(~seen, float("-inf"))
    weights = torch.softmax(scores, dim=-1).masked_fill(~seen.any(-1, keepdim=True), 0).to(query.dtype)
    output = (weights.reshape(*folded.shape[:3], num_keys) @ value).view(num_tiles, num_heads, num_queries, -1)
    return output, scores.logsumexp(-1)
