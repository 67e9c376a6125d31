"""Merges attention over parts of the keys into attention over all of them.

Each part comes with the logarithm of its softmax's denominator, the log-sum-exp. The formula is that of Flash-Decoding
(PyTorch's blog, 2023) and of cascaded attention (FlashInfer, arXiv 2501.01005).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the log-sum-exp for queries of a dtype: float32, or float64 if the queries have it."""
    return torch.promote_types(dtype, torch.float32)


def merge_attention(outputs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention over all keys, from attention of the same queries over parts of them.

    ``lse = log(sum_i exp(lse_i))`` and ``output = sum_i exp(lse_i - lse) output_i``. The sum may be taken in any order
    and in several rounds: the result is a part again. Each key must be in one part, and a learned sink too. If a
    part has no key for a query, its output for that query is not read.

    Args:
        outputs: At least one ``[num_tokens, num_heads, head_size_v]``, of one dtype.
        lses: As many ``[num_tokens, num_heads]``, float32 or float64, as ``AttentionBackend.attend`` writes
            them.

    Returns:
        The output, ``[num_tokens, num_heads, head_size_v]`` in the dtype of ``outputs``, zeros for a query that sees no
        key in any part; and its log-sum-exp, ``[num_tokens, num_heads]`` in the dtype of ``lses``.
    """
    logs = torch.stack([*lses])
    maxima = logs.amax(0)
    # A query that sees no key has -inf everywhere, whose difference is NaN.
    shift = maxima.masked_fill(maxima == -math.inf, 0)
    weights = (logs - shift).exp()
    total = weights.sum(0)
    merged = torch.zeros_like(outputs[0], dtype=logs.dtype)
    for output, weight in zip(outputs, weights, strict=True):
        weight = weight[..., None]
        merged += torch.where(weight > 0, output.to(logs.dtype) * weight, 0)
    merged /= total.masked_fill(total == 0, 1)[..., None]
    return merged.to(outputs[0].dtype), shift + total.log()
