"""Measure kvframe's engine beside vLLM's and transformers on the same batches. The README of benchmarks says how."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from benchmarks.engine.stepping import Setting
from benchmarks.engine.workloads import Workload
from benchmarks.harness import models, options
from benchmarks.harness.pages import heading, medians, page, spread, table
from benchmarks.harness.process import EngineProcess, start_engines
from benchmarks.harness.record import benchmark, progress, ratios, rounds
from kvframe.loading.checks import parse_bytes

KVFRAME, VLLM, TRANSFORMERS = "kvframe", "vLLM", "transformers"
COMPILED, PACKED = ", compiled", ", packed"
WARM_PROMPTS, WARM_TOKENS = 4, 8
"""Of the round that is not counted: its prompts, and the new tokens of each."""
KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
"""Lets the C library keep freed memory, as docs/serving.md advises on a CPU; the same for all systems."""


@attrs.frozen(kw_only=True)
class Batch(Workload):
    """A batch in one dtype.

    Attributes:
        dtype: Of weights, keys and values. In float32 all tokens have to be equal.
        systems: Those that serve it.
    """

    dtype: str = "float32"
    systems: Sequence[str] = (KVFRAME, KVFRAME + PACKED, VLLM, TRANSFORMERS)


SYSTEMS = (KVFRAME, KVFRAME + PACKED, KVFRAME + COMPILED, VLLM, VLLM + COMPILED, TRANSFORMERS)
LLAMA: dict[str, Any] = {"model": "bench-llama-100m", "memory": "1GiB", "num_prompts": 32, "shortest": 512}
SMALL: dict[str, Any] = {"memory": "256MiB", "num_prompts": 64, "shortest": 64, "num_new_tokens": 64}
WORKLOADS = (
    Batch(name="float32", **LLAMA, num_new_tokens=64),
    Batch(name="bfloat16", **LLAMA, num_new_tokens=64, dtype="bfloat16", systems=SYSTEMS),
    Batch(name="small-llama", model="bench-llama-small", **SMALL, systems=(KVFRAME, VLLM)),
    Batch(name="small-gemma3", model="bench-gemma3-small", **SMALL, systems=(KVFRAME, VLLM)),
    Batch(name="tiny", model="bench-llama-tiny", memory="8MiB", num_prompts=3, shortest=20, num_new_tokens=6),
)


def load(batch: Batch, path: Path, engines: Mapping[str, EngineProcess]) -> list[EngineProcess]:
    """Return the engines that serve a batch, with its model loaded."""
    setting = Setting(
        path=str(path), dtype=batch.dtype, memory=parse_bytes(batch.memory), max_num_seqs=batch.num_prompts
    )
    found = [engines[name] for name in batch.systems if name in engines]
    for engine in found:
        ways = {"is_compiled": engine.name.endswith(COMPILED), "is_packed": engine.name.endswith(PACKED)}
        engine.ask({"setting": {**dataclasses.asdict(setting), **ways}})
    return found


def measure(
    batch: Batch, all_engines: Mapping[str, EngineProcess], repeats: int, advance: Callable[[int], None]
) -> dict[str, Any]:
    """Let the engines take turns on a batch, the order turned by one in each round.

    Raises:
        SystemExit: Two engines generated different tokens in float32.
    """
    path = models.path_of(batch.model)
    vocab_size = json.loads((path / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    engines = load(batch, path, all_engines)
    found: dict[str, dict[str, list[float]]] = {engine.name: {} for engine in engines}
    for repeat, order in rounds(engines, repeats, warm_up=True):
        prompts, tokens = batch.prompts(repeat, vocab_size), {}
        num_new_tokens = batch.num_new_tokens
        if repeat < 0:
            prompts, num_new_tokens = prompts[:WARM_PROMPTS], WARM_TOKENS
        for engine in order:
            served = engine.ask({"prompts": prompts, "num_new_tokens": num_new_tokens})
            tokens[engine.name] = served.pop("tokens")
            if repeat >= 0:
                for name, value in _figures(batch, served).items():
                    found[engine.name].setdefault(name, []).append(value)
        for name, theirs in tokens.items():
            equal = sum(map(list.__eq__, theirs, tokens[KVFRAME])) / len(prompts)
            if batch.dtype == "float32" and equal < 1:
                sys.exit(f"{batch.name}: {name} and {KVFRAME} generate the same for {equal:.0%} of the prompts")
            if repeat >= 0:
                found[name].setdefault("equal_prompts", []).append(equal)
        advance(1)
    for figures in found.values():
        if VLLM in found:
            figures["times_as_fast_as_vllm"] = ratios(found[VLLM]["seconds"], figures["seconds"])
            if "host_ms" in figures:
                figures["host_beside_vllm"] = ratios(figures["host_ms"], found[VLLM]["host_ms"])
    return {"batch": attrs.asdict(batch), "systems": found}


def _figures(batch: Batch, served: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of one turn."""
    found = {
        "seconds": served["seconds"],
        "cpu_seconds": served["cpu_seconds"],
        "generated_per_second": batch.num_prompts * batch.num_new_tokens / served["seconds"],
        "prompts_per_second": batch.num_prompts * batch.shortest / served["first_seconds"],
    }
    if "steps" in served:
        found["prompts_attention"] = served["first_attention_seconds"] / served["first_seconds"]
        found |= {f"{part}_ms": 1e3 * statistics.median(times) for part, times in served["steps"].items()}
    return {name: value for name, value in found.items() if value}


