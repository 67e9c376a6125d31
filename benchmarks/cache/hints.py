"""Count what each hint of requests buys: tokens that the cache finds, and steps that urgent requests wait.

No model is loaded. See benchmarks/README.md.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import click
import numpy as np
from kvframe_engine.contract import FCFS
from kvframe_engine.requests.request import Request
from kvframe_engine.scheduling.scheduler import Scheduler
from kvframe_engine.tiers.move import HOST

from benchmarks.cache.eviction import BOUND, COUNTED_FROM, block_ids, make_plan, make_policy_of, most_found
from benchmarks.cache.eviction_traces import LONGEST
from benchmarks.cache.hint_tiers import TIERED, TIERS, run_tiers
from benchmarks.cache.hint_traces import HINTED, TRACES, Arrival
from benchmarks.harness import options
from benchmarks.harness.pages import heading, page, table
from benchmarks.harness.record import benchmark
from benchmarks.memory.traces import draw_tokens
from kvframe import Hints, KVCacheManager, SamplingParams, load_plugins
from kvframe.cache.hints import NO_HINTS

SIZE = 500
POOLS = (64 * 1024, 128 * 1024, 256 * 1024)
"""The cache's capacities in tokens."""


def replay(trace: Sequence[Arrival], policy: str, num_tokens: int, hints: Callable[[Arrival], Hints]) -> dict[str, Any]:
    """Serve requests one after the other; return the tokens that the counted ones found, by kind, and the seconds."""
    clock = [0.0]
    plan = make_plan(num_tokens)
    manager = KVCacheManager(plan, max_num_seqs=1, eviction=make_policy_of(policy), now=lambda: clock[0])
    first, hits, began = int(COUNTED_FROM * len(trace)), Counter[str](), time.process_time()
    for index, arrival in enumerate(trace):
        request, clock[0] = arrival.request, arrival.seconds
        hit = manager.start("request", request.token_ids[: request.prompt_end])
        if not manager.extend("request", len(request.token_ids)):
            raise RuntimeError("the pool is too small for a single request")
        manager.commit("request", request.token_ids, len(request.token_ids))
        manager.free("request", hints=hints(arrival))
        if index >= first:
            hits[arrival.kind] += hit
    return {"found": dict(hits), "seconds": time.process_time() - began}


def run(name: str, size: int) -> dict[str, Any]:
    """Return how many tokens of a trace are found in pools of all sizes, with hints of some requests."""
    words, seconds, make = TRACES[name]
    trace = make(size)
    first, requests = int(COUNTED_FROM * len(trace)), [arrival.request for arrival in trace]
    blocks, totals = block_ids(requests), Counter[str]()
    for arrival in trace[first:]:
        totals[arrival.kind] += arrival.request.prompt_end
    pools = {}
    for num_tokens in POOLS:
        sides: dict[str, Any] = {"lru": replay(trace, "lru", num_tokens, lambda arrival: NO_HINTS)}
        for hinted, hints_of in HINTED.items():
            sides[hinted] = replay(trace, "scan_resistant", num_tokens, partial(hints_of, seconds))
        sides[BOUND] = {"found": {"all": most_found(requests, blocks, num_tokens, first)}}
        pools[str(num_tokens)] = sides
    return {"words": words, "requests": len(trace), "counted": dict(totals), "pools": pools}


# --- waiting ----------------------------------------------------------------------------------------------------------


