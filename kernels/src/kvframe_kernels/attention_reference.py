"""Attention over a paged cache in plain torch, one request at a time: the reference for the attention kernels."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def read_tokens(kv_cache: Mapping[str, torch.Tensor], kv_format: str, name: str, places: torch.Tensor) -> torch.Tensor:
    """Return stored vectors as numbers, ``[num_tokens, num_kv_heads, size]``, float32 or wider.

    Args:
        kv_cache: ``k``, ``v`` and, if the format has them, ``k_scale``, ``k_min``, ``v_scale``, ``v_min``: each
            ``[num_block_ids, block_size, num_kv_heads, …]``.
        kv_format: ``"plain"``, ``"fp8_tensor"`` (its one scale is not in the cache, and not applied here),
            ``"fp8_token_head"``, ``"int8_token_head"`` or ``"int4_token_head"``.
        name: ``"k"`` or ``"v"``.
        places: ``[2, num_tokens], int64``: block id and offset of each token.
    """
    elements = kv_cache[name][places[0], places[1]]
    if kv_format == "int4_token_head":
        elements = torch.cat([elements & 0xF, elements >> 4], dim=-1)
    values = elements if elements.dtype == torch.float64 else elements.float()
    if kv_format.endswith("token_head"):
        values = values * kv_cache[f"{name}_scale"][places[0], places[1]].float()[..., None]
    if kv_format == "int4_token_head":
        values = values + kv_cache[f"{name}_min"][places[0], places[1]].float()[..., None]
    return values


def visible_tokens(
    positions: torch.Tensor,
    seq_len: int,
    *,
    causal: bool,
    window: int,
    num_sink_tokens: int,
    chunk: int,
    seq_start: int,
    range_ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return which tokens each query sees, ``[num_queries, seq_len], bool``.

    Args:
        positions: ``[num_queries]``: the queries' positions.
        seq_len: Tokens of the sequence.
        causal: Whether queries see only their own and earlier positions; if not, only ``seq_start`` matters.
        window: The number of positions that a query sees, counted back from its own; 0 for all.
        num_sink_tokens: Tokens at the start that are seen in spite of the window.
        chunk: Tokens of a chunk that queries stay within; 0 for none.
        seq_start: The first token that is not hidden.
        range_ends: ``[num_queries]``: with ``causal``, queries also see the later tokens before these; None for none.
    """
    tokens, positions = torch.arange(seq_len)[None], positions[:, None]
    mask = tokens >= seq_start
    if causal:
        mask = mask & (tokens <= positions)
        if window:
            mask = mask & ((tokens > positions - window) | (tokens < num_sink_tokens))
        if chunk:
            mask = mask & (tokens >= positions - positions % chunk)
        if range_ends is not None:
            mask = mask | ((tokens > positions) & (tokens < range_ends[:, None]))
    return mask.expand(len(positions), seq_len)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return one request's attention; zeros for a query that sees nothing.

    ``softmax(cap(scale * q k) + bias) v`` over the seen tokens, with ``cap(x) = c * tanh(x / c)`` (Gemma 2, arXiv
    2408.00118), and a learned sink as one more logit in the denominator (GPT-OSS, arXiv 2508.10925).

    Args:
        query: ``[num_queries, num_heads, head_size]``.
        key: ``[num_tokens, num_kv_heads, head_size]``.
        value: ``[num_tokens, num_kv_heads, head_size_v]``.
        mask: ``[num_queries, num_tokens], bool``.
        scale: Factor on the products.
        soft_cap: ``c``; None for none.
        sinks: ``[num_heads]``; None for none.
        bias: ``[num_heads, num_queries, num_tokens]``; None for none.

    Returns:
        ``[num_queries, num_heads, head_size_v]``, in the dtype of keys and values.
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,thd->hqt", query.to(key.dtype), key) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(-1, len(query), 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : len(key)].masked_fill(~mask, 0)
    return torch.einsum("hqt,thd->qhd", weights, value)
