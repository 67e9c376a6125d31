"""Run the cache manager beside a model that follows the cache's definition, for any number of operations.

See benchmarks/README.md.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import count
from typing import Any

import click

from benchmarks.harness import options
from benchmarks.harness.pages import heading, page, table
from benchmarks.harness.record import benchmark
from tests.cache.lives import Tally, draw_lives

NUM_EVENTS = 400
MOST_FAILURES = 20


def run(first: int, step: int, operations: int, check_every: int) -> dict[str, Any]:
    """Run the random events of every ``step``-th seed from ``first`` on, until there were enough operations."""
    tally, failures, begin, next_report = Tally(), {}, time.monotonic(), 0
    for num_seeds in count(1):
        seed = first + step * (num_seeds - 1)
        lives = draw_lives(seed, tally, check_every)
        try:
            for _ in range(NUM_EVENTS):
                lives.happen()
            lives.end()
        except Exception as error:
            failures[seed] = f"event {lives.num_events + 1} of {NUM_EVENTS}: {type(error).__name__}: {error}"
            print(f"seed {seed}, {failures[seed]}", flush=True)
        elapsed = time.monotonic() - begin
        if tally.num_operations >= next_report:
            print(f"{tally.num_operations:,} operations, {num_seeds:,} seeds, {elapsed:,.0f} s", flush=True)
            next_report += operations // 100
        if tally.num_operations >= operations or len(failures) >= MOST_FAILURES:
            break
    return {
        "seeds": num_seeds,
        "operations": tally.num_operations,
        "seconds": elapsed,
        "verbs": dict(tally.verbs),
        "refused": {verb: number for verb, number in tally.refused.items() if number},
        "drafts": dict(tally.drafts),
        "pages_copied": tally.pages_copied,
        "failures": failures,
    }


def merge(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the results of several processes as one: numbers are added, and counts by name."""

    def added(name: str) -> Any:
        values = [result[name] for result in results]
        return dict(sum(map(Counter, values), Counter())) if isinstance(values[0], dict) else sum(values)

    return {
        "events": NUM_EVENTS,
        **{name: added(name) for name in ("seeds", "operations", "verbs", "refused", "drafts", "pages_copied")},
        "seconds": max(result["seconds"] for result in results),
        "failures": {seed: failure for result in results for seed, failure in result["failures"].items()},
    }


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    failures, every = record["failures"], record["check_every"]
    verbs = sorted(record["verbs"].items(), key=lambda item: -item[1])
    how_often = "each operation" if every == 1 else f"every {every} operations"
    what = f": {record['operations']:,} operations in {record['seconds']:,.0f} seconds, {len(failures)} failures."
    return page(
        heading("The cache core against the cache by its definition", record, what, how="Run"),
        f"{record['seeds']:,} mixtures of types of {record['events']} events each, one for each seed from "
        f"{record['first_seed']:,} on, in {record['processes']} processes. What an operation returns, reads and "
        f"writes, and what a request holds, was checked each time. After {how_often} all pages were counted, and "
        "what can be found was compared with the model.",
        table(
            ("operation", "times", "of these refused, and nothing changed"),
            [(verb, f"{number:,}", f"{record['refused'].get(verb, 0):,}") for verb, number in verbs],
        ),
        f"Of drafts, {record['drafts'].get('accepted', 0):,} were accepted and "
        f"{record['drafts'].get('refused', 0):,} refused. Of the pages that forks shared and wrote into, "
        f"{record['pages_copied']:,} were copied before.",
        table(("seed", "failure"), [(f"{seed}", failure) for seed, failure in failures.items()]),
    )


def _count(flag: str, default: int, what: str, least: int = 1) -> options.Option:
    return click.option(flag, type=click.IntRange(min=least), default=default, show_default=True, help=what)


@benchmark("cache_model", write_report, fails=lambda record: bool(record["failures"]))
@_count("--operations", 10_000_000, "The number of operations.")
@_count("--seed", 1, "The first seed.", least=0)
@_count("--check-every", 10, "Operations between two counts of all pages, and events between comparisons of all hits.")
@_count("--processes", 1, "The number of processes; they share the seeds.")
def main(operations: int, seed: int, check_every: int, processes: int) -> dict[str, Any]:
    """Run the cache manager beside the model; write one JSON file and one page."""
    share = -(-operations // processes)
    turns = [(seed + index, processes, share, check_every) for index in range(processes)]
    if processes == 1:
        results = [run(*turns[0])]
    else:
        with ProcessPoolExecutor(processes) as executor:
            results = list(executor.map(run, *zip(*turns, strict=True)))
    return {"first_seed": seed, "check_every": check_every, "processes": processes, **merge(results)}


if __name__ == "__main__":
    main()
