"""Samples the next tokens from the logits of all requests, and computes the log-probabilities of prompts.

A request's token depends on its own logits, parameters and random source only, never on what else is in the batch:
one uniform number per token, taken from the request's own source, is looked up in the cumulative distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import numpy as np
import torch

from kvframe_engine.requests.request import Request

FAILED = -1
"""In place of a token: the request's logits are not numbers."""


def accept_drafts(
    logits: torch.Tensor, requests: Sequence[Request], drafts: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Return the tokens that follow each request's known ones: accepted drafts, and the token after them.

    A token is sampled from each row of logits, as it would be without drafts: with the uniform number that the request
    uses for that token. A draft is accepted if it is the sampled token. So the tokens are those of a run without
    drafts. A draft of probability ``p`` is accepted with probability ``p``. Rejection sampling (Leviathan et al., arXiv
    2211.17192) accepts no more of a proposer that gives one token and no probabilities.

    Args:
        logits: ``[num_rows, vocab_size], device``: for each request, the rows of its last known token and its drafts.
        requests: The requests.
        drafts: The drafts of each, none for some.

    Returns:
        For each request its next tokens, at least one unless its logits are not numbers.
    """
    owners = [request for request, each in zip(requests, drafts, strict=True) for _ in range(1 + len(each))]
    token_ids = sample(logits, owners, [place for each in drafts for place in range(1 + len(each))])
    runs, start = [], 0
    for request, each in zip(requests, drafts, strict=True):
        run = token_ids[start : start + 1 + len(each)]
        start += len(run)
        num_accepted = next((place for place, draft in enumerate(each) if run[place] != draft), len(each))
        run = run[: num_accepted + 1]
        if run[-1] == FAILED:
            run.pop()
        if request.params.temperature > 0:
            for _ in run:
                request.draw()
        runs.append(run)
    return runs


def sample(logits: torch.Tensor, requests: Sequence[Request], places: Sequence[int] | None = None) -> list[int]:
    """Return the token that follows each row of logits; ``FAILED`` if it has NaN or no finite maximum.

    Args:
        logits: ``[num_rows, vocab_size], device``.
        requests: The request of each row.
        places: If a request has several rows, the number of each row among them. The requests' uniform numbers are
            then read and not used up.
    """
    token_ids, maxima = _greatest(logits)
    full: list[int] = []
    truncated: list[int] = []
    for index, request in enumerate(requests):
        if not isfinite(maxima[index]):
            token_ids[index] = FAILED
        elif request.params.temperature > 0:
            (truncated if request.params.truncates else full).append(index)
    # There are two ways to draw. A row's own parameters choose the way, so that other rows cannot change its token.
    for rows, truncate in ((full, False), (truncated, True)):
        if rows:
            if places is None:
                uniforms = [requests[row].draw() for row in rows]
            else:
                uniforms = [requests[row].draw_ahead(places[row]) for row in rows]
            drawn = _draw(logits[rows], [requests[row] for row in rows], uniforms, truncate)
            for row, token_id in zip(rows, drawn, strict=True):
                token_ids[row] = token_id
    return token_ids


def _greatest(logits: torch.Tensor) -> tuple[list[int], list[float]]:
    """Return for each row the first token with the greatest logit, and this logit, which is NaN if any of the row is.

    Args:
        logits: ``[num_rows, vocab_size], device``.
    """
    if logits.is_cpu:
        # NumPy's argmax reads several numbers at once: 128 rows of 32,000 take it 0.3 ms, and torch's max 3.5 ms.
        numbers = (logits if logits.dtype.itemsize > 2 else logits.float()).numpy()
        indices = numbers.argmax(axis=-1)
        return indices.tolist(), numbers[np.arange(len(indices)), indices].tolist()
    maxima, found = logits.max(dim=-1)
    return found.tolist(), maxima.tolist()


def add_logprobs(
    logits: torch.Tensor,
    requests: Sequence[Request],
    runs: Sequence[Sequence[int]],
    num_rows: Sequence[int],
) -> None:
    """Give requests that ask for them the log-probabilities of their next tokens.

    Args:
        logits: ``[num_rows, vocab_size], device``.
        requests: The requests.
        runs: The next tokens of each, which follow its first rows of logits; ``FAILED`` for none.
        num_rows: How many rows of logits each request has.
    """
    rows: list[int] = []
    token_ids: list[int] = []
    owners: list[Request] = []
    start = 0
    for request, run, count in zip(requests, runs, num_rows, strict=True):
        if request.params.logprobs:
            run = [token for token in run if token != FAILED]
            rows += range(start, start + len(run))
            token_ids += run
            owners += [request] * len(run)
        start += count
    logprobs = logits[rows].log_softmax(dim=-1, dtype=torch.float32)
    values: list[float] = logprobs[range(len(rows)), token_ids].tolist()
    num_top = min(max((request.params.top_logprobs for request in owners), default=0), logits.shape[1])
    top_values, top_ids = (tensor.tolist() for tensor in logprobs.topk(num_top, dim=-1))
    for index, request in enumerate(owners):
        request.transcript.logprobs.append(values[index])
        count = request.params.top_logprobs
        if count:
            top = dict(zip(top_ids[index][:count], top_values[index][:count], strict=True))
            request.transcript.top_logprobs.append(top)


def token_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, num_top: int = 0
) -> tuple[list[float], list[list[int]], list[list[float]]]:
    """Return the log-probabilities of some tokens, computed in float32, and of the most likely tokens instead of each.

    Args:
        logits: ``[num_rows, vocab_size], device``.
        rows: ``[num_tokens], int64, device``: for each token, the row that it follows.
        token_ids: ``[num_tokens], int64, device``.
        num_top: How many of the most likely tokens.

    Returns:
        For each token, its log-probability; the ids of the most likely tokens; and their log-probabilities, the
        greatest first.
    """
    # log_softmax and topk of all rows: selecting some rows first would copy about as much again.
    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    values: list[float] = logprobs[rows, token_ids].tolist()
    if not num_top:
        return values, [], []
    top_values, top_ids = logprobs.topk(min(num_top, logits.shape[1]), dim=-1)
    return values, top_ids[rows].tolist(), top_values[rows].tolist()


def _draw(logits: torch.Tensor, requests: list[Request], numbers: list[float], truncate: bool) -> list[int]:
    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device).unsqueeze(1)

    # Shifted before the division: a tiny temperature then gives minus infinity, not NaN.
    shifted = logits.to(torch.float64) - logits.max(dim=-1, keepdim=True).values
    temperatures = column([request.params.temperature for request in requests])
    probabilities = (shifted / temperatures).softmax(dim=-1)
    uniforms = column(numbers)
    if not truncate:
        return draw_full(probabilities, uniforms)
    vocab_size = logits.shape[1]
    top_k = column([float(min(request.params.top_k or vocab_size, vocab_size)) for request in requests])
    top_p, min_p, typical_p = (
        column([getattr(request.params, name) for request in requests]) for name in ("top_p", "min_p", "typical_p")
    )
    return draw_truncated(probabilities, uniforms, top_k, top_p, min_p, typical_p)


def draw_full(probabilities: torch.Tensor, uniforms: torch.Tensor) -> list[int]:
    """Draw one token per row from the whole vocabulary.

    Args:
        probabilities: ``[num_rows, vocab_size], float64, device``.
        uniforms: ``[num_rows, 1], float64, device``, in ``[0, 1)``.
    """
    cumulative = probabilities.cumsum(dim=-1)
    # A uniform of 53 bits times a total rounds to less than the total, so the search always ends on a token; its
    # strict comparison passes over tokens of probability zero.
    found = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    drawn: list[int] = found.squeeze(1).tolist()
    return drawn


def draw_truncated(
    probabilities: torch.Tensor,
    uniforms: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    typical_p: torch.Tensor,
) -> list[int]:
    """Draw one token per row from the part of the vocabulary that four limits leave, one after the other.

    Args:
        probabilities: ``[num_rows, vocab_size], float64, device``.
        uniforms: ``[num_rows, 1], float64, device``, in ``[0, 1)``.
        top_k: ``[num_rows, 1], float64, device``, at least 1: leaves so many of the most likely tokens.
        top_p: ``[num_rows, 1], float64, device``, in ``(0, 1]``: leaves the fewest most likely tokens that have this
            part of the mass left.
        min_p: ``[num_rows, 1], float64, device``, in ``[0, 1]``: leaves the tokens of this part of the greatest
            probability.
        typical_p: ``[num_rows, 1], float64, device``, in ``(0, 1]``: leaves the fewest most typical tokens that have
            this part of the mass left.
    """
    ordered, token_ids = probabilities.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(ordered.shape[1], device=ordered.device)
    ordered = ordered.masked_fill(ranks >= top_k, 0.0)
    cumulative = ordered.cumsum(dim=-1)
    # The first token stays even if top_p of the mass rounds to 0.
    ordered = ordered.masked_fill((ranks > 0) & (cumulative - ordered >= top_p * cumulative[:, -1:]), 0.0)
    ordered = ordered.masked_fill(ordered < min_p * ordered[:, :1], 0.0)
    if bool((typical_p < 1).any()):
        ordered = _typical(ordered, typical_p)
    cumulative = ordered.cumsum(dim=-1)
    found = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    drawn: list[int] = token_ids.gather(1, found).squeeze(1).tolist()
    return drawn


def _typical(probabilities: torch.Tensor, typical_p: torch.Tensor) -> torch.Tensor:
    """Return probabilities with zeros for all but the most typical tokens of each row.

    Args:
        probabilities: ``[num_rows, vocab_size], float64, device``, of any total.
        typical_p: ``[num_rows, 1], float64, device``, in ``(0, 1]``; 1 leaves all tokens.
    """
    shares = probabilities / probabilities.sum(dim=-1, keepdim=True)
    information = -shares.log()
    entropy = torch.special.entr(shares).sum(dim=-1, keepdim=True)
    distances, order = (information - entropy).abs().sort(dim=-1, stable=True)
    cumulative = shares.gather(1, order).cumsum(dim=-1)
    last = (cumulative < typical_p).sum(dim=-1, keepdim=True).clamp(max=shares.shape[1] - 1)
    is_typical = (information - entropy).abs() <= distances.gather(1, last)
    return probabilities.masked_fill(~is_typical & (typical_p < 1), 0.0)
