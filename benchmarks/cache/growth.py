"""Measure what kvframe's cache core costs as sizes grow, and finds after evictions, beside vLLM's; record and plot it.

    make peer
    python -m benchmarks.cache.growth [--rounds N] [--axis NAME ...] [--population NAME ...]

benchmarks/README.md says how, and what the figures mean.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.cache.core import measure, start_engines
from benchmarks.cache.growth_cases import (
    MAX_ROUNDS,
    NUM_DRAWS,
    RANDOM_SHARES,
    Population,
    siblings,
    standard_axes,
    standard_populations,
    tiny_axes,
    tiny_populations,
)
from benchmarks.cache.growth_plots import plot_growth, plot_hits
from benchmarks.cache.growth_report import write_report
from benchmarks.cache.loss import loss_by_definition
from benchmarks.harness.machine import PEER, RESULTS, describe_machine
from benchmarks.harness.process import EngineProcess
from kvframe.cli.render import progress

AXES = {axis.name: axis for axis in (*standard_axes(), *tiny_axes())}
POPULATIONS = {each.name: each for each in (*standard_populations(), *tiny_populations())}
ALL = 1 << 40
BY_DEFINITION = "the longest whose live blocks are left"


def study(
    work: str, population: Population, engines: Mapping[str, EngineProcess], ask: Callable[[Callable[..., Any]], Any]
) -> dict[str, Any]:
    """Return what ``ask`` finds out from each side's way to make a study."""
    found = {}
    for side in population.sides:
        if side.engine in engines:

            def make(side: Any = side, **changes: int) -> Any:
                question = {"do": "study", "side": side.name, "work": work, "sizes": {**population.sizes, **changes}}
                return engines[side.engine].ask({**question, "setting": dataclasses.asdict(side.setting)})

            found[side.name] = ask(make)
    return {"title": population.title, "sizes": dict(population.sizes), "sides": found}


def hits_left(population: Population, make: Callable[..., Any]) -> dict[str, Any]:
    """Return the share of tokens that are found, in percent, for each share of blocks that was evicted."""
    total = make(num_evicted=ALL)["evicted"]
    answers = [make(num_evicted=total * share // 100) for share in population.shares]
    whole = population.sizes["length"] * population.sizes["num_prompts"]
    return {
        "num_cached": total,
        "evicted": [100 * answer["evicted"] / total for answer in answers],
        "found": [100 * answer["tokens"] / whole for answer in answers],
    }


def hits_after_loss(
    population: Population, make: Callable[..., Any], shares: Sequence[int] = RANDOM_SHARES
) -> dict[str, Any]:
    """Return the share of tokens that are found, in percent, for each share of blocks that chance chose and were lost.

    Each is the mean of several draws; ``kept`` is the share of the blocks that are still cached.
    """
    whole = population.sizes["length"] * population.sizes["num_prompts"]
    draws = [[make(percent=share, draw=draw) for draw in range(NUM_DRAWS)] for share in shares]
    return {
        "num_cached": draws[0][0]["cached"],
        "evicted": [statistics.fmean(100 * each["chosen"] / each["cached"] for each in answers) for answers in draws],
        "kept": [statistics.fmean(100 * each["left"] / each["cached"] for each in answers) for answers in draws],
        "found": [statistics.fmean(100 * each["tokens"] / whole for each in answers) for answers in draws],
    }


def losses(population: Population, engines: Mapping[str, EngineProcess]) -> dict[str, Any]:
    """Return what each side finds of a population's prompts after random losses, and what there is to find."""
    found = study("random", population, engines, lambda make: hits_after_loss(population, make))
    best = loss_by_definition(population.windows, population.sizes, RANDOM_SHARES)
    found["sides"][BY_DEFINITION] = {"evicted": best["chosen"], "found": best["found"]}
    return found


@click.command()
@click.option("--rounds", type=click.IntRange(1, MAX_ROUNDS), default=7, show_default=True, help="Turns of each side.")
@click.option(
    "--axis",
    "axes",
    multiple=True,
    type=click.Choice(list(AXES)),
    default=[axis.name for axis in standard_axes()],
    help="The size that grows; several are named one by one. The default is all but the tiny one.",
)
@click.option(
    "--population",
    "populations",
    multiple=True,
    type=click.Choice(list(POPULATIONS)),
    default=[each.name for each in standard_populations()],
    help="The prompts whose blocks are evicted; several are named one by one. The default is all but the tiny one.",
)
@click.option("--peer", type=click.Path(path_type=Path), default=PEER, help="Where make peer installed vLLM.")
@click.option(
    "--results",
    type=click.Path(path_type=Path),
    default=RESULTS,
    help="Where cache_growth.json, cache_growth.md, cache_growth.svg, cache_hits.svg and cache_losses.svg are written.",
)
def main(rounds: int, axes: Sequence[str], populations: Sequence[str], peer: Path, results: Path) -> None:
    """Measure decode steps as one size grows, and what is found after evictions; write a record, a page and plots."""
    record: dict[str, Any] = {"machine": describe_machine(1), "repeats": rounds, "versions": {}, "axes": {}}
    engines = start_engines(peer)
    try:
        for engine in engines.values():
            record["versions"] |= engine.versions
        start = time.perf_counter()
        with progress("measuring", rounds * sum(len(AXES[name].cases) for name in dict.fromkeys(axes))) as advance:
            for name in dict.fromkeys(axes):
                axis = AXES[name]
                points = {value: measure(case, engines, rounds, advance) for value, case in axis.cases.items()}
                record["axes"][name] = {"title": axis.title, "words": axis.words, "points": points}
        record["siblings"] = study("siblings", siblings(), engines, lambda make: make())
        record["populations"] = {}
        for name in dict.fromkeys(populations):
            chosen = POPULATIONS[name]
            record["populations"][name] = study(
                "eviction", chosen, engines, lambda make, chosen=chosen: hits_left(chosen, make)
            )
        record["losses"] = {
            name: losses(POPULATIONS[name], engines)
            for name in dict.fromkeys(populations)
            if "num_visits" not in POPULATIONS[name].sizes
        }
        record["seconds"] = time.perf_counter() - start
    finally:
        for engine in engines.values():
            engine.close()
    results.mkdir(parents=True, exist_ok=True)
    (results / "cache_growth.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    page = write_report(record)
    (results / "cache_growth.md").write_text(page, encoding="utf-8")
    plot_growth(record["axes"], results / "cache_growth.svg")
    plot_hits(record["populations"], results / "cache_hits.svg")
    plot_hits(record["losses"], results / "cache_losses.svg")
    click.echo(page)


if __name__ == "__main__":
    main()
