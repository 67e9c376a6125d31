"""Measure attention on a CPU: every backend of kvframe beside vLLM's own. See benchmarks/README.md."""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.attention.cpu_systems import VLLM, map_pool, pool_bytes, why_refused
from benchmarks.attention.shapes import Requests, Shape, decodes
from benchmarks.harness import options
from benchmarks.harness.layers import usable_backends
from benchmarks.harness.pages import Column, case_page, figures, named_versions, spread
from benchmarks.harness.process import EngineProcess, find_vllm, start_engines, timed
from benchmarks.harness.record import benchmark, by_turns, in_columns, measure_each, ratios
from kvframe.loading.plugins import load_plugins

MATRIX_SIZE = 2048
CEILING_REPEATS = 5
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
"""The largest allowed error as a share of the largest output: rounding of the dtype, but no mistake."""


STEPS: dict[str, tuple[str, Requests, dict[str, Any]]] = {
    "decode-16x2048": ("decode", decodes(16, 2048), {}),
    "decode-16x2048-page128": ("decode", decodes(16, 2048), {"block_size": 128}),
    "decode-1x32768": ("decode", decodes(1, 32768), {}),
    "decode-64x512": ("decode", decodes(64, 512), {}),
    "decode-16x2048-window1024": ("decode", decodes(16, 2048), {"window": 1024}),
    "prefill-2048": ("prefill", ((0, 2048),), {}),
    "mixed-15x2048-512": ("mixed", (*decodes(15, 2048), (1024, 512)), {}),
}
SMALL: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32}
SHAPES = (
    *(
        Shape(name=f"{name}-{dtype}", kind=kind, requests=requests, dtype=dtype, **fields)
        for dtype in TOLERANCE
        for name, (kind, requests, fields) in STEPS.items()
    ),
    Shape(name="tiny-decode", kind="decode", requests=((40, 1), (17, 1), (0, 1)), dtype="float32", **SMALL),
    Shape(name="tiny-window", kind="decode", requests=((40, 1), (17, 1), (0, 1)), window=20, **SMALL),
    Shape(name="tiny-mixed", kind="mixed", requests=((40, 1), (0, 9), (17, 5)), dtype="float32", **SMALL),
)


