"""Run the soak for an hour of simulated traffic, count what happens, and write its page. See benchmarks/README.md."""

from __future__ import annotations

import logging
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from kvframe_engine.scheduling.stats import EngineStats

from benchmarks.harness import models, options
from benchmarks.harness.pages import heading, page, table
from benchmarks.harness.record import benchmark, progress
from tests.engine.injected_faults import KINDS
from tests.engine.soak.run import WRONG, Soak
from tests.engine.soak.scenarios import SCENARIOS, Scenario, Served
from tests.engine.soak.traffic import draw_arrivals

NUM_PROMPTS, NUM_PROMPTS_IN_SHORT = 40, 12
MINUTES_IN_SHORT = 5.0
COUNTS = {
    "requests": "requests, each sample counted",
    "most_at_once": "most of them at once",
    "prompt_tokens": "prompt tokens",
    "generated_tokens": "generated tokens",
    "compared_tokens": "tokens compared with `transformers.generate()`",
    "steps": "steps",
    "preemptions": "preemptions",
    "retries": "requests computed again without a prefix that gave NaN",
    "hit_tokens": "prompt tokens found in the cache",
    "evictions": "cached pages evicted",
    "resets": "resets of the prefix cache",
    "resizes": "caches made larger, or small again",
    "resizes_refused": "sizes refused, because of pins or too little memory",
    "pins_asked": "prefixes to pin",
    "pins": "of these, prefixes that fitted",
    "audits": "audits",
    "mirrors": "mirrors of cache events compared with the cache",
}
"""The counts, in words."""

ENDS = {"length": "served", "aborted": "aborted by their owners", "error": "failed"}


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    return write_page(record, "Soak: traffic while things break", COUNTS, KINDS)


def write_page(record: Mapping[str, Any], title: str, counts: Mapping[str, str], kinds: Mapping[str, str]) -> str:
    """Return a page with a title, and with a row for each count and each kind of fault, which are given in words."""
    scenarios = record["scenarios"]
    what = f": {record['minutes']:g} minutes of simulated traffic for each scenario, seed {record['seed']}."
    results = list(scenarios.values())
    rows = [(text, [result[key] for result in results]) for key, text in counts.items()]
    rows += [(f"requests {text}", [result["ends"].get(key, 0) for result in results]) for key, text in ENDS.items()]
    rows += [(f"fault: {text}", [result["faults"].get(kind, 0) for result in results]) for kind, text in kinds.items()]
    wrong = ("tokens that differ, failures without a reason", "mirrors that differ", "leaks")
    for key, text in zip(WRONG, wrong, strict=True):
        rows.append((f"**{text}**", [len(result[key]) for result in results]))
    return page(
        heading(title, record, what, "float32, greedy.", how="Run"),
        "\n".join(
            f"- **{name}**: tiny `{result['family']}`; {result['what']}; {result['slabs']} slabs."
            for name, result in scenarios.items()
        ),
        table(
            ("", *scenarios, "all"),
            [(text, *(f"{value:,}" for value in values), f"{sum(values):,}") for text, values in rows],
        ),
    )


def soak(
    scenario: Scenario,
    minutes: float,
    seed: int,
    num_prompts: int,
    advance: Callable[[int], None],
    make: Callable[[Served, int], Soak] = Soak,
) -> tuple[dict[str, Any], Soak, EngineStats]:
    """Run a scenario; return its record, what ``make`` made of model and seed, and the engine's last numbers."""
    with tempfile.TemporaryDirectory() as folder:
        served = Served.of(scenario, Path(folder), num_prompts)
    arrivals = draw_arrivals(scenario, served.prompts, 60 * minutes, seed)
    started = time.perf_counter()
    running = make(served, seed)
    with running.engine as engine:
        plan = engine.plan
        running.run(arrivals, advance)
        stats = engine.stats()
    same = ("generated_tokens", "preemptions", "retries", "evictions")
    counts = {**running.counts, **{name: getattr(stats, name) for name in same}}
    counts["hit_tokens"] = stats.cached_prompt_tokens
    row = {
        "family": scenario.family,
        "what": scenario.what,
        "cache_bytes": plan.total_bytes,
        "slabs": plan.num_slabs,
        "seconds": round(time.perf_counter() - started, 1),
        **{what: counts.get(what, 0) for what in COUNTS},
        "ends": dict(sorted(running.ends.items())),
        "faults": {kind: running.faults.struck[kind] for kind in KINDS if running.faults.struck[kind]},
        "raised": dict(sorted(running.raised.items())),
        **running.wrong,
    }
    return row, running, stats


def has_failed(record: Mapping[str, Any]) -> bool:
    """Return whether anything differs or leaks."""
    return any(result[what] for result in record["scenarios"].values() for what in WRONG)


@benchmark("soak", write_report, cases="scenarios", fails=has_failed)
@click.option(
    "--minutes", type=click.FloatRange(min=0.1), default=60, show_default=True, help="Minutes of simulated traffic."
)
@click.option("--seed", type=int, default=0, show_default=True)
@options.choose("--scenario", "scenarios", SCENARIOS)
def main(minutes: float, seed: int, scenarios: Sequence[Scenario]) -> dict[str, Any]:
    """Serve every scenario's traffic; write one JSON file and one page; fail if anything differs or leaks."""
    prepare()
    results: dict[str, Any] = {}
    for scenario in scenarios:
        with progress(scenario.name, int(60 * minutes * scenario.per_second)) as advance:
            results[scenario.name], _, _ = soak(scenario, minutes, seed, prompts_for(minutes), advance)
    return {"minutes": minutes, "seed": seed, "scenarios": results}


def prepare() -> None:
    """Prepare this process: Ctrl-C raises, and expected failures are not logged."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Background jobs of a shell have no handler.
    models.silence_transformers()
    logging.getLogger("kvframe").setLevel(logging.CRITICAL)  # It reports every failure of a listener.


def prompts_for(minutes: float) -> int:
    """Return the number of different prompts for a length of traffic."""
    return NUM_PROMPTS if minutes > MINUTES_IN_SHORT else NUM_PROMPTS_IN_SHORT


if __name__ == "__main__":
    main()
