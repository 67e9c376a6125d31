"""A plain-torch reference for FlashAttention's paged functions, to test wrappers around such libraries.

The algorithm is FlashAttention-2's (arXiv 2307.08691) over pages, as in https://github.com/Dao-AILab/flash-attention.
It reads keys in tiles, from the tile in which the first query's window begins to the tile of the last seen key. Scores
that no query sees are masked. Their values are still multiplied, by zero; values after the end of the sequence are
never read.
"""

from __future__ import annotations

import torch

KEYS_PER_TILE = 64
"""Keys of a tile: the smallest number in any of the library's kernels."""


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    *,
    scale: float,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    soft_cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of packed queries over pages, and the logarithm of each softmax's denominator.

    Query ``i`` of ``q`` queries over ``k`` keys is at position ``i + k - q``. It sees the keys from ``window[0]``
    before its position to ``window[1]`` after it, with -1 for no limit; ``causal`` means a limit of 0 after it. Queries
    that see no key get zeros.

    Args:
        query: ``[num_tokens, num_heads, head_size]``.
        key: ``[num_block_ids, block_size, num_kv_heads, head_size]``, strided.
        value: ``[num_block_ids, block_size, num_kv_heads, head_size_v]``, strided.
        query_start_loc: ``[num_reqs + 1], int32``.
        seq_lens: ``[num_reqs], int32``: keys of each request.
        block_table: ``[num_reqs, max_blocks], int32``.
        scale: Factor on the products.
        causal: Whether keys after a query's position are hidden.
        window: The numbers of keys that are seen before and after a query's position.
        soft_cap: ``c`` in ``c * tanh(score / c)``; 0 for none.

    Returns:
        ``[num_tokens, num_heads, head_size_v]``, NaN in padding rows, and ``[num_heads, num_tokens], float32``.
    """
    left, right = window[0], 0 if causal else window[1]
    output = query.new_full((*query.shape[:2], value.shape[-1]), float("nan"))
    normaliser = torch.full((query.shape[1], len(query)), float("inf"))
    starts = query_start_loc.tolist()
    for request, num_keys in enumerate(seq_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        num_queries = rows.stop - rows.start
        first = 0 if left < 0 else max(0, num_keys - num_queries - left)
        tokens = torch.arange(first // KEYS_PER_TILE * KEYS_PER_TILE, num_keys)
        pages = block_table[request, tokens // key.shape[1]].long()
        offsets = tokens % key.shape[1]
        places = torch.arange(num_keys - num_queries, num_keys)[:, None]
        mask = torch.ones(num_queries, len(tokens), dtype=torch.bool)
        if left >= 0:
            mask &= tokens >= places - left
        if right >= 0:
            mask &= tokens <= places + right
        output[rows], normaliser[:, rows] = _attend(
            query[rows].float(), key[pages, offsets].float(), value[pages, offsets].float(), mask, scale, soft_cap
        )
    return output, normaliser


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float, soft_cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    group_size = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group_size, dim=1), value.repeat_interleave(group_size, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~mask, float("-inf"))
    normaliser = torch.logsumexp(scores, dim=-1)
    # As in the library, a row without a key has a denominator of infinity.
    normaliser = normaliser.masked_fill(normaliser == float("-inf"), float("inf"))
    weights = torch.exp(scores - normaliser[..., None])
    return torch.einsum("hqk,khd->qhd", weights, value), normaliser
