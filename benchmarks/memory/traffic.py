"""Run request traces over the caches of published models, in kvframe's layout and in others. No model is loaded.

The README of benchmarks says what the figures mean.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import fmean
from typing import Any

import attrs
import click

from benchmarks.harness import options
from benchmarks.harness.record import benchmark, progress
from benchmarks.memory.plans import DTYPE, MODELS
from benchmarks.memory.shapes import (
    FEW_STATES,
    KVFRAME,
    MAX_NUM_SEQS,
    PADDED,
    STATE_BLOCK,
    TOKENS_A_STEP,
    Shape,
)
from benchmarks.memory.simulator import Outcome, Simulation
from benchmarks.memory.traces import TRACES, Lengths, draw, typical_tokens
from benchmarks.memory.traffic_report import draw_plot, write_report
from benchmarks.memory.use import MemoryUse

SIZE = 32
USERS = {True: 2.5, False: 1.5}
"""So many times as many users as have a typical request that fits hold conversations at once, where these have several
turns, of which they share tokens, and where they have one."""

CONVERSATIONS = {True: 1.2, False: 1.6}
"""Conversations for each user, where these have several turns and where they have one."""


def run(file: str, trace: str, size: int, layout: str = KVFRAME) -> dict[str, Any]:
    """Run a trace over a model's cache and return what came of it.

    Args:
        file: The model's layer file.
        trace: A trace's name.
        size: Requests that the memory is for.
        layout: A layout's name.
    """
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
    """Return how many users a shape's memory is too small for."""
    fitting = shape.memory_bytes / shape.live_bytes(min(typical_tokens(lengths), shape.longest // 2))
    return min(MAX_NUM_SEQS, max(8, round(USERS[lengths.turns[1] > 1] * fitting)))


def figures(outcome: Outcome, memory_bytes: int) -> dict[str, Any]:
    """Return an outcome as plain values, memory as shares of all of it."""
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
    """Return the layouts that a model is run in."""
    return [KVFRAME, *([FEW_STATES] if Shape.read(file, size).keeps_states else []), PADDED]


@benchmark("memory_traffic", write_report, plots={"memory_traffic": draw_plot})
@options.choose("--model", "files", MODELS)
@options.choose("--trace", "traces", TRACES)
@click.option("--size", type=click.IntRange(1), default=SIZE, help="Requests that the memory is for.")
@click.option("--workers", type=click.IntRange(1), default=os.cpu_count(), help="Processes.")
def main(files: Sequence[str], traces: Sequence[str], size: int, workers: int) -> dict[str, Any]:
    """Run the traces and write one JSON file, one page of results and one plot."""
    layouts = {file: layouts_of(file, size) for file in files}
    jobs = [(file, trace, size, layout) for file in files for trace in traces for layout in layouts[file]]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context) as pool, progress("traces on layouts", len(jobs)) as advance:
        rows = []
        for row in pool.map(run, *zip(*jobs, strict=True)):
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
