"""Measure what a decode step of kvframe's cache core costs as one size grows, beside vLLM's. It has a plot.

The README of benchmarks says how.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cache.core import ENGINES, RATIO, core_heading, measure, versions_of
from benchmarks.cache.growth_axes import Axis, standard_axes, tiny_axis
from benchmarks.cache.worst_work import MAX_ROUNDS
from benchmarks.harness import options
from benchmarks.harness.pages import page, spread, table
from benchmarks.harness.plots import plots
from benchmarks.harness.process import start_engines
from benchmarks.harness.record import benchmark, progress

STYLES: dict[str, dict[str, Any]] = {
    "vLLM": {"color": "#d95f02", "marker": "o", "markersize": 7, "markerfacecolor": "none", "linewidth": 2.5},
    "kvframe": {"color": "#1b6ca8", "marker": "s", "markersize": 3.5, "linewidth": 1.2},
}
"""Where two sides have the same figures, both can be seen."""


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    parts = [core_heading("The cache core as sizes grow", record), "![Time of a step](cache_growth.svg)"]
    for axis in record["axes"].values():
        parts += [f"## Against {axis['title']}", f"{axis['words']}.", _times(axis), _growth_of(axis)]
    return page(*parts)


def _sides(axis: Mapping[str, Any]) -> list[str]:
    return list(next(iter(axis["points"].values()))["sides"])


def _times(axis: Mapping[str, Any]) -> str:
    rows = []
    for value, point in axis["points"].items():
        sides = point["sides"]
        times = (spread(values["seconds"], "{:,.1f}", scale=1e6) for values in sides.values())
        ratios = (spread(values["times_as_fast"], RATIO) for values in sides.values() if values["times_as_fast"])
        rows.append((f"{int(value):,}", *times, *ratios))
    names = _sides(axis)
    return table((axis["title"], *(f"{name}, µs" for name in names), *["times as fast"] * (len(names) - 1)), rows)


def slope(points: Mapping[str, Any], side: str) -> float:
    """Return the power of a size that a side's time grows with, over all that was measured: 0 for not at all."""
    values = [math.log(int(value)) for value in points]
    times = [math.log(statistics.median(point["sides"][side]["seconds"])) for point in points.values()]
    return statistics.linear_regression(values, times).slope


def _growth_of(axis: Mapping[str, Any]) -> str:
    found = ", ".join(f"{slope(axis['points'], side):.2f} for {side}" for side in _sides(axis))
    return f"The time grows with this power of the {axis['title']} (0: not at all; 1: in proportion): {found}."


def draw_plot(record: Mapping[str, Any], path: Path) -> None:
    """Draw the time of a step against each size, both on logarithmic scales."""
    axes = record["axes"].values()
    with plots([axis["words"] for axis in axes], path) as places:
        for place, axis in zip(places, axes, strict=True):
            values = [int(value) for value in axis["points"]]
            slowest = 0.0
            for side in _sides(axis):
                turns = [[1e6 * each for each in point["sides"][side]["seconds"]] for point in axis["points"].values()]
                place.loglog(values, [statistics.median(each) for each in turns], label=side, **STYLES[side])
                ends = [*map(min, turns)], [*map(max, turns)]
                slowest = max(slowest, *ends[1])
                place.fill_between(values, *ends, color=STYLES[side]["color"], alpha=0.15, linewidth=0)
            place.set(xlabel=axis["title"], ylabel="µs a step", ylim=(1, 2 * slowest))


@benchmark("cache_growth", write_report, plots={"cache_growth": draw_plot})
@options.repeats(7, flag="--rounds", most=MAX_ROUNDS)
@options.choose("--axis", "axes", (*standard_axes(), tiny_axis()))
@options.peer
def main(rounds: int, axes: Sequence[Axis], peer: Path) -> dict[str, Any]:
    """Measure decode steps as one size grows; write a record, a page and a plot."""
    found = {}
    with (
        start_engines(ENGINES, peer) as engines,
        progress("measuring", rounds * sum(len(axis.cases) for axis in axes)) as advance,
    ):
        for axis in axes:
            points = {value: measure(case, engines, rounds, advance) for value, case in axis.cases.items()}
            found[axis.name] = {"title": axis.title, "words": axis.words, "points": points}
        return {"repeats": rounds, "versions": versions_of(engines), "axes": found}


if __name__ == "__main__":
    main()
