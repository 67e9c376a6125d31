"""The reference: attention written from its definition over dense tensors, without pages or kernels.

It is computed in the dtype of its inputs. A backend is measured against it in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kvframe.contract.specs import KVCacheSpec, QuerySpec, RelativeBias


def visible_tokens(
    spec: KVCacheSpec,
    num_computed: int,
    seq_len: int,
    *,
    causal: bool = True,
    num_hidden: int = 0,
    range_ends: Sequence[int] = (),
) -> torch.Tensor:
    """Return the tokens that each new query attends to: live ones, as far as a sparse type shows them, and its own.

    In a window in both directions, later ones too.

    Args:
        spec: The layer's cache spec.
        num_computed: The first query's position.
        seq_len: Tokens of the request after the step.
        causal: Whether the batch is causal; if it is not, each query sees all tokens.
        num_hidden: Tokens at the start of the request that are hidden (``SEQ_STARTS``).
        range_ends: For each query, where its range ends (``RANGE_ENDS``), 0 for none; empty if no query has one.

    Returns:
        ``[seq_len - num_computed, seq_len], bool, host``.
    """
    sees_all = not causal or (spec.mask is not None and spec.mask.sees_all)
    visible = torch.full((seq_len - num_computed, seq_len), sees_all)
    for row, position in enumerate(range(num_computed, seq_len) if not sees_all else ()):
        for start, stop in (*spec.live_ranges(position), (position, position + 1)):
            visible[row, start:stop] = True
        if spec.mask is not None and spec.mask.lookahead is not None:
            visible[row, position + 1 : position + 1 + spec.mask.lookahead] = True
    if spec.is_sparse and not sees_all:
        assert spec.mask_function is not None
        visible &= spec.mask_function(torch.arange(num_computed, seq_len)[:, None], torch.arange(seq_len)[None])
    for row, end in enumerate(range_ends):
        visible[row, num_computed + row : end] = True
    visible[:, :num_hidden] = False
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
    num_buckets, first_bucket = bias.num_buckets, 0
    if bias.bidirectional:
        num_buckets //= 2
        first_bucket = num_buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(0, -distance)
    num_exact = num_buckets // 2
    if distance < num_exact:
        return first_bucket + distance
    growth = math.log(distance / num_exact) / math.log(bias.max_distance / num_exact)
    return first_bucket + min(num_buckets - 1, num_exact + int(growth * (num_buckets - num_exact)))


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
    return weigh(logits_of(score(layer, query, key), visible, sinks, bias), value, visible)


def weigh(logits: torch.Tensor, value: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Return the attention of ``logits_of``: the values, weighed by the softmax, shaped as ``dense_attention``."""
    weights = torch.softmax(logits, dim=-1)[:, :, :-1].masked_fill(~visible, 0)
    return torch.einsum("kgqt,tkd->qkgd", weights.unflatten(0, (value.shape[1], -1)), value).flatten(1, 2)


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
    return torch.logsumexp(logits_of(score(layer, query, key), visible, sinks, bias), dim=-1).T


def score(layer: QuerySpec, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return the scaled and capped scores of all keys, ``[num_heads, num_queries, num_tokens]``."""
    # The query heads of a KV head stay beside each other, so that keys are read as they are.
    products = torch.einsum("qkgd,tkd->kgqt", query.unflatten(1, (key.shape[1], -1)), key).flatten(0, 1)
    scores = products * layer.scale
    return scores if layer.soft_cap is None else torch.tanh(scores / layer.soft_cap) * layer.soft_cap


def logits_of(
    scores: torch.Tensor, visible: torch.Tensor, sinks: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the logits of the softmax, of all keys and of the sink, which is -inf if there is none."""
    scores = (scores if bias is None else scores + bias).masked_fill(~visible, -math.inf)
    sink = scores.new_full((*scores.shape[:2], 1), -math.inf)
    if sinks is not None:
        sink = sinks.to(sink.dtype)[:, None, None].expand_as(sink)
    return torch.cat([scores, sink], dim=-1)
