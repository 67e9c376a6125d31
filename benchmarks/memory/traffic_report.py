"""The page and the plot of simulated traffic: the record as tables and bars for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.pages import heading, page, table
from benchmarks.harness.plots import plots
from benchmarks.memory.shapes import FEW_STATES, KVFRAME, PADDED

SHORT = {KVFRAME: "kvframe", FEW_STATES: "few states", PADDED: "equal groups"}
"""Layouts as the tables name them."""

WASTES = ("partly_used", "padding")

Rows = Sequence[Mapping[str, Any]]
ByLayout = Mapping[str, Mapping[str, Any]]


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    rows = record["layouts"]
    note = (
        f"Keys and values are {record['dtype']}, steps have at most {record['tokens_a_step']:,} tokens; *few states* "
        f"keeps one every {record['state_block']} tokens. The figures depend on no machine."
    )
    return page(
        heading("Traffic on the caches of published models", record, ".", note, how="Simulated"),
        "![Requests at once, and the memory that is wasted](memory_traffic.svg)",
        "## Requests at once",
        "The most; in brackets the average from the first step without room on. The last columns are kvframe's most, "
        "and its average, over those of equal groups; the better one where it has two.",
        table(
            ("", "", "GB", *SHORT.values(), "most / equal groups", "average / equal groups"),
            _per_trace(rows, _concurrency),
        ),
        "## Requests ended in 1,000 steps",
        table(("", "", *SHORT.values(), "kvframe / equal groups"), _per_trace(rows, _ended)),
        "## Prompt tokens found in the cache, and preemptions",
        table(("", "", *SHORT.values(), *(f"preemptions: {name}" for name in SHORT.values())), _per_trace(rows, _hits)),
        "## Waste when at least 95 % of the memory is in use",
        "Beyond unfinished blocks: free pages in partly used slabs, and padding. Shares of all memory, on average over "
        "the looks of all traces.",
        table(("", *SHORT.values()), _per_shape(rows)),
        "By trace; empty where so much never was in use.",
        table(
            (
                *("", "", "", "unfinished blocks", "free pages in partly used slabs", "padding"),
                *("wasted beyond unfinished blocks", "at most", "cached pages in partly used slabs"),
            ),
            [_memory(row) for row in rows if row["use"] is not None],
        ),
    )


def _per_trace(rows: Rows, cells: Any) -> list[tuple[str, ...]]:
    found, title = [], ""
    for name, trace in dict.fromkeys((row["title"], row["trace"]) for row in rows):
        by_layout = {row["layout"]: row for row in rows if (row["title"], row["trace"]) == (name, trace)}
        found.append((name if name != title else "", trace, *cells(by_layout)))
        title = name
    return found


def best_ratio(by_layout: ByLayout, other: str, figure: str = "peak") -> float:
    """Return a figure of kvframe over that of another layout, with the better of its rows."""
    ours = max(row[figure] for name, row in by_layout.items() if name.startswith(KVFRAME))
    return float(ours / by_layout[other][figure])


def _cells(by_layout: ByLayout, cell: Callable[[Mapping[str, Any]], str]) -> list[str]:
    """Return a cell for each layout; an empty one for a layout that was not measured."""
    return ["" if name not in by_layout else cell(by_layout[name]) for name in SHORT]


def _concurrency(by_layout: ByLayout) -> list[str]:
    cells = _cells(by_layout, lambda row: f"{row['peak']} ({row['concurrency']:.1f})")
    ratios = (best_ratio(by_layout, PADDED, figure) for figure in ("peak", "concurrency"))
    return [f"{by_layout[KVFRAME]['memory_bytes'] / 1e9:.1f}", *cells, *(f"{ratio:.2f}" for ratio in ratios)]


def _ended(by_layout: ByLayout) -> list[str]:
    cells = _cells(by_layout, lambda row: f"{row['ended_in_1000_steps']:.0f}")
    return [*cells, f"{best_ratio(by_layout, PADDED, 'ended_in_1000_steps'):.2f}"]


def _hits(by_layout: ByLayout) -> list[str]:
    hits = _cells(by_layout, lambda row: f"{row['hit_rate']:.1%}")
    return [*hits, *_cells(by_layout, lambda row: f"{row['preemptions']:,}")]


def wasted(row: Mapping[str, Any]) -> float | None:
    """Return the share of the memory that is of no use beyond unfinished blocks; None where it was never used up."""
    return None if row["use"] is None else sum(row["use"][name] for name in WASTES)


def shape_waste(rows: Rows) -> float | None:
    """Return what is wasted beyond unfinished blocks over several traces; None where memory never was used up."""
    looks = sum(row["looks"] for row in rows)
    return sum(row["looks"] * (wasted(row) or 0.0) for row in rows) / looks if looks else None


def _per_shape(rows: Rows) -> list[tuple[str, ...]]:
    found = []
    for title in dict.fromkeys(row["title"] for row in rows):
        shares = [
            shape_waste([row for row in rows if (row["title"], row["layout"]) == (title, name)]) for name in SHORT
        ]
        found.append((title, *("" if share is None else f"{share:.2%}" for share in shares)))
    return found


def _memory(row: Mapping[str, Any]) -> tuple[str, ...]:
    use = row["use"]
    shares = (use["unfinished"], use["partly_used"], use["padding"], wasted(row), row["most_wasted"], use["cached"])
    return (row["title"], row["trace"], SHORT[row["layout"]], *(f"{share:.2%}" for share in shares))


def draw_plot(record: Mapping[str, Any], path: Path) -> None:
    """Draw, for each trace, how many requests run at once at most beside equal padded groups."""
    rows = record["layouts"]
    traces, titles = (list(dict.fromkeys(row[key] for row in rows)) for key in ("trace", "title"))
    found = {(row["title"], row["trace"], row["layout"]): row["peak"] for row in rows}
    with plots([f"most requests at once, beside {PADDED}: {trace}" for trace in traces], path) as places:
        for place, trace in zip(places, traces, strict=True):
            for index, layout in enumerate(SHORT):
                bars = [
                    (number + 0.3 * index, found[title, trace, layout] / found[title, trace, PADDED])
                    for number, title in enumerate(titles)
                    if (title, trace, layout) in found
                ]
                places_of, heights = zip(*bars, strict=True)
                place.bar(places_of, heights, width=0.3, label=layout)
            place.set_xticks([number + 0.3 for number in range(len(titles))], titles, rotation=90, fontsize=6)
