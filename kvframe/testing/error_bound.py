"""A bound on the rounding error of attention, computed from the numbers of the case.

The bound is a property of the case. It needs no run in low precision, so it is the same on every machine, and for every
order in which a machine's kernels add.
"""

from __future__ import annotations

import math

import torch

from kvframe.contract.specs import QuerySpec

ROUNDINGS = 6
"""The most operations between a weight or a value and the output that round by half a unit each: the exponential, the
rounding of the weight to the dtype, the sum, the division by the denominator, the merge of two parts of the keys, and
the output. It also bounds those of a score: the scaled query, the product, the scale, the soft cap, the bias, and the
difference from the largest score."""


def attention_error_bound(
    layer: QuerySpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    magnitudes: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the largest error that attention in ``dtype`` may have, for each element of the output.

    To first order, the output ``o = sum_t p_t v_t`` errs by ``sum_t p_t v_t e_t + sum_t p_t (v_t - o) s_t`` if each
    term errs by the factor ``1 + e_t`` and each score by ``s_t``. The standard model of rounding bounds these errors:

    * what is rounded to ``dtype`` errs by units of its magnitude, and a score by units of ``scale * sum_d |q_d k_td|``,
      of the capped score, of the bias, and of its difference from the largest score;
    * sums are in float32 at least. A sum of ``n`` terms, in any order, errs by ``sqrt(n)`` units of the sum of their
      magnitudes (Higham and Mary, SIAM J. Sci. Comput. 41, 2019). A soft cap may err by units of the cap. A score may
      err by units of the logarithms of sums, by which parts of the keys are merged.

    ``sum_t p_t s_t |v_t - o|`` is bounded by the root mean square of ``s_t`` and the deviation of the values, under the
    weights (Cauchy and Schwarz). A query that sees nothing has a bound of zero.

    The arguments are those of ``dense_attention``, and: ``dtype``, which attention is computed in (sums in fewer than
    32 bits are taken in float32); ``magnitudes``, shaped as ``key`` and ``value``, in whose units the rounding error of
    an element is counted: their own unless given, larger ones if they are computed from other stored numbers.

    Returns:
        ``[num_queries, num_heads, head_size_v], float64``.
    """
    scores, rounded, summed = _scores(layer, query, key, visible, sinks, bias, magnitudes and magnitudes[0])
    value, value_size = value.double(), (value.abs() if magnitudes is None else magnitudes[1]).double()
    no_value = value.new_zeros(1, *value.shape[1:])
    value, value_size = (torch.cat([tensor, no_value]) for tensor in (value, value_size))

    is_seen = scores > -math.inf
    weights = torch.softmax(scores, dim=-1).masked_fill(~is_seen, 0)
    num_seen = is_seen.sum(-1, keepdim=True)

    def mean(values: torch.Tensor) -> torch.Tensor:
        heads = weights.unflatten(0, (values.shape[1], -1))
        return torch.einsum("kgqt,tkd->qkgd", heads, values).flatten(1, 2)

    def of_scores(errors: torch.Tensor) -> torch.Tensor:
        return (weights * errors**2).sum(-1).sqrt().T[:, :, None] * deviation

    deviation = (mean(value**2) - mean(value) ** 2).clamp(min=0).sqrt()
    terms = mean(value_size)
    sum_dtype, unit, sum_unit = _units(dtype)
    bound = unit * (terms + of_scores(rounded))
    bound += sum_unit * (num_seen.sqrt().transpose(0, 1) * terms + of_scores(summed))
    # Weights and outputs that are too small for the dtype become zero.
    smallest = torch.finfo(dtype).tiny * unit + torch.finfo(sum_dtype).tiny
    # If heads see different tokens, each may lose what any of them loses.
    seen_by_any = visible if visible.ndim == 2 else visible.any(0)
    underflow = torch.einsum("qt,tkd->qkd", seen_by_any.double(), 1 + value_size[:-1]) * smallest
    underflow = underflow.repeat_interleave(weights.shape[0] // value.shape[1], dim=1)
    return ROUNDINGS / 2 * bound + underflow


def lse_error_bound(
    layer: QuerySpec,
    query: torch.Tensor,
    key: torch.Tensor,
    visible: torch.Tensor,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    magnitude: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the largest error of the log-sum-exp of attention in ``dtype``, ``[num_queries, num_heads], float64``.

    To first order, ``log(sum_t exp(s_t))`` errs by ``sum_t p_t (s_t' + e_t)`` if each score errs by ``s_t'`` and each
    term of the sum by the factor ``1 + e_t``. The rest is as for ``attention_error_bound``.
    """
    scores, rounded, summed = _scores(layer, query, key, visible, sinks, bias, magnitude)
    is_seen = scores > -math.inf
    weights = torch.softmax(scores, dim=-1).masked_fill(~is_seen, 0)
    _, unit, sum_unit = _units(dtype)
    errors = unit * (1 + rounded) + sum_unit * (is_seen.sum(-1, keepdim=True).sqrt() + summed)
    return ROUNDINGS / 2 * (weights * errors).sum(-1).T


def _units(dtype: torch.dtype) -> tuple[torch.dtype, float, float]:
    """Return the dtype of sums, and the relative spacing of numbers of ``dtype`` and of that one."""
    sum_dtype = dtype if dtype.itemsize > 4 else torch.float32
    return sum_dtype, torch.finfo(dtype).eps, torch.finfo(sum_dtype).eps


def _scores(
    layer: QuerySpec,
    query: torch.Tensor,
    key: torch.Tensor,
    visible: torch.Tensor,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
    magnitude: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the logits of the softmax, and the units by which they err in the dtype and in that of sums.

    Each is ``[num_heads, num_queries, num_tokens + 1], float64``; the last logit is the sink's, -inf without one.
    """
    query, key, key_size = (tensor.double() for tensor in (query, key, key.abs() if magnitude is None else magnitude))
    # The query heads of a KV head stay beside each other, so that keys and values are read as they are.
    query = query.unflatten(1, (key.shape[1], -1))

    def scored(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return torch.einsum("qkgd,tkd->kgqt", query, key).flatten(0, 1)

    scores = scored(query, key) * layer.scale
    size = scored(query.abs(), key_size) * abs(layer.scale)
    capped = 0.0
    if layer.soft_cap is not None:
        capped = layer.soft_cap
        scores = capped * torch.tanh(scores / capped)
        size = size * (1 - (scores / capped) ** 2)
    rounded = size + scores.abs()
    summed = math.sqrt(query.shape[-1]) * size + scores.abs() + capped
    if bias is not None:
        scores = scores + bias.double()
        rounded, summed = rounded + bias.double().abs(), summed + bias.double().abs()
    # The sink is one more token, whose value is zero.
    logits = scores.new_full((*scores.shape[:2], 1), -math.inf)
    if sinks is not None:
        logits = logits.zero_() + sinks.double()[:, None, None]
    rounded, summed = (torch.cat([tensor, logits.abs().nan_to_num(posinf=0.0)], dim=-1) for tensor in (rounded, summed))
    scores = torch.cat([scores.masked_fill(~visible, -math.inf), logits], dim=-1)
    is_seen = scores > -math.inf
    largest, num_seen = scores.amax(-1, keepdim=True), is_seen.sum(-1, keepdim=True)
    rounded = rounded + (largest - scores).masked_fill(~is_seen, 0)
    summed = summed + scores.abs().masked_fill(~is_seen, 0).amax(-1, keepdim=True) + num_seen.clamp(min=1).log()
    return scores, rounded, summed
