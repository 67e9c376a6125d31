"""Makes the requests of a batch: their parameters, and the samples of one prompt as separate requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from kvframe import RangedTokens
from kvframe.contract.errors import shown
from kvframe.contract.specs import TokenRange
from kvframe_engine.requests.params import SamplingParams, bad_params
from kvframe_engine.requests.processors import Started
from kvframe_engine.requests.request import Request
from kvframe_engine.requests.text import TextStream


def checked_params(params: Any, default: SamplingParams) -> SamplingParams:
    """Return a request's parameters: ``default`` for None.

    Raises:
        RequestError: ``params`` is neither ``SamplingParams`` nor None (``bad_params``).
    """
    if params is None:
        return default
    if not isinstance(params, SamplingParams):
        raise bad_params(f"params must be a SamplingParams or None, not {shown(params)}")
    return params


def params_for_each(params: Any, num_requests: int) -> Sequence[Any]:
    """Return the parameters of each request of a batch; they are not checked yet.

    Args:
        params: One value for all requests, or a sequence with one for each; None for the default.
        num_requests: The number of requests.

    Raises:
        RequestError: ``params`` is neither, or the sequence has another length (``bad_params``).
    """
    if params is None or isinstance(params, SamplingParams):
        return [params] * num_requests
    if not isinstance(params, Sequence) or isinstance(params, str | bytes | bytearray):
        raise bad_params(f"params must be a SamplingParams, or one for each prompt in a list, not {shown(params)}")
    if len(params) != num_requests:
        raise bad_params(f"{num_requests} prompts have {len(params)} params")
    return params


def sample_ids(request_id: str, count: int) -> list[str]:
    """Return the ids of a request's samples in the engine: the request's id, then ids derived from it."""
    return [request_id, *(f"{request_id}/{index}" for index in range(1, count))]


def make_samples(
    ids: Sequence[str],
    token_ids: Sequence[int],
    params: SamplingParams,
    make_text_stream: Callable[[], TextStream | None],
    start_processors: Callable[[], tuple[Started, ...]],
    *,
    forks: bool,
    ranges: tuple[TokenRange, ...] = (),
    **shared: Any,
) -> list[Request]:
    """Return the samples of one prompt as requests.

    Args:
        ids: Their ids, the first one the id that the owner uses.
        token_ids: The prompt.
        params: The parameters of the prompt; sample ``i`` has the seed ``seed + i``.
        make_text_stream: Returns what turns the tokens of one sample into text; None if there is no tokenizer.
        start_processors: Returns the logits processors of one sample.
        forks: Whether the other samples fork from the first one, so that the prompt is computed once.
        ranges: Ranges of the prompt whose tokens see each other in both directions.
        shared: Further arguments of ``Request.create``, equal for all samples.
    """
    requests = [
        Request.create(
            each_id,
            token_ids,
            each,
            text_stream=make_text_stream(),
            processors=start_processors(),
            asked_id=ids[0],
            sample=sample,
            ranges=ranges,
            **shared,
        )
        for sample, (each_id, each) in enumerate(zip(ids, _params_of_each(params), strict=True))
    ]
    # If the last token is in a range, no step ends before it.
    if len(requests) > 1 and forks and RangedTokens.before_range(ranges, len(token_ids) - 1) == len(token_ids) - 1:
        # Each sample computes the prompt's last token itself, because it samples from the logits of that token.
        requests[0].pause_at = len(token_ids) - 1
        for request in requests[1:]:
            request.forks_from = requests[0]
    return requests


def _params_of_each(params: SamplingParams) -> list[SamplingParams]:
    """Return the params of each sample, as if it were a request of its own: sample ``i`` has the seed ``seed + i``."""
    if params.n == 1:
        return [params]
    seeds = [None if params.seed is None else params.seed + index for index in range(params.n)]
    return [attrs.evolve(params, n=1, seed=seed) for seed in seeds]
