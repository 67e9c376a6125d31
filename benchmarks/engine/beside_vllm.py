"""Measure kvframe's engine beside vLLM's and transformers on the same batches. See benchmarks/README.md."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from benchmarks.engine.serving import (
    COMPILED,
    KVFRAME,
    PACKED,
    TRANSFORMERS,
    VLLM,
    Engines,
    load,
    serve_by_turns,
    setting_of,
    start_servers,
)
from benchmarks.engine.stepping import Prompts
from benchmarks.engine.workloads import Workload
from benchmarks.harness import models, options
from benchmarks.harness.pages import Column, case_page, figures, named_versions
from benchmarks.harness.record import benchmark, in_columns, measure_each, ratios

WARM_PROMPTS, WARM_TOKENS = 4, 8
"""Prompts, and new tokens of each, of the round that warms up."""
KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
"""Let the C library keep freed memory in all systems, as docs/serving.md advises on a CPU."""


@attrs.frozen(kw_only=True)
class Batch(Workload):
    """A batch in one dtype.

    Attributes:
        dtype: The dtype of weights, keys and values. In float32 the tokens of all systems must be equal.
        systems: The systems that serve the batch.
    """

    dtype: str = "float32"
    systems: Sequence[str] = (KVFRAME, KVFRAME + PACKED, VLLM, TRANSFORMERS)


SYSTEMS = (KVFRAME, KVFRAME + PACKED, KVFRAME + COMPILED + PACKED, VLLM, VLLM + COMPILED, TRANSFORMERS)
LLAMA: dict[str, Any] = {"model": "bench-llama-100m", "memory": "1GiB", "num_prompts": 32, "shortest": 512}
SMALL: dict[str, Any] = {"memory": "256MiB", "num_prompts": 64, "shortest": 64, "num_new_tokens": 64}
WORKLOADS = (
    Batch(name="float32", **LLAMA, num_new_tokens=64, systems=[name for name in SYSTEMS if name != VLLM + COMPILED]),
    Batch(name="bfloat16", **LLAMA, num_new_tokens=64, dtype="bfloat16", systems=SYSTEMS),
    Batch(name="small-llama", model="bench-llama-small", **SMALL, systems=(KVFRAME, VLLM)),
    Batch(name="small-gemma3", model="bench-gemma3-small", **SMALL, systems=(KVFRAME, VLLM)),
    Batch(name="tiny", model="bench-llama-tiny", memory="8MiB", num_prompts=3, shortest=20, num_new_tokens=6),
)


def measure(batch: Batch, engines: Engines, repeats: int, advance: Callable[[int], object]) -> dict[str, Any]:
    """Let the systems of a batch take turns on it."""
    engines = {name: engines[name] for name in batch.systems if name in engines}
    setting, config = setting_of(batch, dtype=batch.dtype)
    load(engines, setting)

    def draw(repeat: int) -> tuple[Prompts, int]:
        prompts = batch.prompts(repeat, config["vocab_size"])
        return (prompts[:WARM_PROMPTS], WARM_TOKENS) if repeat < 0 else (prompts, batch.num_new_tokens)

    served = serve_by_turns(batch.name, engines, repeats, draw, advance, are_equal=batch.dtype == "float32")
    systems = {name: in_columns(_figures(batch, result) for result in rounds) for name, rounds in served.items()}
    if VLLM in systems:
        for columns in systems.values():
            columns["times_as_fast_as_vllm"] = ratios(systems[VLLM]["seconds"], columns["seconds"])
            if "host_ms" in columns:
                columns["host_beside_vllm"] = ratios(columns["host_ms"], systems[VLLM]["host_ms"])
    return {"batch": attrs.asdict(batch), "systems": systems}


def _figures(batch: Batch, served: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of one turn."""
    row = {
        "seconds": served["seconds"],
        "cpu_seconds": served["cpu_seconds"],
        "generated_per_second": batch.num_prompts * batch.num_new_tokens / served["seconds"],
        "prompts_per_second": batch.num_prompts * batch.shortest / served["first_seconds"],
    }
    if "steps" in served:
        row["prompts_attention"] = served["first_attention_seconds"] / served["first_seconds"]
        row |= {f"{part}_ms": 1e3 * statistics.median(times) for part, times in served["steps"].items()}
    return {**{name: value for name, value in row.items() if value}, "equal_prompts": served["equal_prompts"]}


COLUMNS: dict[str, Column] = {
    "generated_per_second": ("generated tokens/s", "{:,.0f}"),
    "times_as_fast_as_vllm": ("times as fast as vLLM", "{:.2f}"),
    "prompts_per_second": ("prompt tokens/s", "{:,.0f}"),
    "prompts_attention": ("of their time in attention", "{:.0%}"),
    "cpu_seconds": ("processor time, s", "{:,.1f}"),
    "step_ms": ("a decode step, ms", "{:,.2f}"),
    "attention_ms": ("of it in attention, ms", "{:,.2f}"),
    "host_ms": ("not in the model, ms", "{:,.2f}"),
    "host_beside_vllm": ("as a share of vLLM's", "{:.2f}"),
    "equal_prompts": ("prompts with kvframe's tokens", "{:.2f}"),
}


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    note = (
        "Greedy; in float32 the tokens of all systems are equal in every repeat.\n\n"
        f"Systems: {named_versions(record['versions'])}."
    )
    return case_page("Engines: kvframe, vLLM and transformers", record, "workloads", _section, note)


def _section(measured: Mapping[str, Any]) -> Iterator[str]:
    batch, systems = measured["batch"], measured["systems"]
    yield (
        f"Model `{batch['model']}` in {batch['dtype']}; {batch['num_prompts']} prompts of {batch['shortest']} "
        f"tokens, {batch['num_new_tokens']} new tokens each."
    )
    yield figures(systems, COLUMNS)
    if VLLM not in systems:
        return
    ours, theirs = ({key: statistics.median(turns) for key, turns in systems[name].items()} for name in (KVFRAME, VLLM))
    step, attention, host = (ours[key] - theirs[key] for key in ("step_ms", "attention_ms", "host_ms"))
    yield (
        f"kvframe is {ours['times_as_fast_as_vllm']:.2f} times as fast as vLLM, and the host's share is "
        f"{ours['host_beside_vllm']:.2f} of vLLM's; the aims are 1, and 0.3 at 64 requests. A decode step of kvframe "
        f"differs by {step:+.2f} ms from vLLM's: {attention:+.2f} ms in attention, {host:+.2f} ms outside of the "
        f"model, {step - attention - host:+.2f} ms in the rest of the model: linear layers, norms and activations."
    )


@benchmark("beside_vllm", write_report, cases="workloads")
@options.repeats(7)
@options.threads(os.cpu_count() or 1)
@options.choose("--workload", "workloads", WORKLOADS)
@options.peer
def main(repeats: int, threads: int, workloads: Sequence[Batch], peer: Path) -> dict[str, Any]:
    """Measure whole engines on batches, all systems by turns; write one JSON file and one page."""
    models.silence_transformers()
    systems = [name for batch in workloads for name in batch.systems]
    with start_servers(systems, threads, peer, KEEPS_MEMORY) as engines:
        results = measure_each(workloads, repeats + 1, lambda batch, advance: measure(batch, engines, repeats, advance))
        versions = {name: engine.versions for name, engine in engines.items() if "," not in name}
    return {"repeats": repeats, "versions": versions, "workloads": results}


if __name__ == "__main__":
    main()
