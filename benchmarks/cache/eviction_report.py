"""The page and the plot of eviction policies: the record as tables and curves for people."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.harness.pages import table

STYLES: dict[str, dict[str, Any]] = {
    "at best": {"color": "#7a7a7a", "linestyle": ":", "marker": "^", "markersize": 4},
    "lru": {"color": "#d95f02", "marker": "o", "markersize": 6, "markerfacecolor": "none", "linewidth": 2.2},
    "scan_resistant": {"color": "#1b6ca8", "marker": "s", "markersize": 3.5, "linewidth": 1.2},
}


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    machine, traces = record["machine"], record["traces"]
    pools = [str(pool) for pool in record["pools"]]
    heads = [_thousands(pool) for pool in pools]
    lines = [
        "# What the cache gives up",
        "",
        f"Replayed on {machine['date']} by `{machine['command']}`, kvframe {machine['kvframe']} at "
        f"{machine['commit']}. What is found depends on no machine; times are of this one, with others at work on it.",
        "",
        "![Share of prompt tokens that are found, by the size of the cache](eviction.svg)",
        "",
        "## Prompt tokens that are found",
        "",
        "In % of all that are asked for once the cache is full, for pools with room for so many tokens: by `lru`, by "
        "`scan_resistant`, and at best.",
        "",
        *table(
            ("", "requests", "tokens", *heads),
            [
                (name, f"{trace['requests']:,}", _thousands(trace["tokens"]), *(_hits(trace, pool) for pool in pools))
                for name, trace in traces.items()
            ],
        ),
        "",
        *(f"- *{name}*: {trace['words']}." for name, trace in traces.items()),
        "",
        "## More than least recently used finds",
        "",
        "In percentage points. In brackets, the part of what is to be had beyond `lru`: 100 % is as good as can be.",
        "",
        *table(("", *heads), [(name, *(_gain(trace, pool) for pool in pools)) for name, trace in traces.items()]),
        "",
        "## Requests whose shared prompt is found as a whole",
        "",
        "In %, by `lru` and by `scan_resistant`.",
        "",
        *table(
            ("", *heads),
            [
                (name, *(_shared(trace, pool) for pool in pools))
                for name, trace in traces.items()
                if trace["has_shared"]
            ],
        ),
        "",
        "## Time",
        "",
        "Microseconds a request, all of the cache's work: by `lru` and by `scan_resistant`.",
        "",
        *table(("", *heads), [(name, *(_times(trace, pool) for pool in pools)) for name, trace in traces.items()]),
        "",
    ]
    return "\n".join(lines)


def _thousands(count: int | str) -> str:
    return f"{round(int(count) / 1024):,} Ki"


def share(trace: Mapping[str, Any], pool: str, side: str) -> float:
    """Return the percentage of prompt tokens that are found."""
    return float(100 * trace["pools"][pool][side]["found"] / trace["counted_tokens"])


def _hits(trace: Mapping[str, Any], pool: str) -> str:
    return " / ".join(f"{share(trace, pool, side):.1f}" for side in ("lru", "scan_resistant", "at best"))


def _gain(trace: Mapping[str, Any], pool: str) -> str:
    lru, policy, best = (share(trace, pool, side) for side in ("lru", "scan_resistant", "at best"))
    part = f" ({100 * (policy - lru) / (best - lru):.0f} %)" if best - lru > 0.5 else ""
    return f"{policy - lru:+.1f}{part}"


def _shared(trace: Mapping[str, Any], pool: str) -> str:
    sides = trace["pools"][pool]
    return " / ".join(f"{100 * sides[side]['shared_found']:.0f}" for side in ("lru", "scan_resistant"))


def _times(trace: Mapping[str, Any], pool: str) -> str:
    sides = trace["pools"][pool]
    return " / ".join(f"{sides[side]['us']:,.0f}" for side in ("lru", "scan_resistant"))


def draw_plot(record: Mapping[str, Any], path: Path) -> None:
    """Draw what is found against the size of the cache, one plot for each trace."""
    # Text stays text, and an element's name does not depend on when it was drawn.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kvframe", "font.size": 9})
    traces = record["traces"]
    rows = max(1, -(-len(traces) // 3))
    figure = Figure(figsize=(11, 3.0 * rows), layout="constrained")
    places = [*figure.subplots(rows, 3, squeeze=False).flat]
    for place, (name, trace) in zip(places, traces.items(), strict=False):
        for side, style in STYLES.items():
            values = [share(trace, str(pool), side) for pool in record["pools"]]
            place.plot([_thousands(pool) for pool in record["pools"]], values, label=side, **style)
        place.set(xlabel="room for so many tokens", ylabel="% of prompt tokens found", ylim=(0, None))
        place.set_title(name, fontsize=8)
        place.grid(alpha=0.25, linewidth=0.5)
    for place in places[len(traces) :]:
        place.set_axis_off()
    handles, labels = places[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, format="svg", metadata={"Date": None})
