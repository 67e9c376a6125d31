"""Measure attention on a CPU, every backend of kvframe beside vLLM's own, and record the results.

    make peer
    python -m benchmarks.attention.cpu [--rounds N] [--threads N] [--shape NAME ...] [--system NAME ...]

benchmarks/README.md says how, and what the figures mean.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.attention.cpu_kvframe import usable_backends
from benchmarks.attention.cpu_report import write_report
from benchmarks.attention.cpu_shapes import Buffers, Shape, reference, standard_shapes, tiny_shapes
from benchmarks.attention.cpu_worker import timed
from benchmarks.harness.machine import PEER, RESULTS, describe_machine
from benchmarks.harness.process import EngineProcess
from kvframe.cli.render import progress

VLLM = "vllm"
NAIVE = "naive"
SHAPES = {shape.name: shape for shape in (*standard_shapes(), *tiny_shapes())}
MATRIX_SIZE = 2048
CEILING_REPEATS = 5
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
"""How far an output may be from the float32 reference, in the largest output: the dtype's rounding, and no mistake."""


class Worker(EngineProcess):
    """One engine's process."""

    def __init__(self, python: Path | str, system: str, threads: int, file: int) -> None:
        """Start it, and wait until the engine is loaded.

        Args:
            python: The interpreter of the engine's environment.
            system: The engine.
            threads: Of torch.
            file: Descriptor of the memory that all engines share.

        Raises:
            SystemExit: It does not start.
        """
        command = [python, "-m", "benchmarks.attention.cpu_worker", system, str(threads), str(file)]
        super().__init__(system, command, threads=threads, is_of_other_environment=system == VLLM, files=[file])

    def turn(self, shape: Shape, calls: int) -> dict[str, Any]:
        """Return what the engine measured in a turn, or why it refuses the shape."""
        answer: dict[str, Any] = self.ask({"shape": dataclasses.asdict(shape), "calls": calls})
        return answer


