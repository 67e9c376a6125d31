"""What is left of prompts when cached blocks are lost at random: in a cache core, and at best, by definition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import numpy as np

from benchmarks.cache.core_cases import BLOCK_SIZE, Setting
from benchmarks.cache.interface import Core, draw
from benchmarks.cache.work import SEED, find

DRAWS_BY_DEFINITION = 20


def random_loss(core: Core, setting: Setting, sizes: Mapping[str, int]) -> dict[str, int]:
    """Compute prompts and let them go, give up cached blocks that chance chooses, and look the prompts up again.

    Returns:
        The blocks cached, those chosen, those still cached after it, and the tokens found then.
    """
    random = Random(SEED)
    core.build(setting)
    prompts = [[*draw(random, sizes["length"]), 0] for _ in range(sizes["num_prompts"])]
    for tokens in prompts:
        prompt = core.prepare([*tokens])
        core.compute(prompt, sizes["chunk"])
        core.let_go(prompt)
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
