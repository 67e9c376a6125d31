"""Count the tokens that the cache finds under eviction policies, beside the best that any cache could find.

No model is loaded. See benchmarks/README.md.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import attrs
import click

from benchmarks.cache.eviction_traces import LONGEST, TRACES, TracedRequest
from benchmarks.harness import options
from benchmarks.harness.pages import heading, page, table
from benchmarks.harness.plots import plots
from benchmarks.harness.process import map_in_processes
from benchmarks.harness.record import benchmark
from kvframe import FullAttentionSpec, KVCacheManager, KVCachePlan, Stack, group_layers, load_plugins, plan_cache
from kvframe.config.choices import make_part
from kvframe.contract import EvictionPolicy, LayerSpec

BLOCK = 16
_NEVER = 1 << 60
SIZE = 1_000
POLICIES = ("lru", "scan_resistant")
BOUND = "at best"
POOLS = (64 * 1024, 128 * 1024, 256 * 1024, 512 * 1024)
"""The cache's capacities in tokens."""

COUNTED_FROM = 0.2
"""The share of a trace that fills the cache and is not counted."""


def make_plan(num_tokens: int) -> KVCachePlan:
    """Return the plan of a cache of one group with this capacity."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype="float16")
    grouping = group_layers([LayerSpec(name="layer", spec=spec)])
    plan = plan_cache(grouping, memory_bytes=2 * LONGEST * 64, max_model_len=LONGEST, max_num_batched_tokens=LONGEST)
    return attrs.evolve(plan, num_slabs=num_tokens // BLOCK // plan.groups[0].pages_per_slab)


def make_policy_of(name: str) -> EvictionPolicy:
    """Return a policy with its default options."""
    stack = Stack.from_mapping({"cache": {"eviction": name}})
    policy: EvictionPolicy = make_part("eviction", stack.cache.eviction, load_plugins().registry)
    return policy


def replay(requests: Sequence[TracedRequest], policy: str, num_tokens: int) -> dict[str, Any]:
    """Serve requests one after the other; return how many tokens the counted requests found."""
    manager = KVCacheManager(make_plan(num_tokens), max_num_seqs=1, eviction=make_policy_of(policy))
    first = int(COUNTED_FROM * len(requests))
    num_found = num_shared = num_shared_found = 0
    for index, request in enumerate(requests):
        hit = manager.start("request", request.token_ids[: request.prompt_end])
        if not manager.extend("request", len(request.token_ids)):
            raise RuntimeError("the pool is too small for a single request")
        manager.commit("request", request.token_ids, len(request.token_ids))
        manager.free("request")
        if index >= first:
            num_found += hit
            num_shared += request.num_shared > 0
            num_shared_found += 0 < request.num_shared <= hit
    return {"found": num_found, "shared_found": num_shared_found / max(1, num_shared)}


# --- the most that any cache could find: it evicts the block with the farthest next use (Belady, 1966) ----------------


def block_ids(requests: Sequence[TracedRequest]) -> list[list[int]]:
    """Return, for each request, the ids of its full blocks, prompt and reply; equal prefixes have equal ids."""
    id_by_content: dict[tuple[int, bytes], int] = {}
    block_lists = []
    for request in requests:
        data, parent, ids = request.token_ids.tobytes(), -1, []
        for start in range(0, len(data) - 4 * BLOCK + 1, 4 * BLOCK):
            parent = id_by_content.setdefault((parent, data[start : start + 4 * BLOCK]), len(id_by_content))
            ids.append(parent)
        block_lists.append(ids)
    return block_lists


def most_found(
    requests: Sequence[TracedRequest], blocks: Sequence[Sequence[int]], num_tokens: int, first: int = 0
) -> int:
    """Return the prompt tokens that are found if evictions know the future.

    As in any cache, a running request occupies its blocks. Blocks that no later request needs are not kept. Counting
    begins with the request ``first``; ``num_tokens`` is the cache's capacity.
    """
    capacity, num_found = num_tokens // BLOCK, 0
    following = _next_uses(requests, blocks)
    cached: dict[int, int] = {}
    farthest: list[tuple[int, int, int]] = []
    for index, (request, ids, uses) in enumerate(zip(requests, blocks, following, strict=True)):
        max_hit = (request.prompt_end - 1) // BLOCK
        hit = next((place for place, block in enumerate(ids[:max_hit]) if block not in cached), max_hit)
        num_found += BLOCK * hit if index >= first else 0
        for block in ids:
            cached.pop(block, None)
        left = capacity - -(-len(request.token_ids) // BLOCK)
        _evict(cached, farthest, left)
        for depth, (block, use) in enumerate(zip(ids, uses, strict=True)):
            if use < _NEVER:
                cached[block] = use
                # Of several blocks with the same next use, the last one of a prefix is evicted first.
                heappush(farthest, (-use, -depth, block))
        _evict(cached, farthest, capacity)
    return num_found


def _evict(cached: dict[int, int], farthest: list[tuple[int, int, int]], capacity: int) -> None:
    while len(cached) > max(0, capacity):
        use, _, block = heappop(farthest)
        if cached.get(block) == -use:
            del cached[block]


def _next_uses(requests: Sequence[TracedRequest], blocks: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return, for each block of each request, the index of the next request whose prompt contains it."""
    upcoming: dict[int, int] = {}
    next_uses: list[list[int]] = []
    for index in range(len(requests) - 1, -1, -1):
        next_uses.append([upcoming.get(block, _NEVER) for block in blocks[index]])
        max_hit = (requests[index].prompt_end - 1) // BLOCK
        upcoming.update(dict.fromkeys(blocks[index][:max_hit], index))
    return next_uses[::-1]


