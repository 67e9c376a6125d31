"""Several samples of one prompt: requests that share its computation, each with a random source of its own."""

from __future__ import annotations

import attrs

from kvframe.engine.request import SamplingParams


def sample_ids(request_id: str, count: int) -> list[str]:
    """Return the ids by which the samples of a request are kept in the engine: its own, and others made of it."""
    return [request_id, *(f"{request_id}/{index}" for index in range(1, count))]


def params_of_each(params: SamplingParams) -> list[SamplingParams]:
    """Return the params of each sample, as if it were a request of its own: sample ``i`` has the seed ``seed + i``."""
    if params.n == 1:
        return [params]
    seeds = [None if params.seed is None else params.seed + index for index in range(params.n)]
    return [attrs.evolve(params, n=1, seed=seed) for seed in seeds]
