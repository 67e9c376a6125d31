"""A bound on the rounding error of attention, computed from the numbers of the case.

The bound is a property of the case. It needs no run in low precision, so it is the same on every machine, and for every
order in which a machine's kernels add.
"""

from __future__ import annotations

import math

import attrs
import torch

from kvframe.contract.specs import QuerySpec
from kvframe_testing.reference import logits_of, score

ROUNDINGS = 6
"""The most operations between a weight or a value and the output that round by half a unit each: the exponential, the
rounding of the weight to the dtype, the sum, the division by the denominator, the merge of two parts of the keys, and
the output. It also bounds those of a score: the scaled query, the product, the scale, the soft cap, the bias, and the
difference from the largest score."""


@attrs.frozen(eq=False)
class Scored:
    """The logits of the softmax, and the units by which they err in the dtype and in that of sums.

    Each is ``[num_heads, num_queries, num_tokens + 1], float64``; the last logit is the sink's, -inf without one.
    """

    logits: torch.Tensor
    rounded: torch.Tensor
    summed: torch.Tensor


def attention_error_bound(
    scored: Scored,
    value: torch.Tensor,
    visible: torch.Tensor,
    *,
    dtype: torch.dtype,
    magnitude: torch.Tensor | None = None,
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

    Args:
        scored: The scores (``score_with_errors``).
        value: As for ``dense_attention``.
        visible: As for ``dense_attention``.
        dtype: What attention is computed in; sums in fewer than 32 bits are taken in float32.
        magnitude: Shaped as ``value``: the units of the rounding error of its elements. Their own magnitudes unless
            given, larger ones if they are computed from other stored numbers.

    Returns:
        ``[num_queries, num_heads, head_size_v], float64``.
    """
    value, value_size = value.double(), (value.abs() if magnitude is None else magnitude).double()
    no_value = value.new_zeros(1, *value.shape[1:])
    value, value_size = (torch.cat([tensor, no_value]) for tensor in (value, value_size))

    is_seen = scored.logits > -math.inf
    weights = torch.softmax(scored.logits, dim=-1).masked_fill(~is_seen, 0)
    num_seen = is_seen.sum(-1, keepdim=True)

    def mean(values: torch.Tensor) -> torch.Tensor:
        heads = weights.unflatten(0, (values.shape[1], -1))
        return torch.einsum("kgqt,tkd->qkgd", heads, values).flatten(1, 2)

    def of_scores(errors: torch.Tensor) -> torch.Tensor:
        return (weights * errors**2).sum(-1).sqrt().T[:, :, None] * deviation

    deviation = (mean(value**2) - mean(value) ** 2).clamp(min=0).sqrt()
    terms = mean(value_size)
    sum_dtype, unit, sum_unit = _units(dtype)
    bound = unit * (terms + of_scores(scored.rounded))
    bound += sum_unit * (num_seen.sqrt().transpose(0, 1) * terms + of_scores(scored.summed))
    # Weights and outputs that are too small for the dtype become zero.
    smallest = torch.finfo(dtype).tiny * unit + torch.finfo(sum_dtype).tiny
    # If heads see different tokens, each may lose what any of them loses.
    seen_by_any = visible if visible.ndim == 2 else visible.any(0)
    underflow = torch.einsum("qt,tkd->qkd", seen_by_any.double(), 1 + value_size[:-1]) * smallest
    underflow = underflow.repeat_interleave(weights.shape[0] // value.shape[1], dim=1)
    return ROUNDINGS / 2 * bound + underflow


def lse_error_bound(scored: Scored, *, dtype: torch.dtype) -> torch.Tensor:
    """Return the largest error of the log-sum-exp of attention in ``dtype``, ``[num_queries, num_heads], float64``.

    To first order, ``log(sum_t exp(s_t))`` errs by ``sum_t p_t (s_t' + e_t)`` if each score errs by ``s_t'`` and each
    term of the sum by the factor ``1 + e_t``. The rest is as for ``attention_error_bound``.
    """
    is_seen = scored.logits > -math.inf
    weights = torch.softmax(scored.logits, dim=-1).masked_fill(~is_seen, 0)
    _, unit, sum_unit = _units(dtype)
    errors = unit * (1 + scored.rounded) + sum_unit * (is_seen.sum(-1, keepdim=True).sqrt() + scored.summed)
    return ROUNDINGS / 2 * (weights * errors).sum(-1).T


def _units(dtype: torch.dtype) -> tuple[torch.dtype, float, float]:
    """Return the dtype of sums, and the relative spacing of numbers of ``dtype`` and of that one."""
    sum_dtype = dtype if dtype.itemsize > 4 else torch.float32
    return sum_dtype, torch.finfo(dtype).eps, torch.finfo(sum_dtype).eps


def score_with_errors(
    layer: QuerySpec,
    query: torch.Tensor,
    key: torch.Tensor,
    visible: torch.Tensor,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    magnitude: torch.Tensor | None = None,
) -> Scored:
    """Return the scores of ``dense_attention``, whose arguments it takes, in float64.

    ``magnitude`` is shaped as ``key``, as for ``attention_error_bound``.
    """
    query, key, key_size = (tensor.double() for tensor in (query, key, key.abs() if magnitude is None else magnitude))
    without_cap = attrs.evolve(layer, soft_cap=None, scale=abs(layer.scale))
    scores, size, cap = score(layer, query, key), score(without_cap, query.abs(), key_size), layer.soft_cap or 0.0
    if layer.soft_cap is not None:
        size = size * (1 - (scores / cap) ** 2)
    more = scores.abs() if bias is None else scores.abs() + bias.double().abs()
    logits = logits_of(scores, visible, sinks, None if bias is None else bias.double())
    sink = logits[..., -1:].abs().nan_to_num(posinf=0.0)
    rounded = torch.cat([size + more, sink], dim=-1)
    summed = torch.cat([math.sqrt(query.shape[-1]) * size + more + cap, sink], dim=-1)
    is_seen = logits > -math.inf
    largest, num_seen = logits.amax(-1, keepdim=True), is_seen.sum(-1, keepdim=True)
    rounded = rounded + (largest - logits).masked_fill(~is_seen, 0)
    summed = summed + logits.abs().masked_fill(~is_seen, 0).amax(-1, keepdim=True) + num_seen.clamp(min=1).log()
    return Scored(logits, rounded, summed)
