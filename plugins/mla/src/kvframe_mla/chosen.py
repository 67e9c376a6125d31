"""Latent attention over chosen tokens: in the space of latents, for a few queries at a time."""

from __future__ import annotations

import math

import torch

from kvframe.contract import ChosenPlaces, lse_dtype

MAX_GATHERED = 1 << 24
"""The most elements of gathered latents at once, unless a single query has more."""


def attend_chosen(
    query: torch.Tensor,
    latent: torch.Tensor,
    places: ChosenPlaces,
    latent_size: int,
    sinks: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    """Return what the queries read, in the space of latents: ``[num_tokens, num_heads, latent_size]``.

    Args:
        query: ``[num_tokens, num_heads, latent_size + rope_size], device``: absorbed and scaled.
        latent: ``[num_block_ids, block_size, latent_size + rope_size], device``: the layer's state.
        places: Where the chosen tokens lie, for one chooser.
        latent_size: Elements of a latent.
        sinks: ``[num_heads], device``, or None.
        lse: Where the log-sum-exp is written, ``[num_tokens, num_heads]``; None if it is not wanted.
    """
    num_tokens, num_heads, size = query.shape
    output = query.new_empty(num_tokens, num_heads, latent_size)
    step = max(1, MAX_GATHERED // (places.seen.shape[2] * size))
    for first in range(0, num_tokens, step):
        part = slice(first, first + step)
        seen = places.seen[part, 0]
        # A token that is not read may hold anything, NaN too.
        tokens = latent[places.blocks[part, 0], places.offsets[part, 0]].to(query.dtype)
        tokens = tokens.masked_fill(~seen[..., None], 0)
        scores = torch.bmm(query[part], tokens.transpose(1, 2)).to(lse_dtype(query.dtype))
        scores = scores.masked_fill(~seen[:, None], -math.inf)
        log_sums = scores.logsumexp(-1)
        if sinks is not None:
            log_sums = torch.logaddexp(log_sums, sinks.to(log_sums.dtype).expand_as(log_sums))
        weights = (scores - log_sums.masked_fill(log_sums == -math.inf, 0)[..., None]).exp()
        output[part] = torch.bmm(weights.to(query.dtype), tokens[..., :latent_size])
        if lse is not None:
            lse[part] = log_sums
    return output