def wait(policy: str, size: int) -> dict[str, Any]:
    """Serve a batch and urgent requests that come meanwhile; return the steps from arrival to the first token."""
    random, steps = np.random.default_rng(8), [0]
    scheduling_policy = FCFS if policy == "fcfs" else load_plugins().registry.scheduling_policies.load(policy)()
    manager = KVCacheManager(make_plan(64 * 1024), max_num_seqs=32)
    scheduler: Scheduler[Request] = Scheduler(
        manager, max_num_seqs=32, max_num_batched_tokens=2048, policy=scheduling_policy, now=lambda: 0.05 * steps[0]
    )
    arrivals: dict[str, int] = {}
    firsts: dict[str, int] = {}
    requests: list[Request] = []

    def add(kind: str, num_tokens: int, num_new: int, hints: Hints) -> None:
        params = SamplingParams(max_new_tokens=num_new)
        name, tokens = f"{kind}{len(requests)}", draw_tokens(random, num_tokens)
        requests.append(
            Request.create(name, tokens, params, eos_token_ids=frozenset(), max_model_len=LONGEST, hints=hints)
        )
        arrivals[name] = steps[0]
        scheduler.add(requests[-1])

    for _ in range(size // 2):
        add("batch", 2_000, 200, Hints(priority=1))
    began = time.process_time()
    while scheduler.has_work:
        if random.random() < 0.05 and len(requests) < size:
            add("urgent", 500, 100, NO_HINTS)
        step = scheduler.schedule()
        steps[0] += 1
        if step is not None:
            for request in scheduler.complete(step, [7] * len(step.generating)):
                firsts.setdefault(request.request_id, steps[0])
    waits = {
        kind: sorted(firsts[name] - arrivals[name] for name in firsts if name.startswith(kind))
        for kind in ("urgent", "batch")
    }
    return {
        "steps": steps[0],
        "seconds_a_step": (time.process_time() - began) / steps[0],
        "preemptions": scheduler.stats.preemptions,
        "median": {kind: statistics.median(num_steps) for kind, num_steps in waits.items()},
        "longest": {kind: num_steps[-1] for kind, num_steps in waits.items()},
    }


# --- the page ---------------------------------------------------------------------------------------------------------


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    sides = ("lru", *HINTED)
    parts = []
    for name, trace in record["traces"].items():
        totals = trace["counted"]
        rows = []
        for pool, of_sides in trace["pools"].items():
            best = 100 * of_sides[BOUND]["found"]["all"] / sum(totals.values())
            of_all = [f"{100 * sum(of_sides[side]['found'].values()) / sum(totals.values()):.1f}" for side in sides]
            rows.append((f"{int(pool) // 1024} Ki", "all", *of_all, f"{best:.1f}"))
            for kind, tokens in totals.items():
                if kind != "document":
                    shares = [f"{100 * of_sides[side]['found'].get(kind, 0) / tokens:.1f}" for side in sides]
                    rows.append(("", kind, *shares, ""))
        parts += [
            f"### {name}",
            f"{trace['words'][0].upper()}{trace['words'][1:]}. {trace['requests']:,} requests.",
            table(("pool", "requests", *sides, BOUND), rows),
        ]
    waiting = [
        (
            policy,
            *(f"{result[figure][kind]:g}" for kind in ("urgent", "batch") for figure in ("median", "longest")),
            f"{result['steps']:,}",
            f"{result['preemptions']:,}",
            f"{1e6 * result['seconds_a_step']:.0f}",
        )
        for policy, result in record["waiting"].items()
    ]
    tiers = [
        (
            name,
            {HOST: "host memory"}.get(tier, "page store"),
            hinted,
            f"{100 * counts['found'] / trace['prompt_tokens']:.1f}",
            f"{counts['blocks_written']:,}",
            f"{counts['blocks_written'] / max(1, counts['blocks_brought']):.2f}",
        )
        for name, trace in record["tiers"].items()
        for tier in TIERS
        for hinted in TIERED
        for counts in [trace["sides"][hinted][tier]]
    ]
    costs = [
        f"{sum(pool[side]['seconds'] for trace in record['traces'].values() for pool in trace['pools'].values()):.1f}"
        for side in sides
    ]
    return page(
        heading("Hints", record, ".", "What is found depends on no machine.", how="Replayed"),
        "## Prompt tokens that are found",
        "In % of the counted prompt tokens: by `lru`, by `scan_resistant` with hints of some requests, and at best. "
        "*one-off*: documents hint `keep_seconds=0`; *batch*: the batch's requests hint `priority=1`; *turns*: turns "
        "hint how long their prefix is needed; *all*: these three, and the last turn of a conversation hints "
        "`keep_seconds=0`; *sessions*: as *all*, and turns name their `session_id`; *no times*: as *sessions*, but "
        "only last turns hint a time.",
        *parts,
        "## Steps until the first token",
        "A batch of prompts of 2,000 tokens (`priority=1`) is sent at once; urgent ones of 500 come one by one. A step "
        "takes 0.05 seconds of the policy's clock. The last column is processor time of the scheduler and the cache.",
        table(
            ("", "urgent: median", "longest", "batch: median", "longest", "steps of all", "preemptions", "µs a step"),
            waiting,
        ),
        "## Tiers",
        f"Beside a pool of {POOLS[0] // 1024} Ki tokens, host memory of twice that size, or a page store without a "
        "bound. What is found is in % of the prompt tokens; blocks have 16 tokens.",
        table(("trace", "tier", "hints", "found", "blocks written", "written per block brought back"), tiers),
        "## Processor seconds of the replays",
        table(sides, [costs]),
    )


@benchmark("hints", write_report, cases="traces")
@options.choose("--trace", "names", TRACES)
@click.option(
    "--size", type=click.IntRange(min=50), default=SIZE, show_default=True, help="Scales the number of requests."
)
def main(names: tuple[str, ...], size: int) -> dict[str, Any]:
    """Count the tokens and the steps that hints of requests save; write one JSON file and one page."""
    waiting = {policy: wait(policy, size) for policy in ("fcfs", "priority")}
    traces = {name: run(name, size) for name in names}
    tiers = {name: run_tiers(name, max(50, size // 3)) for name in names}
    return {"size": size, "waiting": waiting, "traces": traces, "tiers": tiers}


if __name__ == "__main__":
    main()
