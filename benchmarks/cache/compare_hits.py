"""Compare two versions of the cache on every model and trace of the traffic simulator: what is found, in what time.

    python -m benchmarks.cache.compare_hits COMMIT [--model FILE ...] [--trace NAME ...] [--size N ...]

The version in the working tree is compared with that of a commit. benchmarks/README.md says what the figures mean.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import click

from benchmarks.harness.machine import RESULTS, ROOT, describe_machine
from benchmarks.harness.pages import table
from benchmarks.harness.record import write
from benchmarks.memory.plans import MODELS
from benchmarks.memory.traces import TRACES
from benchmarks.memory.traffic import Job

SIZES = (32, 8)
"""Requests that the memory is for: as many as the simulator's usual figures, and a quarter."""


def measure(job: Job) -> dict[str, Any]:
    """Return a run's share of prompt tokens found, preemptions and processor seconds. Runs in a worker process."""
    start = time.process_time()
    row = job.run()
    kept = ("title", "trace", "hit_rate", "preemptions", "steps")
    return {**{name: row[name] for name in kept}, "size": job.size, "seconds": time.process_time() - start}


def run_here(files: Sequence[str], traces: Sequence[str], sizes: Sequence[int], workers: int) -> list[dict[str, Any]]:
    """Run every job on the version of kvframe that this process imports."""
    jobs = [Job(file, trace, size) for size in sizes for file in files for trace in traces]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(measure, jobs))


def run_in(folder: Path, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Run every job in a process that imports kvframe and its plugins from a checkout."""
    command = [sys.executable, "-P", "-m", "benchmarks.cache.compare_hits", "--worker", "HEAD", *arguments]
    with tempfile.TemporaryDirectory() as own:
        # The benchmarks are those of the working tree, and nothing else of it is on the path.
        (Path(own) / "benchmarks").symlink_to(ROOT / "benchmarks")
        sources = [Path(own), folder, folder / "kernels" / "src", *sorted((folder / "plugins").glob("*/src"))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources))}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def add_other_rows(record: dict[str, Any], older: Mapping[str, Any]) -> None:
    """Add what an older record of the same two commits has besides, so that a record can be made in parts."""
    if (record["before"], record["after"]) != (older["before"], older["after"]):
        return
    measured = {(row["title"], row["trace"], row["size"]) for row in record["rows"]}
    others = [row for row in older["rows"] if (row["title"], row["trace"], row["size"]) not in measured]
    titles, traces = [model.title for model in MODELS], list(TRACES)
    rows = [*others, *record["rows"]]
    record["rows"] = sorted(rows, key=lambda row: (titles.index(row["title"]), traces.index(row["trace"])))
    record["sizes"] = sorted({row["size"] for row in rows}, reverse=True)


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of a record."""
    lines = [
        "# Two versions of the cache on simulated traffic",
        "",
        f"`{record['command']}` on {record['machine']['date']}, {record['machine']['processor']}, one thread.",
        f"Before: commit {record['before']}; after: {record['after']}.",
        "Shares of the prompts' tokens that are found in the cache, preemptions, and processor seconds of the whole",
        "simulation, the simulator's own work included.",
        "",
    ]
    heads = ("model", "trace", "found before", "found after", "preemptions", "seconds before", "seconds after", "ratio")
    for size in record["sizes"]:
        rows = [row for row in record["rows"] if row["size"] == size]
        lines += [f"## Memory for {size} requests", "", *table(heads, [_row(row) for row in rows]), ""]
    return "\n".join(lines)


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    before, after = row["before"], row["after"]
    return (
        *(row["title"], row["trace"], f"{before['hit_rate']:.1%}", f"{after['hit_rate']:.1%}"),
        f"{before['preemptions']} → {after['preemptions']}",
        *(f"{each['seconds']:.1f}" for each in (before, after)),
        f"{before['seconds'] / after['seconds']:.2f}",
    )


@click.command()
@click.argument("commit")
@click.option("--model", "files", multiple=True, type=click.Choice([model.file for model in MODELS]))
@click.option("--trace", "traces", multiple=True, type=click.Choice(list(TRACES)))
@click.option("--size", "sizes", multiple=True, type=click.IntRange(1), help="Requests that the memory is for.")
@click.option("--workers", type=click.IntRange(1), default=os.cpu_count(), help="Processes.")
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS)
@click.option("--worker", is_flag=True, hidden=True)
def main(
    commit: str,
    files: tuple[str, ...],
    traces: tuple[str, ...],
    sizes: tuple[int, ...],
    workers: int,
    results: Path,
    worker: bool,
) -> None:
    """Compare the cache of the working tree with that of COMMIT."""
    files, traces, sizes = files or tuple(each.file for each in MODELS), traces or tuple(TRACES), sizes or SIZES
    if worker:
        click.echo(json.dumps(run_here(files, traces, sizes, workers)))
        return
    arguments = [part for each in files for part in ("--model", each)]
    arguments += [part for each in traces for part in ("--trace", each)]
    arguments += [part for each in sizes for part in ("--size", str(each))]
    arguments += ["--workers", str(workers)]

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "before"
        git("worktree", "add", "--detach", str(other), commit)
        try:
            before = run_in(other, arguments)
        finally:
            git("worktree", "remove", "--force", str(other))
    after = run_in(ROOT, arguments)
    record = {
        "machine": describe_machine(1),
        "command": f"python -m benchmarks.cache.compare_hits {git('rev-parse', '--short', commit)}",
        "before": git("rev-parse", "--short", commit),
        "after": git("rev-parse", "--short", "HEAD"),
        "sizes": sizes,
        "rows": [
            {**{name: old[name] for name in ("title", "trace", "size")}, "before": old, "after": new}
            for old, new in zip(before, after, strict=True)
        ],
    }
    if (results / "compare_hits.json").exists():
        add_other_rows(record, json.loads((results / "compare_hits.json").read_text(encoding="utf-8")))
    write(results, "compare_hits", record, write_report(record))
    click.echo(write_report(record))


if __name__ == "__main__":
    main()
