"""Measure what kvframe's cache core costs as sizes grow, and finds after evictions, beside vLLM's; record and plot it.

    make peer
    python benchmarks/cache_growth.py [--rounds N] [--axis NAME ...] [--population NAME ...]

benchmarks/README.md says how, and what the figures mean.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from cache import PEER, measure, start_engines
from cache_growth_cases import (
    Population,
    siblings,
    standard_axes,
    standard_populations,
    tiny_axes,
    tiny_populations,
)
from cache_growth_report import write_report
from cache_plots import plot_growth, plot_hits
from engine_process import EngineProcess
from machine import describe_machine

from kvframe.cli.render import progress

HERE = Path(__file__).resolve().parent
AXES = {axis.name: axis for axis in (*standard_axes(), *tiny_axes())}
POPULATIONS = {each.name: each for each in (*standard_populations(), *tiny_populations())}
ALL = 1 << 40


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


@click.command()
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True, help="Turns of each side.")
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
    default=HERE / "results",
    help="Where cache_growth.json, cache_growth.md, cache_growth.svg and cache_hits.svg are written.",
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
    click.echo(page)


if __name__ == "__main__":
    main()
