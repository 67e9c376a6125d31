"""Measure what kvframe's cache core costs as sizes grow, and finds after evictions, beside vLLM's; record and plot it.

    make peer
    python -m benchmarks.cache.growth [--rounds N] [--axis NAME ...] [--population NAME ...]

benchmarks/README.md says how, and what the figures mean.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.cache.core import measure, peer_option, start_engines, versions_of
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
from benchmarks.cache.growth_report import plot_growth, plot_hits, write_report
from benchmarks.cache.studies import loss_by_definition
from benchmarks.harness.process import EngineProcess
from benchmarks.harness.record import benchmark
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


@benchmark(
    "cache_growth",
    write_report,
    plots={
        "cache_growth": lambda record, path: plot_growth(record["axes"], path),
        "cache_hits": lambda record, path: plot_hits(record["populations"], path),
        "cache_losses": lambda record, path: plot_hits(record["losses"], path),
    },
)
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
@peer_option
def main(rounds: int, axes: Sequence[str], populations: Sequence[str], peer: Path) -> dict[str, Any]:
    """Measure decode steps as one size grows, and what is found after evictions; write a record, a page and plots."""
    start, sized = time.perf_counter(), [AXES[name] for name in dict.fromkeys(axes)]
    chosen = [POPULATIONS[name] for name in dict.fromkeys(populations)]
    with start_engines(peer) as engines:
        found: dict[str, Any] = {"repeats": rounds, "versions": versions_of(engines), "axes": {}}
        with progress("measuring", rounds * sum(len(axis.cases) for axis in sized)) as advance:
            for axis in sized:
                points = {value: measure(case, engines, rounds, advance) for value, case in axis.cases.items()}
                found["axes"][axis.name] = {"title": axis.title, "words": axis.words, "points": points}
        found["siblings"] = study("siblings", siblings(), engines, lambda make: make())
        found["populations"] = {
            each.name: study("eviction", each, engines, lambda make, each=each: hits_left(each, make))
            for each in chosen
        }
        found["losses"] = {each.name: losses(each, engines) for each in chosen if "num_visits" not in each.sizes}
    return {**found, "seconds": time.perf_counter() - start}


if __name__ == "__main__":
    main()
