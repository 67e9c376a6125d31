"""What a cache core still finds of prompts: after others that begin alike, after evictions, after random losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.cache.checks import TokenIds, draw
from benchmarks.cache.core_cases import BLOCK_SIZE, Setting
from benchmarks.cache.work import SEED, find

if TYPE_CHECKING:
    from benchmarks.cache.kvframe_core import KVFrame as Core

DRAWS_BY_DEFINITION = 20
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


def random_loss(core: Core, setting: Setting, sizes: Mapping[str, int]) -> dict[str, int]:
    """Compute prompts and let them go, give up cached blocks that chance chooses, and look the prompts up again.

    Returns:
        The blocks cached, those chosen, those still cached after it, and the tokens found then.
    """
    random = Random(SEED)
    core.build(setting)
    prompts = [[*draw(random, sizes["length"]), 0] for _ in range(sizes["num_prompts"])]
    for tokens in prompts:
        _come_and_go(core, tokens, sizes["chunk"])
    cached = core.cached()
    chosen = Random(sizes["draw"]).sample(cached, len(cached) * sizes["percent"] // 100)
    core.lose(chosen)
    found = sum(find(core, tokens) for tokens in prompts)
    return {"cached": len(cached), "chosen": len(chosen), "left": len(core.cached()), "tokens": found}


def loss_by_definition(
    windows: Sequence[int | None], sizes: Mapping[str, int], shares: Sequence[int]
) -> dict[str, list[float]]:
    """Return what an exact cache that keeps every block finds at best: the longest prefix whose live blocks are there.

    Returns:
        For each share of lost blocks, in percent, the tokens found, in percent; means of several draws.
    """
    chance = np.random.default_rng(SEED)
    num_blocks, num_prompts = sizes["length"] // BLOCK_SIZE, sizes["num_prompts"]
    total = num_prompts * len(windows) * num_blocks
    found = []
    for share in shares:
        hits = []
        for _ in range(DRAWS_BY_DEFINITION):
            is_lost = np.zeros(total, dtype=bool)
            is_lost[chance.permutation(total)[: total * share // 100]] = True
            prompts = is_lost.reshape(num_prompts, len(windows), num_blocks)
            hits.append(sum(_longest(windows, prompt) for prompt in prompts) / (num_prompts * num_blocks))
        found.append(100 * float(np.mean(hits)))
    return {"chosen": [float(share) for share in shares], "found": found}


def _longest(windows: Sequence[int | None], is_lost: np.ndarray) -> int:
    """Return the most blocks of a prompt from which it can go on; ``is_lost`` is ``[num_groups, num_blocks]``."""
    num_lost = np.concatenate([np.zeros((len(windows), 1), dtype=int), is_lost.cumsum(axis=1)], axis=1)
    ends = np.arange(is_lost.shape[1] + 1)
    is_whole = np.ones(len(ends), dtype=bool)
    for window, lost in zip(windows, num_lost, strict=True):
        first = 0 * ends if window is None else np.maximum(0, ends * BLOCK_SIZE - window + 1) // BLOCK_SIZE
        is_whole &= lost[ends] == lost[first]
    return int(ends[is_whole].max())


STUDIES: dict[str, Callable[[Core, Setting, Mapping[str, int]], Any]] = {
    "siblings": siblings,
    "eviction": eviction,
    "random": random_loss,
}