def read_bandwidth(pool: torch.Tensor) -> float:
    """Return the bytes per second at which torch's threads read a pool: the best of a few readings."""
    values = pool[: len(pool) // 4 * 4].view(torch.float32)
    return values.nbytes / min(timed(values.sum)[0] for _ in range(CEILING_REPEATS))


def matrix_rate(dtype: torch.dtype) -> float:
    """Return the floating-point operations per second of a large matrix product: the best of a few."""
    left, right = torch.randn(2, MATRIX_SIZE, MATRIX_SIZE).to(dtype)
    seconds = min(timed(lambda: left @ right)[0] for _ in range(CEILING_REPEATS))
    return 2 * MATRIX_SIZE**3 / seconds


def measure(
    shape: Shape, systems: Mapping[str, EngineProcess], file: int, rounds: int, advance: Callable[[int], object]
) -> dict[str, Any]:
    """Let the systems take turns on one shape; end the program if an output differs from dense attention.

    Returns:
        The shape, the ceiling in each round, and the figures of each system in each round.
    """
    described, pool = dataclasses.asdict(shape), map_pool(file, shape)

    def do_turn(name: str, _: int) -> dict[str, Any]:
        answer: dict[str, Any] = systems[name].ask({"shape": described})
        if not answer.get("error", 0.0) <= TOLERANCE[shape.dtype]:
            sys.exit(f"{shape.name}: the output of {name} is wrong by {answer['error']:.2g} of the largest one")
        return {part: statistics.median(value) if isinstance(value, list) else value for part, value in answer.items()}

    ceilings, turns = [], []
    for _, results in by_turns([*systems], rounds, do_turn, advance):
        turns.append(results)
        is_decode = shape.kind == "decode"
        ceilings.append(read_bandwidth(pool) if is_decode else matrix_rate(shape.torch_dtype))
    columns = {name: in_columns(turn[name] for turn in turns) for name in systems}
    refused = {name: values["refused"][0] for name, values in columns.items() if "refused" in values}
    measured: dict[str, Any] = {name: values for name, values in columns.items() if name not in refused}
    # The share of a time that the shape's bytes or operations take at the ceiling of the same round.
    least = [(shape.kv_bytes() if shape.kind == "decode" else shape.num_flops) / ceiling for ceiling in ceilings]
    for values in measured.values():
        values |= {"error": max(values["error"]), "share": ratios(least, values["seconds"])}
        if VLLM in measured:
            values["times_as_fast_as_vllm"] = ratios(measured[VLLM]["seconds"], values["seconds"])
    return {"shape": described, "ceiling": ceilings, "systems": measured, "refused": refused}


def find_systems(names: Sequence[str], shapes: Sequence[Shape], peer: Path) -> Sequence[str]:
    """Return the named systems, or all that serve a shape. Refuse vLLM if it is named but not installed."""
    if VLLM in names and find_vllm(peer) is None:
        raise click.UsageError(f"vLLM is not in {peer}; run make peer")
    usable = usable_backends(load_plugins().registry, "cpu")[0]
    return names or [*(name for name in usable if not all(why_refused(name, shapes))), VLLM]


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    note = (
        "float32 and bfloat16, the outputs of all systems agree in every turn.\n\n"
        f"Systems: {named_versions(record['versions'])}."
    )
    return case_page("Attention on a CPU: kvframe's backends and vLLM's", record, "shapes", _section, note)


COLUMNS: dict[str, Column] = {
    "seconds": ("ms", "{:,.2f}", 1e3),
    "share": ("share of the ceiling", "{:,.0f} %", 100),
    "times_as_fast_as_vllm": ("times as fast as vLLM", "{:.2f}"),
    "metadata": ("metadata, µs", "{:,.0f}", 1e6),
    "error": ("largest error", "{:.1e}"),
}


def _section(measured: Mapping[str, Any]) -> Iterator[str]:
    shape = measured["shape"]
    window = "" if shape["window"] is None else f", window of {shape['window']:,} tokens"
    ceiling = spread(measured["ceiling"], "{:,.1f}", scale=1e-9)
    what = "GB/s read" if shape["kind"] == "decode" else "GFLOP/s in a matrix product"
    yield (
        f"{_requests(shape['requests'])}; {shape['num_heads']} query heads, {shape['num_kv_heads']} key and value "
        f"heads of {shape['head_size']}; {shape['dtype']}, pages of {shape['block_size']}{window}. "
        f"Ceiling: {ceiling} {what}."
    )
    fastest_first = sorted(measured["systems"].items(), key=lambda item: statistics.median(item[1]["seconds"]))
    rows = {name: {**row, "metadata": statistics.median(row["metadata_seconds"])} for name, row in fastest_first}
    yield figures(rows, COLUMNS)
    yield from (f"Not measured: {system} ({reason})." for system, reason in measured["refused"].items())


def _requests(requests: list[list[int]]) -> str:
    def some(count: int, what: str) -> str:
        return f"{count:,} {what}{'' if count == 1 else 's'}"

    parts = Counter(map(tuple, requests)).items()
    return ", ".join(
        f"{some(count, 'request')} of {some(new, 'new token')} after {computed:,}" for (computed, new), count in parts
    )


@benchmark("cpu_attention", write_report, cases="shapes")
@options.repeats(7, flag="--rounds")
@options.threads(os.cpu_count() or 1)
@options.choose("--shape", "shapes", SHAPES)
@click.option(
    "--system",
    "systems",
    multiple=True,
    help="A backend's registered name, or vllm. The default is every backend that runs here, and vllm.",
)
@options.peer
def main(rounds: int, threads: int, shapes: Sequence[Shape], systems: Sequence[str], peer: Path) -> dict[str, Any]:
    """Measure steps of one layer's attention, all systems by turns; write one JSON file and one page."""
    file = os.memfd_create("pool")
    os.truncate(file, max(map(pool_bytes, shapes)))
    modules = {
        name: ("benchmarks.attention.cpu_systems", name, str(threads), str(file))
        for name in find_systems(systems, shapes, peer)
    }
    with start_engines(modules, peer, threads=threads, files=[file]) as engines:
        results = measure_each(shapes, rounds, lambda shape, advance: measure(shape, engines, file, rounds, advance))
        versions = {name: engine.versions for name, engine in engines.items()}
    return {"repeats": rounds, "versions": versions, "shapes": results}


if __name__ == "__main__":
    main()
