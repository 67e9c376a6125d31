"""What a cache core still finds of prompts: after others with the same beginning, and after blocks were evicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from benchmarks.cache.core_cases import BLOCK_SIZE, Setting
from benchmarks.cache.interface import Core, TokenIds, draw
from benchmarks.cache.loss import random_loss
from benchmarks.cache.work import SEED, find

FILLING = 64
"""Tokens by which a request grows that takes the place of cached blocks."""


def siblings(core: Core, setting: Setting, sizes: Mapping[str, int]) -> list[int]:
    """Return how many tokens were cached of each of several prompts with a common beginning, one after the other."""
    random = Random(SEED)
    core.build(setting)
    shared = draw(random, sizes["shared"])
    hits = []
    for _ in range(sizes["num_prompts"]):
        prompt = core.prepare([*shared, *draw(random, sizes["own"])])
        hits.append(core.compute(prompt, sizes["chunk"]))
        core.let_go(prompt)
    return hits


def eviction(core: Core, setting: Setting, sizes: Mapping[str, int]) -> dict[str, int]:
    """Compute prompts and let them go, let others take the room of some of their blocks, and look the prompts up again.

    Returns:
        The blocks evicted, and the tokens found then.
    """
    random = Random(SEED)
    core.build(setting)
    prompts = [[*draw(random, sizes["length"]), 0] for _ in range(sizes["num_prompts"])]
    for tokens in prompts:
        _come_and_go(core, tokens, sizes["chunk"])
    for _ in range(sizes.get("num_visits", 0)):
        tokens = random.choice(prompts)
        _come_and_go(core, tokens[: random.randrange(1, len(tokens))], sizes["chunk"])
    evicted = _take_room(core, sizes["num_evicted"], random, setting, sizes["length"])
    return {"evicted": evicted, "tokens": sum(find(core, tokens) for tokens in prompts)}


def _come_and_go(core: Core, tokens: TokenIds, chunk: int) -> None:
    prompt = core.prepare([*tokens])
    core.compute(prompt, chunk)
    core.let_go(prompt)


def _take_room(core: Core, num_blocks: int, random: Random, setting: Setting, longest: int) -> int:
    """Let requests grow until at least so many blocks are evicted, or none are left; return how many were."""
    before = core.num_evicted()
    evicted, length, most = 0, longest, FILLING // BLOCK_SIZE * len(setting.windows)
    prompt: Any = None
    while evicted < num_blocks:
        # Counting takes long: not before so many can be evicted.
        for _ in range(-(-(num_blocks - evicted) // most)):
            if length == longest:
                prompt, length = core.receive(draw(random, longest)), 0
            length += FILLING
            if not core.grow(prompt, length):
                return core.num_evicted() - before
        evicted = core.num_evicted() - before
    return evicted


STUDIES: dict[str, Callable[[Core, Setting, Mapping[str, int]], Any]] = {
    "siblings": siblings,
    "eviction": eviction,
    "random": random_loss,
}
