"""Run request traces over the caches of published models, in kvframe's layout and in others. No model is loaded.

See benchmarks/README.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import attrs
import click

from benchmarks.harness import options
from benchmarks.harness.pages import heading, page, table
from benchmarks.harness.plots import plots
from benchmarks.harness.process import map_in_processes
from benchmarks.harness.record import benchmark, progress
from benchmarks.memory.plans import (
    DTYPE,
    FEW_STATES,
    KVFRAME,
    MAX_NUM_SEQS,
    MODELS,
    PADDED,
    STATE_BLOCK,
    TOKENS_A_STEP,
    Shape,
)
from benchmarks.memory.simulator import MemoryUse, Outcome, Simulation
from benchmarks.memory.traces import TRACES, Lengths, draw, typical_tokens

SIZE = 32
USERS = {True: 2.5, False: 1.5}
"""Users for each typical request that fits into the memory: of conversations with several turns, and with one."""

CONVERSATIONS = {True: 1.2, False: 1.6}
"""Conversations for each user, if they have several turns and if they have one."""


def run(file: str, trace: str, size: int, layout: str = KVFRAME) -> dict[str, Any]:
    """Run a trace over the cache of a layer file's model, made for ``size`` requests; return the row of the record."""
    shape, lengths = Shape.read(file, size), TRACES[trace]
    num_users = users(shape, lengths)
    outcome = Simulation(
        shape.plan(layout),
        draw(lengths, round(num_users * CONVERSATIONS[lengths.turns[1] > 1]), shape.longest),
        num_users=num_users,
        max_num_seqs=MAX_NUM_SEQS,
        input_lens=shape.description.max_input_lens,
    ).run()
    what = {"title": MODELS[file], "trace": trace, "layout": layout, "memory_bytes": shape.memory_bytes}
    return {**what, "users": num_users, **figures(outcome, shape.memory_bytes)}


def users(shape: Shape, lengths: Lengths) -> int:
    """Return a number of users for which a model's memory is too small."""
    fitting = shape.memory_bytes / shape.live_bytes(min(typical_tokens(lengths), shape.longest // 2))
    return min(MAX_NUM_SEQS, max(8, round(USERS[lengths.turns[1] > 1] * fitting)))


def figures(outcome: Outcome, memory_bytes: int) -> dict[str, Any]:
    """Return an outcome as plain values; memory is given in shares of the pool."""
    uses, parts = outcome.full_use, [field.name for field in attrs.fields(MemoryUse)]
    return {
        **{
            name: getattr(outcome, name)
            for name in ("requests", "steps", "was_full", "peak", "preemptions", "hit_rate")
        },
        "ended_in_1000_steps": 1000 * outcome.requests / outcome.steps,
        "concurrency": fmean(outcome.concurrency),
        "looks": len(uses),
        "use": {name: fmean(getattr(use, name) for use in uses) / memory_bytes for name in parts} if uses else None,
        "most_wasted": max((use.partly_used + use.padding for use in uses), default=0) / memory_bytes,
    }


def layouts_of(file: str, size: int) -> list[str]:
    """Return the layouts in which a model is run."""
    return [KVFRAME, *([FEW_STATES] if Shape.read(file, size).keeps_states else []), PADDED]


SHORT = {KVFRAME: "kvframe", FEW_STATES: "few states", PADDED: "equal groups"}
"""The layouts' names in the tables."""

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
        "The most; in brackets the average from the first step on in which a request found too few free blocks. The "
        "last columns are kvframe's most and its average, over those of equal groups, by the better layout.",
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
        "all traces.",
        table(("", *SHORT.values()), _per_shape(rows)),
    )


def _per_trace(rows: Rows, cells: Any) -> list[tuple[str, ...]]:
    table_rows, title = [], ""
    for name, trace in dict.fromkeys((row["title"], row["trace"]) for row in rows):
        by_layout = {row["layout"]: row for row in rows if (row["title"], row["trace"]) == (name, trace)}
        table_rows.append((name if name != title else "", trace, *cells(by_layout)))
        title = name
    return table_rows


def best_ratio(by_layout: ByLayout, other: str, figure: str = "peak") -> float:
    """Return a figure of kvframe, the better of its two layouts, over that of another layout."""
    ours = max(row[figure] for name, row in by_layout.items() if name.startswith(KVFRAME))
    return float(ours / by_layout[other][figure])


def _cells(by_layout: ByLayout, cell: Callable[[Mapping[str, Any]], str]) -> list[str]:
    """Return a cell for each layout; it is empty for a layout that was not run."""
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
    """Return the wasted share of the memory without unfinished blocks; None if the memory was never full."""
    return None if row["use"] is None else sum(row["use"][name] for name in WASTES)


def shape_waste(rows: Rows) -> float | None:
    """Return the wasted share over several traces, without unfinished blocks; None if the memory was never full."""
    looks = sum(row["looks"] for row in rows)
    return sum(row["looks"] * (wasted(row) or 0.0) for row in rows) / looks if looks else None


def _per_shape(rows: Rows) -> list[tuple[str, ...]]:
    table_rows = []
    for title in dict.fromkeys(row["title"] for row in rows):
        shares = [
            shape_waste([row for row in rows if (row["title"], row["layout"]) == (title, name)]) for name in SHORT
        ]
        table_rows.append((title, *("" if share is None else f"{share:.2%}" for share in shares)))
    return table_rows


def draw_plot(record: Mapping[str, Any], path: Path) -> None:
    """Draw, for each trace, the most requests at once over those of equal padded groups."""
    rows = record["layouts"]
    traces, titles = (list(dict.fromkeys(row[key] for row in rows)) for key in ("trace", "title"))
    peaks = {(row["title"], row["trace"], row["layout"]): row["peak"] for row in rows}
    with plots([f"most requests at once, beside {PADDED}: {trace}" for trace in traces], path) as places:
        for place, trace in zip(places, traces, strict=True):
            for index, layout in enumerate(SHORT):
                bars = [
                    (number + 0.3 * index, peaks[title, trace, layout] / peaks[title, trace, PADDED])
                    for number, title in enumerate(titles)
                    if (title, trace, layout) in peaks
                ]
                places_of, heights = zip(*bars, strict=True)
                place.bar(places_of, heights, width=0.3, label=layout)
            place.set_xticks([number + 0.3 for number in range(len(titles))], titles, rotation=90, fontsize=6)


@benchmark("memory_traffic", write_report, plots={"memory_traffic": draw_plot})
@options.choose("--model", "files", MODELS)
@options.choose("--trace", "traces", TRACES)
@click.option(
    "--size", type=click.IntRange(1), default=SIZE, help="The number of requests that the memory is made for."
)
@click.option("--workers", type=click.IntRange(1), default=os.cpu_count(), help="The number of processes.")
def main(files: Sequence[str], traces: Sequence[str], size: int, workers: int) -> dict[str, Any]:
    """Run the traces; write one JSON file, one page and one plot."""
    layouts = {file: layouts_of(file, size) for file in files}
    jobs = [(file, trace, size, layout) for file in files for trace in traces for layout in layouts[file]]
    with progress("traces on layouts", len(jobs)) as advance:
        rows = []
        for row in map_in_processes(run, jobs, workers):
            rows.append(row)
            advance(1)
    return {
        "dtype": DTYPE,
        "size": size,
        "state_block": STATE_BLOCK,
        "tokens_a_step": TOKENS_A_STEP,
        "traces": {name: attrs.asdict(lengths) for name, lengths in TRACES.items()},
        "layouts": rows,
    }


if __name__ == "__main__":
    main()
