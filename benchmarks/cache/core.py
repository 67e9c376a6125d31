"""Measure kvframe's cache core beside vLLM's own. See benchmarks/README.md."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cache.cases import Case, standard_cases, tiny_cases
from benchmarks.cache.setting import Side
from benchmarks.cache.worst_work import MAX_ROUNDS
from benchmarks.harness import options
from benchmarks.harness.pages import Column, figures, heading, medians, page, spread, table
from benchmarks.harness.process import EngineProcess, start_engines
from benchmarks.harness.record import benchmark, by_turns, counted, measure_each, ratios

ENGINES = {name: ("benchmarks.cache.worker", name) for name in ("kvframe", "vllm")}
"""By engine, the module of its process and the argument of its ``load``."""


def versions_of(engines: Mapping[str, EngineProcess]) -> dict[str, str]:
    """Return the versions that the engines' figures depend on."""
    return {name: number for engine in engines.values() for name, number in engine.versions.items()}


def measure(
    case: Case, engines: Mapping[str, EngineProcess], rounds: int, advance: Callable[[int], object]
) -> dict[str, Any]:
    """Let the sides take turns, and check each core at the end; the program ends if a core is wrong.

    Returns:
        The case and, for each side, the median time of each turn in seconds, and the facts of its check.
    """
    present = [side for side in case.sides if side.engine in engines]

    def ask(side: Side, what: str) -> Any:
        return engines[side.engine].ask(question(case, side, what))

    for side in present:
        ask(side, "set up")
    by_name = {side.name: side for side in present}
    turns = counted(
        by_turns([*by_name], rounds, lambda name, _: statistics.median(ask(by_name[name], "turn")), advance)
    )
    sides = {side.name: {"seconds": turns[side.name], **ask(side, "check")} for side in present}
    first = present[0].name
    for name, values in sides.items():
        values["times_as_fast"] = ratios(turns[first], turns[name]) if name != first else []
    described = {name: getattr(case, name) for name in ("name", "title", "words", "aim")}
    return {**described, "work": case.work.name, "sizes": dict(case.sizes), "sides": sides}


def question(case: Case, side: Side, what: str) -> dict[str, Any]:
    """Return the question to a worker that sets a case up on a side, does a turn, or checks: what it is to do."""
    setting = dataclasses.asdict(side.setting)
    return {"do": what, "side": side.name, "work": case.work.name, "sizes": dict(case.sizes), "setting": setting}


FACTS: dict[str, Column] = {
    "num_groups": ("groups", "{:,}"),
    "num_held": ("blocks held at the end", "{:,}"),
    "slowest_us": ("slowest step of the last round, µs", "{:,.1f}"),
    "empty_bytes_per_block": ("bytes a block, new", "{:,.1f}"),
    "cached_bytes_per_block": ("bytes a block, all cached", "{:,.1f}"),
}
"""The columns for the facts of a check."""

RATIO = "{:.3g}"


def core_heading(title: str, record: Mapping[str, Any]) -> str:
    """Return the heading of a page about the cache core; it also names the versions of the sides."""
    note = (
        "Blocks of 16 tokens; every side is checked to hold and find the blocks that it should; its process has used "
        "memory before."
    )
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    return f"{heading(title, record, medians(record), note)}\n\nSides: {versions}."


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    parts = [core_heading("The cache core: kvframe's and vLLM's", record), _summary(record["cases"])]
    for name, measured in record["cases"].items():
        parts += [f"## {name}", f"{measured['title']}. {measured['words']}", _sides(measured)]
    return page(*parts)


def _summary(cases: Mapping[str, Any]) -> str:
    rows = []
    for measured in cases.values():
        title, aim = measured["title"], "" if measured["aim"] is None else f"{measured['aim']:g}"
        for name, values in measured["sides"].items():
            if values["times_as_fast"]:
                rows.append((title, name, spread(values["times_as_fast"], RATIO), aim))
                title = aim = ""
    return table(("", "", "times as fast as vLLM", "aim"), rows)


def _sides(measured: Mapping[str, Any]) -> str:
    sides, num_requests = measured["sides"], measured["sizes"].get("num_requests")
    fastest = min(min(values["seconds"]) for values in sides.values())
    columns: dict[str, Column] = {
        "seconds": ("ms", "{:,.1f}", 1e3) if fastest > 1e-3 else ("µs", "{:,.1f}", 1e6),
        "times_as_fast": ("times as fast", RATIO),
    }
    if num_requests is not None:
        sides = {
            name: {**values, "each": statistics.median(values["seconds"]) / num_requests}
            for name, values in sides.items()
        }
        columns["each"] = ("µs for each request", "{:,.2f}", 1e6)
    columns |= {name: how for name, how in FACTS.items() if any(name in values for values in sides.values())}
    return figures(sides, columns)


@benchmark("cache", write_report, cases="cases")
@options.repeats(7, flag="--rounds", max_rounds=MAX_ROUNDS)
@options.choose("--case", "cases", (*standard_cases(), *tiny_cases()))
@options.peer
def main(rounds: int, cases: Sequence[Case], peer: Path) -> dict[str, Any]:
    """Measure works of the cache core, all sides by turns; write one JSON file and one page."""
    with start_engines(ENGINES, peer) as engines:
        results = measure_each(cases, rounds, lambda case, advance: measure(case, engines, rounds, advance))
        return {"repeats": rounds, "versions": versions_of(engines), "cases": results}


if __name__ == "__main__":
    main()
