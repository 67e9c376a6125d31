"""Plots of the cache core's times and hits, as SVG. What is drawn depends on the record alone."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

STYLES: dict[str, dict[str, Any]] = {
    "vLLM": {"color": "#d95f02", "marker": "o", "markersize": 7, "markerfacecolor": "none", "linewidth": 2.5},
    "kvframe": {"color": "#1b6ca8", "marker": "s", "markersize": 3.5, "linewidth": 1.2},
}
"""Where two sides have the same figures, both can be seen."""

STYLES["the longest whose live blocks are left"] = {"color": "#2a9d4a", "linewidth": 5, "alpha": 0.35, "zorder": 0}
OTHER_STYLE: dict[str, Any] = {"color": "#7a7a7a", "marker": "^", "markersize": 4, "linestyle": ":"}
# Text stays text, and an element's name does not depend on when it was drawn.
mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kvframe", "font.size": 9})


def plot_growth(axes: Mapping[str, Any], path: Path) -> None:
    """Draw the time of a step against each size, both on logarithmic scales."""
    figure, places = _figure(len(axes))
    for place, axis in zip(places, axes.values(), strict=False):
        values = [int(value) for value in axis["points"]]
        slowest = 0.0
        for side in next(iter(axis["points"].values()))["sides"]:
            turns = [[1e6 * each for each in point["sides"][side]["seconds"]] for point in axis["points"].values()]
            middle = [statistics.median(each) for each in turns]
            style = STYLES.get(side, OTHER_STYLE)
            place.loglog(values, middle, label=side, **style)
            ends = [*map(min, turns)], [*map(max, turns)]
            slowest = max(slowest, *ends[1])
            place.fill_between(values, *ends, color=style["color"], alpha=0.15, linewidth=0)
        place.set(xlabel=axis["title"], ylabel="µs a step", ylim=(1, 2 * slowest))
        place.set_title(_wrapped(axis["words"]), fontsize=7)
    _finish(figure, places, len(axes), path)


def plot_hits(populations: Mapping[str, Any], path: Path) -> None:
    """Draw the tokens that are found against the blocks that were evicted."""
    figure, places = _figure(len(populations))
    for place, population in zip(places, populations.values(), strict=False):
        place.plot([0, 100], [100, 0], color="#bbbbbb", linewidth=0.8, label="in proportion")
        for side, found in population["sides"].items():
            place.plot(found["evicted"], found["found"], label=side, **STYLES.get(side, OTHER_STYLE))
        place.set(xlabel="% of the cached blocks evicted", ylabel="% of the tokens found", ylim=(-3, 103))
        place.set_title(_wrapped(population["title"]), fontsize=7)
    _finish(figure, places, len(populations), path)


def _wrapped(title: str) -> str:
    return "\n".join(textwrap.wrap(title, 60))


def _figure(num_plots: int) -> tuple[Figure, list[Axes]]:
    rows = max(1, -(-num_plots // 3))
    figure = Figure(figsize=(11, 3.1 * rows), layout="constrained")
    return figure, [*figure.subplots(rows, 3, squeeze=False).flat]


def _finish(figure: Figure, places: list[Axes], num_plots: int, path: Path) -> None:
    for place in places[num_plots:]:
        place.set_axis_off()
    for place in places[:num_plots]:
        place.grid(alpha=0.25, linewidth=0.5)
    if num_plots:
        handles, labels = places[0].get_legend_handles_labels()
        for place in places[:num_plots]:
            for handle, label in zip(*place.get_legend_handles_labels(), strict=True):
                if label not in labels:
                    handles, labels = [*handles, handle], [*labels, label]
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, format="svg", metadata={"Date": None})
