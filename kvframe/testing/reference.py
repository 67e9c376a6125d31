"""Attention written straight from its definition over dense tensors: no pages, no blocks, no kernel.

It is computed in the dtype of its inputs: in float64 it is what a backend is measured against, in the backend's own
dtype it says how much error that dtype allows.
"""

from __future__ import annotations

import torch

from kvframe.specs import KVCacheSpec, QuerySpec


def visible_tokens(spec: KVCacheSpec, num_computed: int, seq_len: int, causal: bool = True) -> torch.Tensor:
    """Return which tokens each new query attends to: what is live there, and itself.

    Args:
        spec: The layer's cache spec.
        num_computed: The first query's position.
        seq_len: Tokens of the request after the step.
        causal: False where every query sees the whole request.

    Returns:
        ``[seq_len - num_computed, seq_len], bool, host``.
    """
    if not causal:
        return torch.ones(seq_len - num_computed, seq_len, dtype=torch.bool)
    visible = torch.zeros(seq_len - num_computed, seq_len, dtype=torch.bool)
    for row, position in enumerate(range(num_computed, seq_len)):
        for start, stop in (*spec.live_ranges(position), (position, position + 1)):
            visible[row, start:stop] = True
    return visible


def dense_attention(
    layer: QuerySpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return one request's attention.

    ``softmax(cap(scale * q k) + mask) v`` with ``cap(x) = c * tanh(x / c)`` (Gemma 2, arXiv 2408.00118). A learned
    sink is one more logit per head in the softmax's denominator, with no value behind it (GPT-OSS, arXiv 2508.10925).

    Args:
        layer: The scale and the soft cap.
        query: ``[num_queries, num_heads, head_size]``.
        key: ``[num_tokens, num_kv_heads, head_size]``.
        value: ``[num_tokens, num_kv_heads, head_size_v]``.
        visible: ``[num_queries, num_tokens], bool``.
        sinks: ``[num_heads]`` or None.

    Returns:
        ``[num_queries, num_heads, head_size_v]``, in the inputs' dtype.
    """
    kv_head = torch.arange(query.shape[1]) // (query.shape[1] // key.shape[1])
    scores = torch.einsum("qhd,thd->hqt", query, key[:, kv_head]) * layer.scale
    if layer.soft_cap is not None:
        scores = torch.tanh(scores / layer.soft_cap) * layer.soft_cap
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, query.shape[0], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[:, :, : key.shape[0]]
    return torch.einsum("hqt,thd->qhd", weights, value[:, kv_head])
