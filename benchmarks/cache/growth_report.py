"""The page and the plots of how the cache core's time grows and its hits fall."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.cache.core import RATIO, core_heading
from benchmarks.harness.pages import spread, table
from benchmarks.harness.plots import plots

STYLES: dict[str, dict[str, Any]] = {
    "vLLM": {"color": "#d95f02", "marker": "o", "markersize": 7, "markerfacecolor": "none", "linewidth": 2.5},
    "kvframe": {"color": "#1b6ca8", "marker": "s", "markersize": 3.5, "linewidth": 1.2},
}
"""Where two sides have the same figures, both can be seen."""

STYLES["the longest whose live blocks are left"] = {"color": "#2a9d4a", "linewidth": 5, "alpha": 0.35, "zorder": 0}
OTHER_STYLE: dict[str, Any] = {"color": "#7a7a7a", "marker": "^", "markersize": 4, "linestyle": ":"}


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    lines = core_heading("The cache core as sizes grow", record)
    lines += ["", "## A decode step", "", "![Time of a step](cache_growth.svg)"]
    for axis in record["axes"].values():
        lines += ["", f"### Against {axis['title']}", "", f"{axis['words']}.", "", *_axis(axis)]
        lines += ["", _growth_of(axis)]
    shared = record["siblings"]
    lines += ["", "## Tokens found of prompts", "", f"Of {shared['title']}, one after the other:", ""]
    sides = shared["sides"].items()
    lines += table(
        ("", "tokens found of each"), [(name, ", ".join(f"{hit:,}" for hit in hits)) for name, hits in sides]
    )
    lines += [
        "",
        "## Tokens found after evictions",
        "",
        IN_ORDER,
        "",
        "![Tokens found after evictions](cache_hits.svg)",
    ]
    for population in record["populations"].values():
        lines += ["", f"### {population['title'].capitalize()}", "", *_population(population)]
    lines += ["", "## Tokens found after blocks were lost at random", "", LOSSES, ""]
    lines += ["![Tokens found after random losses](cache_losses.svg)"]
    for lost in record["losses"].values():
        lines += ["", f"### Lost at random: {lost['title']}", "", *_losses(lost)]
    return "\n".join(lines) + "\n"


IN_ORDER = (
    "In the order of the core. Of one prompt with a window, what the window passed goes first, which a hit at the "
    "prompt's end does not need: nothing is lost until only that end can be continued from. The next block that goes "
    "is part of it, and no earlier end has its whole window: all is lost at once, on every side. Of many prompts, "
    "one after the other is lost."
)
LOSSES = (
    "Chance chooses the blocks; means of several draws. With full attention, a prompt is found up to its first lost "
    "block: of a long one little is found after a few losses, by every cache of whole prefixes, and not in proportion. "
    "*The longest whose live blocks are left* is the most that can be found where every block was cached, worked out "
    "without a cache. What comes after a block that all of it needs is no longer found. Both keep it until it is the "
    "oldest: to look for such blocks cost kvframe more than it gained (compare_hits.md)."
)


def _losses(lost: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, found in lost["sides"].items():
        points = zip(found["evicted"], found["found"], strict=True)
        kept = ", ".join(f"{x:.0f}: {y:.0f}" for x, y in zip(found["evicted"], found.get("kept", ()), strict=False))
        rows.append((name, ", ".join(f"{x:.0f}: {y:.1f}" for x, y in points), kept))
    return table(("", "% of the blocks lost: % of the tokens found", "% lost: % of the blocks still kept"), rows)


def _axis(axis: Mapping[str, Any]) -> list[str]:
    rows = []
    for value, point in axis["points"].items():
        sides = point["sides"]
        times = (spread(values["seconds"], "{:,.1f}", scale=1e6) for values in sides.values())
        ratios = [values["times_as_fast"] for values in sides.values() if values["times_as_fast"]]
        rows.append((f"{int(value):,}", *times, *(spread(ratio, RATIO) for ratio in ratios)))
    first = next(iter(axis["points"].values()))["sides"]
    ratio = ["times as fast"] * (len(first) - 1)
    return table((axis["title"], *(f"{name}, µs" for name in first), *ratio), rows)


def slope(points: Mapping[str, Any], side: str) -> float:
    """Return the power of a size that a side's time grows with, over all that was measured: 0 for not at all."""
    values = [math.log(int(value)) for value in points]
    times = [math.log(statistics.median(point["sides"][side]["seconds"])) for point in points.values()]
    return statistics.linear_regression(values, times).slope


def _growth_of(axis: Mapping[str, Any]) -> str:
    points = axis["points"]
    sides = next(iter(points.values()))["sides"]
    found = ", ".join(f"{slope(points, side):.2f} for {side}" for side in sides)
    return f"The time grows with this power of the {axis['title']} (0: not at all; 1: in proportion): {found}."


def _population(population: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, found in population["sides"].items():
        points = zip(found["evicted"], found["found"], strict=True)
        rows.append((name, f"{found['num_cached']:,}", ", ".join(f"{x:.0f}: {y:.0f}" for x, y in points)))
    return table(("", "blocks cached", "% of them evicted: % of the tokens found"), rows)


def plot_growth(axes: Mapping[str, Any], path: Path) -> None:
    """Draw the time of a step against each size, both on logarithmic scales."""
    with plots([axis["words"] for axis in axes.values()], path) as places:
        for place, axis in zip(places, axes.values(), strict=True):
            values = [int(value) for value in axis["points"]]
            slowest = 0.0
            for side in next(iter(axis["points"].values()))["sides"]:
                turns = [[1e6 * each for each in point["sides"][side]["seconds"]] for point in axis["points"].values()]
                style = STYLES.get(side, OTHER_STYLE)
                place.loglog(values, [statistics.median(each) for each in turns], label=side, **style)
                ends = [*map(min, turns)], [*map(max, turns)]
                slowest = max(slowest, *ends[1])
                place.fill_between(values, *ends, color=style["color"], alpha=0.15, linewidth=0)
            place.set(xlabel=axis["title"], ylabel="µs a step", ylim=(1, 2 * slowest))


def plot_hits(populations: Mapping[str, Any], path: Path) -> None:
    """Draw the tokens that are found against the blocks that were evicted."""
    with plots([population["title"] for population in populations.values()], path) as places:
        for place, population in zip(places, populations.values(), strict=True):
            place.plot([0, 100], [100, 0], color="#bbbbbb", linewidth=0.8, label="in proportion")
            for side, found in population["sides"].items():
                place.plot(found["evicted"], found["found"], label=side, **STYLES.get(side, OTHER_STYLE))
            place.set(xlabel="% of the cached blocks evicted", ylabel="% of the tokens found", ylim=(-3, 103))