def read_bandwidth(pool: torch.Tensor) -> float:
    """Return the bytes that torch reads a second of a pool, all threads together: the best of a few readings."""
    values = pool[: len(pool) // 4 * 4].view(torch.float32)
    return values.nbytes / min(timed(values.sum)[0] for _ in range(CEILING_REPEATS))


def matrix_rate(dtype: torch.dtype) -> float:
    """Return the floating-point operations that torch does a second in a large matrix product: the best of a few."""
    left, right = torch.randn(2, MATRIX_SIZE, MATRIX_SIZE).to(dtype)
    seconds = min(timed(lambda: left @ right)[0] for _ in range(CEILING_REPEATS))
    return 2 * MATRIX_SIZE**3 / seconds


def measure(
    shape: Shape, workers: Sequence[Worker], file: int, rounds: int, calls: int, advance: Callable[[int], None]
) -> dict[str, Any]:
    """Let the engines take turns on one shape, the order turned by one in each round.

    Returns:
        The shape, the ceiling in each round, and what each engine measured in each of its turns.

    Raises:
        SystemExit: An engine's output is not the reference's.
    """
    buffers = Buffers(file, shape)
    buffers.draw()
    expected = reference(shape, buffers)
    ceilings, refused = [], {}
    found: dict[str, dict[str, Any]] = {}
    for turn in range(rounds):
        for index in range(len(workers)):
            worker = workers[(index + turn) % len(workers)]
            if worker.name in refused:
                continue
            answer = worker.turn(shape, calls)
            if "refused" in answer:
                refused[worker.name] = answer["refused"]
                continue
            error = _error(buffers.output, expected)
            # A pool that nobody wrote would leave the last engine's output, or none: never NaN alone.
            if not error <= TOLERANCE[shape.dtype]:
                sys.exit(f"{shape.name}: the output of {worker.name} is wrong by {error:.2g} of the largest one")
            buffers.output.fill_(torch.nan)
            values = found.setdefault(worker.name, {"seconds": [], "metadata_seconds": [], "error": 0.0})
            values["error"] = max(values["error"], error)
            for name in ("seconds", "metadata_seconds"):
                values[name].append(statistics.median(answer[name]))
        ceilings.append(read_bandwidth(buffers.pool) if shape.kind == "decode" else matrix_rate(shape.torch_dtype))
        advance(1)
    for values in found.values():
        values["share"] = shares(shape, values["seconds"], ceilings)
        if VLLM in found:
            pairs = zip(found[VLLM]["seconds"], values["seconds"], strict=True)
            values["times_as_fast_as_vllm"] = [theirs / own for theirs, own in pairs]
    return {"shape": dataclasses.asdict(shape), "ceiling": ceilings, "systems": found, "refused": refused}


def shares(shape: Shape, seconds: Sequence[float], ceilings: Sequence[float]) -> list[float]:
    """Return the share of each time that the shape's bytes, or operations, take at the ceiling of the same round."""
    amount = shape.read_bytes if shape.kind == "decode" else shape.num_flops
    return [amount / ceiling / took for took, ceiling in zip(seconds, ceilings, strict=True)]


def _error(output: torch.Tensor, expected: torch.Tensor) -> float:
    return float((output.float() - expected).abs().max() / expected.abs().max())


def find_systems(names: Sequence[str], shapes: Sequence[Shape], peer: Path) -> Mapping[str, Path | str]:
    """Return the interpreter of each system; vLLM is left out, and this said, where it is not installed."""
    chosen = list(names) or [*usable_backends(shapes), NAIVE, VLLM]
    python = peer / "bin" / "python"
    if VLLM in chosen and not python.exists():
        if names:
            raise click.UsageError(f"vLLM is not in {peer}; run make peer")
        click.echo(f"vLLM is not in {peer}: measured without it; make peer installs it", err=True)
        chosen.remove(VLLM)
    return {name: python if name == VLLM else sys.executable for name in chosen}


@click.command(
    epilog="On a machine with other work, `chrt -f 1 python -m benchmarks.attention.cpu …` (as root) keeps that work "
    "from the processor while something is timed; without it, threads that wait for each other wait for it too."
)
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True, help="Turns of each system.")
@click.option("--calls", type=click.IntRange(min=1), default=3, show_default=True, help="Timed calls of a turn.")
@click.option("--threads", type=click.IntRange(min=1), default=os.cpu_count() or 1, help="Of torch; all cores.")
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    type=click.Choice(list(SHAPES)),
    default=[shape.name for shape in standard_shapes()],
    help="What is measured; several are named one by one. The default is all but the tiny ones.",
)
@click.option(
    "--system",
    "systems",
    multiple=True,
    help="A backend's registered name, naive or vllm. The default is every backend that runs here, and both others.",
)
@click.option("--peer", type=click.Path(path_type=Path), default=PEER, help="Where make peer installed vLLM.")
@click.option(
    "--results",
    type=click.Path(path_type=Path),
    default=RESULTS,
    help="Where cpu_attention.json and cpu_attention.md are written.",
)
def main(
    rounds: int, calls: int, threads: int, shapes: Sequence[str], systems: Sequence[str], peer: Path, results: Path
) -> None:
    """Measure attention steps of one layer, each with all systems by turns, and write one JSON file and one page."""
    torch.set_num_threads(threads)
    chosen = [SHAPES[name] for name in dict.fromkeys(shapes)]
    record: dict[str, Any] = {
        "machine": describe_machine(threads),
        "repeats": rounds,
        "calls": calls,
        "versions": {},
        "shapes": {},
    }
    file = os.memfd_create("attention")
    os.truncate(file, max(map(Buffers.num_bytes, chosen)))
    workers: list[Worker] = []
    try:
        for name, python in find_systems(systems, chosen, peer).items():
            workers.append(Worker(python, name, threads, file))
            record["versions"][name] = workers[-1].versions
        with progress("measuring", len(chosen) * rounds) as advance, torch.inference_mode():
            start = time.perf_counter()
            for shape in chosen:
                record["shapes"][shape.name] = measure(shape, workers, file, rounds, calls, advance)
            record["seconds"] = time.perf_counter() - start
    finally:
        for worker in workers:
            worker.close()
        os.close(file)
    results.mkdir(parents=True, exist_ok=True)
    (results / "cpu_attention.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    page = write_report(record)
    (results / "cpu_attention.md").write_text(page, encoding="utf-8")
    click.echo(page)


if __name__ == "__main__":
    main()
