"""The reference: attention written from its definition over dense tensors, without pages or kernels.

It is computed in the dtype of its inputs. A backend is measured against it in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kvframe.contract.specs import KVCacheSpec, QuerySpec, RelativeBias


def visible_tokens(spec: KVCacheSpec, num_computed: int, seq_len: int) -> torch.Tensor:
    """Return the tokens that each new query attends to: live ones, as far as a sparse type shows them, and its own.

    In a window in both directions, later ones too.

    Args:
        spec: The layer's cache spec; its mask does not show all tokens.
        num_computed: The first query's position.
        seq_len: Tokens of the request after the step.

    Returns:
        ``[seq_len - num_computed, seq_len], bool, host``.
    """
    visible = torch.zeros(seq_len - num_computed, seq_len, dtype=torch.bool)
    for row, position in enumerate(range(num_computed, seq_len)):
        for start, stop in (*spec.live_ranges(position), (position, position + 1)):
            visible[row, start:stop] = True
        if spec.mask is not None and spec.mask.lookahead is not None:
            visible[row, position + 1 : position + 1 + spec.mask.lookahead] = True
    if spec.is_sparse:
        assert spec.mask_function is not None
        visible &= spec.mask_function(torch.arange(num_computed, seq_len)[:, None], torch.arange(seq_len)[None])
    return visible


def chosen_tokens(layer: QuerySpec, chosen: torch.Tensor, seq_len: int) -> torch.Tensor:
    """Return which tokens are chosen for each new query and head.

    Args:
        layer: The query side, which has a choice.
        chosen: ``[num_queries, num_choosers, max_chosen]``: tokens or blocks; negative numbers for none.
        seq_len: Tokens of the request after the step.

    Returns:
        ``[num_heads, num_queries, seq_len], bool``.
    """
    assert layer.choice is not None
    units = torch.arange(seq_len) // layer.choice.block_size
    is_chosen = (chosen[..., None] == units).any(2).transpose(0, 1)
    return is_chosen.repeat_interleave(layer.num_heads // layer.choice.num_choosers, dim=0)


def relative_bias(bias: RelativeBias, table: torch.Tensor, num_computed: int, seq_len: int) -> torch.Tensor:
    """Return the bias that is added to the scores, by the definition of its buckets (T5, arXiv 1910.10683).

    Args:
        bias: The map from distances to buckets.
        table: ``[num_buckets, num_heads]``.
        num_computed: The first query's position.
        seq_len: Tokens of the request after the step.

    Returns:
        ``[num_heads, seq_len - num_computed, seq_len]``.
    """
    positions = range(num_computed, seq_len)
    buckets = [[_bucket(bias, key - position) for key in range(seq_len)] for position in positions]
    return table[torch.tensor(buckets)].permute(2, 0, 1)


def alibi_bias(slopes: Sequence[float], num_computed: int, seq_len: int) -> torch.Tensor:
    """Return the bias of ALiBi, which is added to the scores (Press et al., arXiv 2108.12409).

    Returns:
        ``[num_heads, seq_len - num_computed, seq_len], float64``.
    """
    positions = range(num_computed, seq_len)
    distances = [[abs(key - position) for key in range(seq_len)] for position in positions]
    bias = [[[-slope * distance for distance in row] for row in distances] for slope in slopes]
    return torch.tensor(bias, dtype=torch.float64).view(len(slopes), len(positions), seq_len)


def _bucket(bias: RelativeBias, distance: int) -> int:
    num_buckets, first = bias.num_buckets, 0
    if bias.bidirectional:
        num_buckets //= 2
        first = num_buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(0, -distance)
    num_exact = num_buckets // 2
    if distance < num_exact:
        return first + distance
    growth = math.log(distance / num_exact) / math.log(bias.max_distance / num_exact)
    return first + min(num_buckets - 1, num_exact + int(growth * (num_buckets - num_exact)))


def dense_attention(
    layer: QuerySpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return one request's attention; zeros for a query that sees nothing.

    ``softmax(cap(scale * q k) + bias + mask) v`` with ``cap(x) = c * tanh(x / c)`` (Gemma 2, arXiv 2408.00118). A
    learned sink is one more logit per head in the softmax's denominator, without a value (GPT-OSS,
    arXiv 2508.10925).

    Args:
        layer: The scale and the soft cap.
        query: ``[num_queries, num_heads, head_size]``.
        key: ``[num_tokens, num_kv_heads, head_size]``.
        value: ``[num_tokens, num_kv_heads, head_size_v]``.
        visible: ``[num_queries, num_tokens], bool``, or ``[num_heads, num_queries, num_tokens]``.
        sinks: ``[num_heads]`` or None.
        bias: ``[num_heads, num_queries, num_tokens]`` or None.

    Returns:
        ``[num_queries, num_heads, head_size_v]``, in the inputs' dtype.
    """
    kv_head = _kv_heads(query, key)
    scores = _scores(layer, query, key[:, kv_head], visible, sinks, bias)
    weights = torch.softmax(scores, dim=-1)[:, :, : key.shape[0]].masked_fill(~visible, 0)
    return torch.einsum("hqt,thd->qhd", weights, value[:, kv_head])


def dense_lse(
    layer: QuerySpec,
    query: torch.Tensor,
    key: torch.Tensor,
    visible: torch.Tensor,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the natural logarithm of the denominators of ``dense_attention``; -inf for a query that sees nothing.

    The arguments are those of ``dense_attention``; the result is ``[num_queries, num_heads]``, in the inputs' dtype.
    """
    return torch.logsumexp(_scores(layer, query, key[:, _kv_heads(query, key)], visible, sinks, bias), dim=-1).T


def _kv_heads(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return torch.arange(query.shape[1]) // (query.shape[1] // key.shape[1])


def _scores(
    layer: QuerySpec,
    query: torch.Tensor,
    key: torch.Tensor,
    visible: torch.Tensor,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return the logits of the softmax, ``[num_heads, num_queries, num_tokens]``, and after them the sinks' if any."""
    scores = torch.einsum("qhd,thd->hqt", query, key) * layer.scale
    if layer.soft_cap is not None:
        scores = torch.tanh(scores / layer.soft_cap) * layer.soft_cap
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is None:
        return scores
    return torch.cat([scores, sinks[:, None, None].expand(-1, query.shape[0], 1)], dim=-1)
