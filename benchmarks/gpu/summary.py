"""Print one table of the aims on a GPU and of what the records in a folder say; ``benchmarks/gpu.sh`` ends with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import click

from benchmarks.gpu.tested import OUTCOMES, read_record, totals
from benchmarks.harness.machine import RESULTS
from benchmarks.harness.pages import table

Record = Mapping[str, Any]
NOT_YET = "not measured yet"


@attrs.frozen
class Aim:
    """A figure, how it is computed from a record, and the bound that it should reach.

    Attributes:
        what: What is measured.
        compute: Returns the figure; raises ``KeyError`` or ``TypeError`` if the record lacks it.
        bound: The figure to reach.
        is_limit: Whether the figure should be at most the bound, and not at least.
    """

    what: str
    compute: Callable[[Record], float]
    bound: float
    is_limit: bool = False

    def row(self, record: Record) -> tuple[str, str, str, str]:
        """Return the figure, the aim and whether it is reached."""
        aim = f"{'≤' if self.is_limit else '≥'} {self.bound:g}"
        try:
            figure = self.compute(record)
        except (KeyError, TypeError, ZeroDivisionError):
            return self.what, NOT_YET, aim, ""
        is_reached = figure <= self.bound if self.is_limit else figure >= self.bound
        return self.what, f"{figure:.3f}", aim, "yes" if is_reached else "no"


def _step(record: Record) -> Mapping[str, float]:
    """Return the fastest measured step."""
    steps = [step for step in record["engine"]["graphs"].values() if step["busy_seconds"]]
    return min(steps, key=lambda step: step["seconds"]) if steps else {}


def _seconds(record: Record, case: str, backend: str) -> float:
    seconds: float = record["cases"][case]["measured"][backend]["seconds"]
    return seconds


def _of_floor(case: str, backend: str) -> Callable[[Record], float]:
    return lambda record: record["cases"][case]["floor_seconds"] / _seconds(record, case, backend)


def _beside(case: str, backend: str, other: str) -> Callable[[Record], float]:
    return lambda record: _seconds(record, case, other) / _seconds(record, case, backend)


LAYERS = (
    Aim(
        "share of a step of 128 decodes in which the device waits",
        lambda record: 1 - _step(record)["busy_seconds"] / _step(record)["seconds"],
        0.03,
        is_limit=True,
    ),
    Aim(
        "that step over the device's work",
        lambda record: _step(record)["seconds"] / _step(record)["busy_seconds"],
        1.05,
        is_limit=True,
    ),
    Aim(
        "prompt of 8k, triton beside FlashAttention-3", _beside("prefill: prompt of 8k", "triton", "flash_attn_3"), 0.85
    ),
    Aim(
        "latents of 64 x 8k, triton_mla beside FlashInfer",
        _beside("MLA decode: 64 x 8k, 128 heads", "triton_mla", "flashinfer_mla"),
        0.7,
    ),
    Aim(
        "eight bits, 128 x 8k, of the floor's rate",
        _of_floor("decode, all: 128 x 8k, 32 of 8 heads, fp8", "triton"),
        0.8,
    ),
)


def _engine_aims(name: str) -> tuple[Aim, Aim]:
    return (
        Aim(f"{name}, beside transformers", lambda record: record["workloads"][name]["times_as_fast"], 1.5),
        Aim(
            f"{name}, decodes, of the floor's rate",
            lambda record: min(record["workloads"][name]["systems"]["kvframe"]["of_decode_floor"]),
            0.7,
        ),
    )


ENGINES = tuple(aim for name in ("llama-64", "windows-64", "states-64", "llama-256") for aim in _engine_aims(name))


def _read(path: Path) -> Record:
    record: Record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return record


def write_summary(results: Path) -> str:
    """Return the table of the records in a folder, and the outcomes of its tests."""
    layers, engines = _read(results / "gpu.json"), _read(results / "gpu_engines.json")
    rows = [*(aim.row(layers) for aim in LAYERS), *(aim.row(engines) for aim in ENGINES)]
    counts = totals(read_record(results / "gpu_tests.json"))
    outcomes = ", ".join(f"{counts[outcome]:,} {outcome}" for outcome in OUTCOMES)
    return f"{table(('', 'measured', 'aim', 'reached'), rows)}\n\nCases of tests on the device: {outcomes}."


@click.command(help=__doc__)
@click.option("--results", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
def main(results: Path) -> None:
    """Print the table."""
    click.echo(write_summary(results))


if __name__ == "__main__":
    main()
