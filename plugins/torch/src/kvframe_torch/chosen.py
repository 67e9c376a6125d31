"""Attention over chosen tokens in plain torch: gathers the keys and values of a few queries at a time."""

from __future__ import annotations

import math

import torch

from kvframe.contract import ChosenPlaces, KVCache, QuerySpec, lse_dtype

MAX_GATHERED = 1 << 25
"""The most elements of gathered keys and values at once, unless a single query has more."""


def attend_chosen(
    query: torch.Tensor,
    kv_cache: KVCache,
    places: ChosenPlaces,
    layer: QuerySpec,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    """Return attention over the chosen tokens, ``[num_tokens, num_heads, head_size_v], device``.

    Args:
        query: ``[num_tokens, num_heads, head_size], device``.
        kv_cache: ``k`` and ``v`` of the layer.
        places: Where the chosen tokens lie.
        layer: For the scale and the soft cap.
        sinks: ``[num_heads], device``, or None.
        out: Where the result is written; None for a new tensor.
        lse: Where the log-sum-exp is written, ``[num_tokens, num_heads]``; None if it is not wanted.
    """
    num_tokens, num_heads, _ = query.shape
    num_choosers, num_chosen = places.seen.shape[1:]
    key, value = kv_cache["k"], kv_cache["v"]
    output = query.new_empty(num_tokens, num_heads, value.shape[-1]) if out is None else out
    size = num_choosers * num_chosen * (key.shape[-1] + value.shape[-1]) * (key.shape[-2] // num_choosers)
    step = max(1, MAX_GATHERED // size)
    for first in range(0, num_tokens, step):
        part = slice(first, first + step)
        output[part], log_sums = _attend(query[part], key, value, _rows(places, part), layer, sinks)
        if lse is not None:
            lse[part] = log_sums
    return output


def _rows(places: ChosenPlaces, part: slice) -> ChosenPlaces:
    return ChosenPlaces(places.blocks[part], places.offsets[part], places.seen[part])


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    places: ChosenPlaces,
    layer: QuerySpec,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_choosers, num_chosen = places.seen.shape
    num_kv_heads, dtype = key.shape[2], lse_dtype(query.dtype)
    # The KV heads of a chooser read its tokens: [num_tokens, num_choosers, num_chosen, kv_heads, size].
    heads = torch.arange(num_kv_heads, device=query.device).view(1, num_choosers, 1, -1)
    index = places.blocks[..., None], places.offsets[..., None], heads
    keys, values = (tensor[index].transpose(2, 3).flatten(1, 2).to(dtype) for tensor in (key, value))
    hidden = ~places.seen.repeat_interleave(num_kv_heads // num_choosers, dim=1)
    # A token that is not read may hold anything, NaN too.
    values = values.masked_fill(hidden[..., None], 0)
    queries = query.to(dtype).view(num_tokens, num_kv_heads, -1, query.shape[2]) * layer.scale
    scores = queries @ keys.transpose(2, 3)
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    scores = scores.masked_fill(hidden[:, :, None], -math.inf).view(num_tokens, -1, num_chosen)
    lse = scores.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(dtype).expand_as(lse))
    weights = (scores - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp()
    output = weights.view(num_tokens, num_kv_heads, -1, num_chosen) @ values
    return output.flatten(1, 2).to(query.dtype), lse
