"""The relative bias of T5 (arXiv 1910.10683): the numbers that are added to the scores at each distance."""

from __future__ import annotations

import math

import torch

from kvframe.contract.specs import RelativeBias


def bias_by_distance(bias: RelativeBias, table: torch.Tensor) -> torch.Tensor:
    """Return what a layer adds to its scores, for each distance that makes a difference.

    Args:
        bias: How distances fall into buckets.
        table: ``[num_buckets, num_heads], device``: the layer's parameter.

    Returns:
        ``[num_heads, 2 * max_distance + 1], device``, in the table's dtype: column ``max_distance + d`` is added for a
        key ``d`` tokens after its query; ``d`` is negative for a key before it. For larger distances, the first or the
        last column applies.
    """
    buckets = distance_buckets(bias).to(table.device, non_blocking=True)
    return table.index_select(0, buckets).t().contiguous()


def bias_columns(distance: torch.Tensor, max_distance: int) -> torch.Tensor:
    """Return the column of ``bias_by_distance`` for each distance of a key from its query, any shape."""
    return distance.clamp(-max_distance, max_distance) + max_distance


def distance_buckets(bias: RelativeBias) -> torch.Tensor:
    """Return T5's bucket of each distance from ``-max_distance`` to ``max_distance``, ``int64, host``.

    Half of a direction's buckets are single distances; the others grow by a constant factor up to ``max_distance``. The
    logarithm is float32's, on the host, so a distance at the edge of a bucket is in the bucket that it had in training.
    """
    distance = torch.arange(-bias.max_distance, bias.max_distance + 1)
    num_buckets, first_bucket = bias.num_buckets, torch.zeros_like(distance)
    if bias.bidirectional:
        num_buckets //= 2
        first_bucket = (distance > 0) * num_buckets
        distance = distance.abs()
    else:
        distance = -distance.clamp(max=0)
    num_exact = num_buckets // 2
    growth = torch.log(distance.float() / num_exact) / math.log(bias.max_distance / num_exact)
    # The logarithm of a distance of 0 is -inf, which is no bucket. Such a distance has an exact one.
    wide = num_exact + (growth.clamp(min=0) * (num_buckets - num_exact)).long()
    wide.clamp_(max=num_buckets - 1)
    return first_bucket + torch.where(distance < num_exact, distance, wide)