COLUMNS = {
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
"""The columns of a table: the figure, its head, and how a number is written."""


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    versions = "; ".join(
        f"{name} ({', '.join(map(' '.join, each.items()))})" for name, each in record["versions"].items()
    )
    note = "Greedy; in float32 the tokens of all systems are equal in every repeat."
    parts = [heading("Engines: kvframe, vLLM and transformers", record, medians(record), note), f"Systems: {versions}."]
    for name, measured in record["workloads"].items():
        batch = measured["batch"]
        words = (
            f"Model `{batch['model']}` in {batch['dtype']}; {batch['num_prompts']} prompts of {batch['shortest']} "
            f"tokens, {batch['num_new_tokens']} new tokens each."
        )
        rows = [
            (system, *(spread(figures.get(figure, ()), form) for figure, (_, form) in COLUMNS.items()))
            for system, figures in measured["systems"].items()
        ]
        parts += [f"## {name}", words, table(("", *(head for head, _ in COLUMNS.values())), rows), _rest(measured)]
    return page(*parts)


def _rest(measured: Mapping[str, Any]) -> str:
    """Return in words where a decode of kvframe, with its defaults, takes another time than vLLM's, by medians."""
    systems = measured["systems"]
    if VLLM not in systems:
        return ""
    ours, theirs = ({key: statistics.median(each) for key, each in systems[name].items()} for name in (KVFRAME, VLLM))
    step, attention, host = (ours[key] - theirs[key] for key in ("step_ms", "attention_ms", "host_ms"))
    return (
        f"kvframe is {ours['times_as_fast_as_vllm']:.2f} times as fast as vLLM, and the host's share is "
        f"{ours['host_beside_vllm']:.2f} of vLLM's; the aims are 1, and 0.3 at 64 requests. A decode step of kvframe "
        f"differs by {step:+.2f} ms from vLLM's: {attention:+.2f} ms in attention, {host:+.2f} ms outside of the "
        f"model, {step - attention - host:+.2f} ms in the rest of the model: linear layers, norms and activations."
    )


@benchmark(
    "beside_vllm",
    write_report,
    joined="workloads",
    epilog="On a machine with other work, `chrt -f 1 python -m benchmarks.engine.beside_vllm …` (as root) keeps that "
    "work from the processor while something is timed; without it, threads that wait for each other wait for it too.",
)
@options.repeats(7)
@options.threads(os.cpu_count() or 1)
@options.choose("--workload", "workloads", WORKLOADS)
@options.peer
def main(repeats: int, threads: int, workloads: Sequence[Batch], peer: Path) -> dict[str, Any]:
    """Measure whole engines on batches, all systems by turns, and write one JSON file and one page."""
    models.silence_transformers()
    names = dict.fromkeys(name for batch in workloads for name in batch.systems)
    arguments = {name: ("benchmarks.engine.worker", name.partition(",")[0].lower()) for name in names}
    with (
        start_engines(arguments, peer, threads=threads, variables=KEEPS_MEMORY) as engines,
        progress("measuring", len(workloads) * (repeats + 1)) as advance,
    ):
        found = {batch.name: measure(batch, engines, repeats, advance) for batch in workloads}
        versions = {name: engine.versions for name, engine in engines.items() if "," not in name}
    return {"repeats": repeats, "versions": versions, "workloads": found}


if __name__ == "__main__":
    main()