def run(name: str, size: int) -> dict[str, Any]:
    """Return how many tokens of a trace are found in pools of all sizes."""
    words, draw = TRACES[name]
    requests = draw(size)
    first = int(COUNTED_FROM * len(requests))
    blocks = block_ids(requests)
    pools = {}
    for num_tokens in POOLS:
        sides: dict[str, Any] = {policy: replay(requests, policy, num_tokens) for policy in POLICIES}
        sides[BOUND] = {"found": most_found(requests, blocks, num_tokens, first)}
        pools[str(num_tokens)] = sides
    return {
        "words": words,
        "requests": len(requests),
        "tokens": sum(len(request.token_ids) for request in requests),
        "distinct_tokens": BLOCK * (1 + max(max(ids, default=0) for ids in blocks)),
        "counted_tokens": sum(request.prompt_end for request in requests[first:]),
        "has_shared": any(request.num_shared for request in requests),
        "pools": pools,
    }


STYLES: dict[str, dict[str, Any]] = {
    "at best": {"color": "#7a7a7a", "linestyle": ":", "marker": "^", "markersize": 4},
    "lru": {"color": "#d95f02", "marker": "o", "markersize": 6, "markerfacecolor": "none", "linewidth": 2.2},
    "scan_resistant": {"color": "#1b6ca8", "marker": "s", "markersize": 3.5, "linewidth": 1.2},
}


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    traces, pools = record["traces"], [str(pool) for pool in record["pools"]]
    heads = [_thousands(pool) for pool in pools]

    def rows(cell: Callable[[Mapping[str, Any], str], str]) -> list[list[str]]:
        return [[name, *(cell(trace, pool) for pool in pools)] for name, trace in traces.items()]

    sizes = ((f"{trace['requests']:,}", _thousands(trace["tokens"])) for trace in traces.values())
    has_shared = (trace["has_shared"] for trace in traces.values())
    note = "What is found depends on no machine."
    return page(
        heading("Eviction policies", record, ".", note, how="Replayed"),
        "![Share of prompt tokens that are found, by the size of the cache](eviction.svg)",
        "## Prompt tokens that are found",
        "In % of the counted prompt tokens, for pools of several sizes in tokens: by `lru`, by "
        "`scan_resistant`, and at best.",
        table(
            ("", "requests", "tokens", *heads),
            [(name, *size, *cells) for size, (name, *cells) in zip(sizes, rows(_hits), strict=True)],
        ),
        "\n".join(f"- *{name}*: {trace['words']}." for name, trace in traces.items()),
        "## More than least recently used finds",
        "In percentage points. In brackets, the share of the possible gain over `lru`: 100 % is the best possible.",
        table(("", *heads), rows(_gain)),
        "## Requests whose shared prompt is found as a whole",
        "In %, by `lru` and by `scan_resistant`.",
        table(("", *heads), [*itertools.compress(rows(_shared), has_shared)]),
    )


def _thousands(count: int | str) -> str:
    return f"{round(int(count) / 1024):,} Ki"


def share(trace: Mapping[str, Any], pool: str, side: str) -> float:
    """Return the percentage of prompt tokens that are found."""
    return float(100 * trace["pools"][pool][side]["found"] / trace["counted_tokens"])


def _hits(trace: Mapping[str, Any], pool: str) -> str:
    return " / ".join(f"{share(trace, pool, side):.1f}" for side in (*POLICIES, BOUND))


def _gain(trace: Mapping[str, Any], pool: str) -> str:
    lru, policy, best = (share(trace, pool, side) for side in (*POLICIES, BOUND))
    part = f" ({100 * (policy - lru) / (best - lru):.0f} %)" if best - lru > 0.5 else ""
    return f"{policy - lru:+.1f}{part}"


def _shared(trace: Mapping[str, Any], pool: str) -> str:
    return " / ".join(f"{100 * trace['pools'][pool][side]['shared_found']:.0f}" for side in POLICIES)


def draw_plot(record: Mapping[str, Any], path: Path) -> None:
    """Draw the tokens found over the size of the cache, one plot for each trace."""
    with plots([*record["traces"]], path) as places:
        for place, trace in zip(places, record["traces"].values(), strict=True):
            for side, style in STYLES.items():
                values = [share(trace, str(pool), side) for pool in record["pools"]]
                place.plot([_thousands(pool) for pool in record["pools"]], values, label=side, **style)
            place.set(xlabel="capacity in tokens", ylabel="% of prompt tokens found", ylim=(0, None))


@benchmark("eviction", write_report, cases="traces", plots={"eviction": draw_plot})
@options.choose("--trace", "names", TRACES)
@click.option(
    "--size", type=click.IntRange(min=20), default=SIZE, show_default=True, help="Scales the number of requests."
)
def main(names: tuple[str, ...], size: int) -> dict[str, Any]:
    """Count the tokens that the cache finds under eviction policies; write one JSON file, one page and a plot."""
    results = map_in_processes(run, [(name, size) for name in names], min(len(names), os.cpu_count() or 1))
    return {"size": size, "pools": list(POOLS), "traces": dict(zip(names, results, strict=True))}


if __name__ == "__main__":
    main()
