"""The attention of one part of a step: by torch's own function, or by scores if that lacks what a layer needs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvframe.contract.specs import QuerySpec


class Part(NamedTuple):
    """What one call computes: a batch, or a tile of a chunk.

    Attributes:
        rows: The packed tokens that are its queries: a slice, or ``[num_requests * num_queries], int64, device``.
        query: ``[num_requests, num_queries, num_heads, head_size]``.
        key: ``[num_requests, num_kv_heads, num_keys, head_size]``. It stays as it is until the next part is made.
        value: ``[num_requests, num_kv_heads, num_keys, head_size_v]``. Likewise.
        bias: What is added to the scores of folded queries, of a shape that expands to theirs; None for nothing.
        is_prompt: Whether query ``i`` sees the keys ``[0, i]``, and there is no bias that says so.
    """

    rows: slice | torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None
    is_prompt: bool = False


def attend(part: Part, scale: float) -> torch.Tensor:
    """Return a part's attention, ``[num_requests * num_queries, num_heads, head_size_v]``."""
    num_kv_heads = part.key.shape[1]
    if part.is_prompt:
        is_grouped = part.query.shape[2] > num_kv_heads
        query = part.query.transpose(1, 2)
        result = scaled_dot_product_attention(
            query, part.key, part.value, is_causal=True, scale=scale, enable_gqa=is_grouped
        )
        return result[0].transpose(0, 1)
    query = folded(part.query, num_kv_heads)
    result = scaled_dot_product_attention(query, part.key, part.value, attn_mask=part.bias, scale=scale)
    return _unfolded(result, part.query.shape[1])


def attend_by_scores(part: Part, layer: QuerySpec, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same and its log-sum-exp, with a soft cap and learned sinks: torch's own attention lacks these."""
    dtype, num_kv_heads, num_queries = score_dtype(part.query.dtype), part.key.shape[1], part.query.shape[1]
    query = folded(part.query.to(dtype) * layer.scale, num_kv_heads)
    scores = _products(query, part.key.to(dtype).transpose(2, 3))
    if layer.soft_cap is not None:
        scores.div_(layer.soft_cap).tanh_().mul_(layer.soft_cap)
    if part.bias is not None:
        scores += part.bias
    weights = torch.softmax(scores, dim=-1)
    lse = torch.logsumexp(scores, dim=-1, keepdim=True)
    if sinks is not None:
        # One more logit in the denominator scales every weight by the softmax's share against it.
        logits = sinks.to(dtype).view(num_kv_heads, 1, -1).expand(-1, num_queries, -1).reshape(num_kv_heads, -1, 1)
        weights *= torch.sigmoid(lse - logits)
        lse = torch.logaddexp(lse, logits)
    output = _products(weights, part.value.to(dtype))
    return _unfolded(output, num_queries).to(part.query.dtype), _unfolded(lse, num_queries)[..., 0]


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores, not a low precision: some CPUs multiply its matrices twenty times as slowly."""
    return torch.promote_types(dtype, torch.float32)


def _products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return matrix products, ``[num_requests, num_kv_heads, …]`` all three.

    One product over requests and heads at once would copy the keys or values, whose heads lie apart.
    """
    products = left.new_empty(*left.shape[:3], right.shape[3])
    axis = 0 if left.shape[0] < left.shape[1] else 1
    for product, *factors in zip(products.unbind(axis), left.unbind(axis), right.unbind(axis), strict=True):
        torch.bmm(*factors, out=product)
    return products


def folded(query: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Return ``[num_requests, num_kv_heads, num_queries * group_size, head_size]`` of queries by request.

    The query heads of a KV head become more queries of that one head, so that keys are never repeated.
    """
    num_requests, num_queries, _, head_size = query.shape
    folded = query.reshape(num_requests, num_queries, num_kv_heads, -1, head_size).transpose(1, 2)
    return folded.reshape(num_requests, num_kv_heads, -1, head_size)


def _unfolded(result: torch.Tensor, num_queries: int) -> torch.Tensor:
    """Return ``[num_requests * num_queries, num_heads, size]`` of what was computed for folded queries."""
    num_requests, num_kv_heads, _, size = result.shape
    unfolded = result.view(num_requests, num_kv_heads, num_queries, -1, size).transpose(1, 2)
    return unfolded.reshape(num_requests * num_queries, -1, size)
