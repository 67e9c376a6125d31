"""Measure which tokens the cache finds again under eviction policies, beside the best that could be done. No model.

    python -m benchmarks.cache.eviction [--trace NAME ...] [--size N] [--results FOLDER]

benchmarks/README.md says what the figures mean.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import click

from benchmarks.cache.eviction_bound import BLOCK, block_ids, most_found
from benchmarks.cache.eviction_report import draw_plot, write_report
from benchmarks.cache.eviction_traces import LONGEST, TRACES, Asked
from benchmarks.harness.machine import RESULTS, describe_machine
from kvframe import FullAttentionSpec, KVCacheManager, Stack, group_layers, load_plugins, plan_cache
from kvframe.config.eviction_choice import make_policy
from kvframe.contract import LayerSpec

SIZE = 1_000
POLICIES = ("lru", "scan_resistant")
BOUND = "at best"
POOLS = (64 * 1024, 128 * 1024, 256 * 1024, 512 * 1024)
"""Tokens that the cache has room for."""

COUNTED_FROM = 0.2
"""The share of a trace that fills the cache, before anything is counted."""


def make_manager(policy: str, num_tokens: int) -> KVCacheManager:
    """Return a cache of one group with room for so many tokens, under a policy with its default options."""
    stack = Stack.from_mapping({"cache": {"eviction": policy}})
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype="float16")
    grouping = group_layers([LayerSpec(name="layer", spec=spec)])
    limits = {"max_model_len": LONGEST, "max_num_batched_tokens": LONGEST}
    plan = plan_cache(grouping, memory_bytes=2 * LONGEST * 64, **limits)
    num_slabs = num_tokens // BLOCK // plan.groups[0].pages_per_slab
    eviction = make_policy(stack, load_plugins().registry)
    return KVCacheManager(attrs.evolve(plan, num_slabs=num_slabs), max_num_seqs=1, eviction=eviction)


def replay(asked: Sequence[Asked], policy: str, num_tokens: int) -> dict[str, Any]:
    """Serve requests one after the other; return what was found once the cache was filled."""
    manager, first = make_manager(policy, num_tokens), int(COUNTED_FROM * len(asked))
    found = num_shared = num_shared_found = 0
    start = time.perf_counter()
    for index, each in enumerate(asked):
        hit = manager.start("request", each.token_ids[: each.prompt_end])
        if not manager.extend("request", len(each.token_ids)):
            raise RuntimeError("the pool has no room for a request by itself")
        manager.commit("request", each.token_ids, len(each.token_ids))
        manager.free("request")
        if index >= first:
            found += hit
            num_shared += each.num_shared > 0
            num_shared_found += 0 < each.num_shared <= hit
    seconds = time.perf_counter() - start
    return {"found": found, "shared_found": num_shared_found / max(1, num_shared), "us": 1e6 * seconds / len(asked)}


def run(name: str, size: int) -> dict[str, Any]:
    """Return what is found of a trace in pools of all sizes."""
    asked = TRACES[name].draw(size)
    first = int(COUNTED_FROM * len(asked))
    blocks = block_ids(asked)
    pools = {}
    for num_tokens in POOLS:
        sides: dict[str, Any] = {policy: replay(asked, policy, num_tokens) for policy in POLICIES}
        sides[BOUND] = {"found": most_found(asked, blocks, num_tokens, first)}
        pools[str(num_tokens)] = sides
    return {
        "words": TRACES[name].words,
        "requests": len(asked),
        "tokens": sum(len(each.token_ids) for each in asked),
        "distinct_tokens": BLOCK * (1 + max(max(ids, default=0) for ids in blocks)),
        "counted_tokens": sum(each.prompt_end for each in asked[first:]),
        "has_shared": any(each.num_shared for each in asked),
        "pools": pools,
    }


@click.command()
@click.option("--trace", "names", multiple=True, type=click.Choice(list(TRACES)), help="Traces; all unless given.")
@click.option("--size", type=click.IntRange(min=20), default=SIZE, show_default=True, help="Scales the traces.")
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, help="Where to write.")
def main(names: tuple[str, ...], size: int, results: Path) -> None:
    """Measure which tokens the cache finds again under eviction policies."""
    chosen = list(names) or list(TRACES)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(chosen), os.cpu_count() or 1), mp_context=context) as pool:
        traces = dict(zip(chosen, pool.map(run, chosen, [size] * len(chosen)), strict=True))
    record = {"machine": describe_machine(1), "size": size, "pools": list(POOLS), "traces": traces}
    results.mkdir(parents=True, exist_ok=True)
    (results / "eviction.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (results / "eviction.md").write_text(write_report(record), encoding="utf-8")
    draw_plot(record, results / "eviction.svg")
    click.echo(write_report(record))


if __name__ == "__main__":
    main()
