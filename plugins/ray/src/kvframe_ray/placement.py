"""Which replica gets a request: the one that has to compute the fewest tokens before it is answered."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TypeVar

import attrs

ReplicaT = TypeVar("ReplicaT")

COST_OF_A_TOKEN = 1.25
"""What it costs to compute a token: the request's own time, and a part of the time of requests that come after it."""

TOKENS_PER_REQUEST = 32
"""What a running request costs the requests beside it, as tokens of a prompt."""


@attrs.define
class Load:
    """What a replica has to do.

    Attributes:
        tokens: Tokens of prompts that it has still to compute.
        requests: Requests that it has not answered.
    """

    tokens: int = 0
    requests: int = 0


def order_replicas(num_tokens: int, hits: Mapping[ReplicaT, int], loads: Mapping[ReplicaT, Load]) -> list[ReplicaT]:
    """Return all replicas, the best one first.

    The cost of a replica is in tokens: ``COST_OF_A_TOKEN`` for each of the prompt that it has not cached, those that it
    computes before, and ``TOKENS_PER_REQUEST`` for each request that it serves. Replicas of one cost are in a random
    order.

    Args:
        num_tokens: The prompt's tokens.
        hits: The tokens of the prompt that replicas would find in their caches; 0 for a replica that is not named.
        loads: What each replica has to do.
    """
    costs = {
        replica: COST_OF_A_TOKEN * (num_tokens - hits.get(replica, 0))
        + load.tokens
        + TOKENS_PER_REQUEST * load.requests
        for replica, load in loads.items()
    }
    replicas = [*loads]
    random.shuffle(replicas)
    return sorted(replicas, key=costs.__getitem__)
