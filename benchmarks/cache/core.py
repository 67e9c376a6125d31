"""Measure kvframe's cache core beside vLLM's own, and record the results.

    make peer
    python -m benchmarks.cache.core [--rounds N] [--case NAME ...]

benchmarks/README.md says how, and what the figures mean.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.cache.core_cases import Case, Side, standard_cases, tiny_cases
from benchmarks.cache.core_report import write_report
from benchmarks.cache.worst_cases import MAX_ROUNDS, tiny_worst_cases, worst_cases
from benchmarks.harness.machine import PEER, RESULTS, describe_machine
from benchmarks.harness.process import EngineProcess
from kvframe.cli.render import progress

STANDARD = (*standard_cases(), *worst_cases())
CASES = {case.name: case for case in (*STANDARD, *tiny_cases(), *tiny_worst_cases())}


def start_engines(peer: Path) -> dict[str, EngineProcess]:
    """Start kvframe's process and, where it is installed, vLLM's; say so where it is not."""
    worker = ("-m", "benchmarks.cache.worker")
    engines = {"kvframe": EngineProcess("kvframe", [sys.executable, *worker, "kvframe"])}
    python = peer / "bin" / "python"
    if python.exists():
        engines["vllm"] = EngineProcess("vLLM", [python, *worker, "vllm"], is_of_other_environment=True)
    else:
        click.echo(f"vLLM is not in {peer}: measured without it; make peer installs it", err=True)
    return engines


def measure(
    case: Case, engines: Mapping[str, EngineProcess], rounds: int, advance: Callable[[int], None]
) -> dict[str, Any]:
    """Let the sides take turns, the order turned by one in each round, and check what they hold at the end.

    Returns:
        The case and, for each side, the median of each of its turns in seconds, and the facts of its check.

    Raises:
        SystemExit: A side does not hold or find what it should.
    """
    present = [side for side in case.sides if side.engine in engines]

    def ask(side: Side, what: str) -> Any:
        question = {"do": what, "side": side.name, "work": case.work, "sizes": case.sizes}
        return engines[side.engine].ask({**question, "setting": dataclasses.asdict(side.setting)})

    for side in present:
        ask(side, "set up")
    turns: dict[str, list[float]] = {side.name: [] for side in present}
    for turn in range(rounds):
        for index in range(len(present)):
            side = present[(index + turn) % len(present)]
            turns[side.name].append(statistics.median(ask(side, "turn")))
        advance(1)
    found = {side.name: {"seconds": turns[side.name], **ask(side, "check")} for side in present}
    first = present[0].name
    for name, values in found.items():
        pairs = zip(turns[first], turns[name], strict=True)
        values["times_as_fast"] = [theirs / own for theirs, own in pairs] if name != first else []
    return {**case.to_dict(), "sides": found}


@click.command(
    epilog="On a machine with other work, `chrt -f 1 python -m benchmarks.cache.core …` (as root) keeps that work "
    "from the processor while something is timed."
)
@click.option("--rounds", type=click.IntRange(1, MAX_ROUNDS), default=7, show_default=True, help="Turns of each side.")
@click.option(
    "--case",
    "cases",
    multiple=True,
    type=click.Choice(list(CASES)),
    default=[case.name for case in STANDARD],
    help="What is measured; several are named one by one. The default is all but the tiny ones.",
)
@click.option("--peer", type=click.Path(path_type=Path), default=PEER, help="Where make peer installed vLLM.")
@click.option(
    "--results",
    type=click.Path(path_type=Path),
    default=RESULTS,
    help="Where cache.json and cache.md are written.",
)
def main(rounds: int, cases: Sequence[str], peer: Path, results: Path) -> None:
    """Measure pieces of work of the cache core, all sides by turns, and write one JSON file and one page."""
    record: dict[str, Any] = {"machine": describe_machine(1), "repeats": rounds, "versions": {}, "cases": {}}
    engines = start_engines(peer)
    try:
        for engine in engines.values():
            record["versions"] |= engine.versions
        with progress("measuring", len(cases) * rounds) as advance:
            start = time.perf_counter()
            for name in dict.fromkeys(cases):
                record["cases"][name] = measure(CASES[name], engines, rounds, advance)
            record["seconds"] = time.perf_counter() - start
    finally:
        for engine in engines.values():
            engine.close()
    results.mkdir(parents=True, exist_ok=True)
    (results / "cache.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    page = write_report(record)
    (results / "cache.md").write_text(page, encoding="utf-8")
    click.echo(page)


if __name__ == "__main__":
    main()
