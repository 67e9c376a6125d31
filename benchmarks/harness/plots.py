"""Draw small plots side by side into an SVG file that depends on the record alone."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLUMNS = 3
# Text stays text, and an element's name does not depend on when it was drawn.
mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kvframe", "font.size": 9})


@contextmanager
def plots(titles: list[str], path: Path) -> Iterator[list[Axes]]:
    """Yield one plot for each title; then add one legend for all plots and write the SVG file."""
    rows = max(1, -(-len(titles) // COLUMNS))
    figure = Figure(figsize=(11, 3.1 * rows), layout="constrained")
    places = [*figure.subplots(rows, COLUMNS, squeeze=False).flat]
    yield places[: len(titles)]
    labels: dict[str, Any] = {}
    for place, title in zip(places, titles, strict=False):
        place.set_title("\n".join(textwrap.wrap(title, 60)), fontsize=7)
        place.grid(alpha=0.25, linewidth=0.5)
        handles, names = place.get_legend_handles_labels()
        labels = {**dict(zip(names, handles, strict=True)), **labels}
    for place in places[len(titles) :]:
        place.set_axis_off()
    if labels:
        figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, format="svg", metadata={"Date": None})
