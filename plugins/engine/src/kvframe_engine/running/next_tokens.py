"""Samples the next tokens from the logits of all requests, and computes the log-probabilities of prompts.

A request's token depends on its own logits, parameters and random source only, never on what else is in the batch:
one uniform number per token, taken from the request's own source, is looked up in the cumulative distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch

from kvframe_engine.requests.request import Request

_ALL_TOKENS = 1 << 53
"""As many tokens as no vocabulary has."""

FAILED = -1
"""In place of a token: the request's logits are not numbers."""


def accept_drafts(token_ids: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the tokens that follow each request's known ones: accepted drafts, and the token after them.

    A token is sampled from each row of logits, as it would be without drafts: with the uniform number that the request
    uses for that token. A draft is accepted if it is the sampled token. So the tokens are those of a run without
    drafts. A draft of probability ``p`` is accepted with probability ``p``. Rejection sampling (Leviathan et al., arXiv
    2211.17192) accepts no more of a proposer that gives one token and no probabilities.

    Args:
        token_ids: For each request, the tokens that were sampled from the rows of its last known token and its drafts.
        drafts: The drafts of each, none for some.

    Returns:
        For each request its next tokens, at least one unless its logits are not numbers.
    """
    runs, start = [], 0
    for tokens in drafts:
        run = [*token_ids[start : start + 1 + len(tokens)]]
        start += len(run)
        num_accepted = next((index for index, draft in enumerate(tokens) if run[index] != draft), len(tokens))
        run = run[: num_accepted + 1]
        if run[-1] == FAILED:
            run.pop()
        runs.append(run)
    return runs


def sample(logits: torch.Tensor, requests: Sequence[Request], num_drawn: Sequence[int] | None = None) -> list[int]:
    """Return the token that follows each row of logits; ``FAILED`` if it has NaN or no finite maximum.

    The uniform numbers of requests are read, and not used up: ``Request.take`` does that.

    Args:
        logits: ``[num_rows, vocab_size], device``.
        requests: The request of each row.
        num_drawn: For each row, how many uniform numbers of its request other tokens use before it; none unless given.
    """
    token_ids: list[int] = sample_on_device(logits, Draws.of(requests, num_drawn, logits.device)).tolist()
    return token_ids


@attrs.frozen(eq=False)
class Draws:
    """The rows of logits whose tokens are drawn in one of two ways, and what they are drawn with.

    A row's own parameters choose the way, so that other rows cannot change its token.

    Attributes:
        rows: ``[n], int64, device``: their indices.
        numbers: ``[n, 6], float64, device``: the temperature, a uniform number, ``top_k``, ``top_p``, ``min_p`` and
            ``typical_p`` of each.
        truncates: Whether they are drawn from a part of the vocabulary.
        has_typical: Whether a row has a ``typical_p``.
    """

    rows: torch.Tensor
    numbers: torch.Tensor
    truncates: bool
    has_typical: bool

    @classmethod
    def of(cls, requests: Sequence[Request], num_drawn: Sequence[int] | None, device: torch.device) -> list[Draws]:
        """Return what the rows of requests are drawn with; nothing for greedy ones.

        Args:
            requests: The request of each row.
            num_drawn: As for ``sample``.
            device: Where the logits are.
        """
        if not any(request.params.temperature for request in requests):
            return []
        draws = []
        for truncates in (False, True):
            rows = [
                row
                for row, request in enumerate(requests)
                if request.params.temperature > 0 and request.params.truncates is truncates
            ]
            if rows:
                numbers = [_numbers_of(requests[row], num_drawn[row] if num_drawn else 0) for row in rows]
                has_typical = any(requests[row].params.typical_p < 1 for row in rows)
                rows_there = to_device(torch.tensor(rows), device)
                numbers_there = to_device(torch.tensor(numbers, dtype=torch.float64), device)
                draws.append(cls(rows_there, numbers_there, truncates, has_typical))
        return draws


def _numbers_of(request: Request, num_drawn: int) -> tuple[float, ...]:
    params = request.params
    top_k = float(min(params.top_k or _ALL_TOKENS, _ALL_TOKENS))
    return params.temperature, request.draw_ahead(num_drawn), top_k, params.top_p, params.min_p, params.typical_p


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of host values on a device, for which the host does not wait."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def sample_on_device(logits: torch.Tensor, draws: Sequence[Draws]) -> torch.Tensor:
    """Return ``[num_rows], int64, device``: the token that follows each row, as ``sample``; the host waits for nothing.

    Args:
        logits: ``[num_rows, vocab_size], device``.
        draws: The rows whose tokens are drawn. The others are greedy.
    """
    token_ids, maxima = _greatest(logits)
    for drawn in draws:
        temperatures, uniforms, *limits = drawn.numbers.split(1, dim=1)
        rows = logits.index_select(0, drawn.rows).to(torch.float64)
        # Shifted before the division: a tiny temperature then gives minus infinity, not NaN.
        shifted = rows - rows.max(dim=-1, keepdim=True).values
        probabilities = (shifted / temperatures).softmax(dim=-1)
        if drawn.truncates:
            chosen = draw_truncated(probabilities, uniforms, *limits, has_typical=drawn.has_typical)
        else:
            chosen = draw_full(probabilities, uniforms)
        token_ids = token_ids.index_copy(0, drawn.rows, chosen)
    return torch.where(maxima.isfinite(), token_ids, FAILED)


def _greatest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each row the first token with the greatest logit, and this logit, which is NaN if any of the row is.

    Args:
        logits: ``[num_rows, vocab_size], device``.
    """
    if logits.is_cpu:
        # NumPy's argmax reads several numbers at once: 128 rows of 32,000 take it 0.3 ms, and torch's max 3.5 ms.
        numbers = (logits if logits.dtype.itemsize > 2 else logits.float()).numpy()
        indices = numbers.argmax(axis=-1)
        return torch.from_numpy(indices), torch.from_numpy(numbers[np.arange(len(indices)), indices])
    maxima, indices_of_maxima = logits.max(dim=-1)
    return indices_of_maxima, maxima


def token_logprobs(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> torch.Tensor:
    """Return the log-probabilities of some tokens, computed in float32, and of the most likely tokens instead of each.

    Args:
        logits: ``[num_rows, vocab_size], device``.
        rows: ``[num_tokens], int64, device``: for each token, the row that it follows.
        token_ids: ``[num_tokens], int64, device``.
        num_top: How many of the most likely tokens.

    Returns:
        ``[num_tokens, 1 + 2 * num_top], float64, device``: for each token, its log-probability; the ids of the most
        likely tokens; and their log-probabilities, the greatest first. There are fewer if the vocabulary is smaller.
    """
    # log_softmax and topk of all rows: selecting some rows first would copy about as much again.
    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    columns = [logprobs[rows, token_ids].unsqueeze(1)]
    if num_top:
        top_values, top_ids = logprobs.topk(min(num_top, logits.shape[1]), dim=-1)
        columns += [top_ids[rows], top_values[rows]]
    return torch.cat([column.double() for column in columns], dim=1)


def draw_full(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw one token per row from the whole vocabulary: ``[num_rows], int64, device``.

    Args:
        probabilities: ``[num_rows, vocab_size], float64, device``.
        uniforms: ``[num_rows, 1], float64, device``, in ``[0, 1)``.
    """
    cumulative = probabilities.cumsum(dim=-1)
    # A uniform of 53 bits times a total rounds to less than the total, so the search always ends on a token; its
    # strict comparison passes over tokens of probability zero.
    drawn_indices = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    return _within(drawn_indices, probabilities).squeeze(1)


def _within(indices: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """Return places in rows of probabilities; those of rows with NaN, which end after the row, are moved into it."""
    return indices.clamp(max=probabilities.shape[1] - 1)


def draw_truncated(
    probabilities: torch.Tensor,
    uniforms: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    typical_p: torch.Tensor,
    *,
    has_typical: bool = True,
) -> torch.Tensor:
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
        has_typical: Whether any ``typical_p`` is below 1.

    Returns:
        ``[num_rows], int64, device``.
    """
    ordered, token_ids = probabilities.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(ordered.shape[1], device=ordered.device)
    ordered = ordered.masked_fill(ranks >= top_k, 0.0)
    cumulative = ordered.cumsum(dim=-1)
    # The first token stays even if top_p of the mass rounds to 0.
    ordered = ordered.masked_fill((ranks > 0) & (cumulative - ordered >= top_p * cumulative[:, -1:]), 0.0)
    ordered = ordered.masked_fill(ordered < min_p * ordered[:, :1], 0.0)
    if has_typical:
        ordered = _typical(ordered, typical_p)
    cumulative = ordered.cumsum(dim=-1)
    drawn_indices = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    return token_ids.gather(1, _within(drawn_indices, probabilities)).squeeze(1)


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
