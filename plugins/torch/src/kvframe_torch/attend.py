"""Compute the attention of one part of a step: by torch's own function, or by scores if that function cannot."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvframe.contract.specs import QuerySpec


class Part(NamedTuple):
    """The input of one call: a batch, or a tile of a chunk.

    Attributes:
        rows: The packed tokens of the queries: a slice, or ``[num_requests * num_queries], int64, device``.
        query: ``[num_requests, num_queries, num_heads, head_size]``.
        key: ``[num_requests, num_kv_heads, num_keys, head_size]``. The next part may overwrite it.
        value: ``[num_requests, num_kv_heads, num_keys, head_size_v]``. The next part may overwrite it.
        bias: The mask and the learned bias, which are added to the scores of folded queries and expand to their shape;
            None if there is neither.
        is_prompt: Whether query ``i`` sees the keys ``[0, i]``; there is no bias then.
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
    """Return a part's attention and its log-sum-exp. It serves soft caps and learned sinks, unlike torch's."""
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
        # A sink is one more logit in the denominator, so it scales every weight by the same factor.
        logits = sinks.to(dtype).view(num_kv_heads, 1, -1).expand(-1, num_queries, -1).reshape(num_kv_heads, -1, 1)
        weights *= torch.sigmoid(lse - logits)
        lse = torch.logaddexp(lse, logits)
    output = _products(weights, part.value.to(dtype))
    return _unfolded(output, num_queries).to(part.query.dtype), _unfolded(lse, num_queries)[..., 0]


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores: at least float32, because some CPUs multiply low precision twenty times as slowly."""
    return torch.promote_types(dtype, torch.float32)


def _products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the matrix products of ``[num_requests, num_kv_heads, …]`` and ``[num_requests, num_kv_heads, …]``.

    A single product over requests and heads would copy the keys or values, because their heads lie apart.
    """
    products = left.new_empty(*left.shape[:3], right.shape[3])
    axis = 0 if left.shape[0] < left.shape[1] else 1
    for product, *factors in zip(products.unbind(axis), left.unbind(axis), right.unbind(axis), strict=True):
        torch.bmm(*factors, out=product)
    return products


def folded(query: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Fold ``[num_requests, num_queries, num_heads, head_size]`` to one head of queries for each KV head.

    The query heads of a KV head become further queries of a single head, so that keys need not be repeated:
    ``[num_requests, num_kv_heads, num_queries * group_size, head_size]``.
    """
    num_requests, num_queries, _, head_size = query.shape
    folded = query.reshape(num_requests, num_queries, num_kv_heads, -1, head_size).transpose(1, 2)
    return folded.reshape(num_requests, num_kv_heads, -1, head_size)


def _unfolded(result: torch.Tensor, num_queries: int) -> torch.Tensor:
    """Unfold a result of folded queries to ``[num_requests * num_queries, num_heads, size]``."""
    num_requests, num_kv_heads, _, size = result.shape
    unfolded = result.view(num_requests, num_kv_heads, num_queries, -1, size).transpose(1, 2)
    return unfolded.reshape(num_requests * num_queries, -1, size)
