"""Measure kvframe's engine beside transformers on the same batches. See benchmarks/README.md."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from benchmarks.engine.serving import (
    CONTINUOUS,
    KVFRAME,
    Engines,
    load,
    serve,
    serve_by_turns,
    setting_of,
    start_servers,
)
from benchmarks.engine.workloads import Workload
from benchmarks.harness import options
from benchmarks.harness.pages import Column, case_page, figures
from benchmarks.harness.record import benchmark, measure_each, ratios

GENERATE = "transformers generate()"
DEMO: dict[str, Any] = {"model": "demo", "memory": "64MiB", "num_prompts": 32, "num_new_tokens": 64}
LLAMA: dict[str, Any] = {"model": "bench-llama-32m", "memory": "256MiB", "num_prompts": 16, "num_new_tokens": 32}
TINY: dict[str, Any] = {"model": "bench-llama-tiny", "memory": "8MiB", "num_prompts": 4, "num_new_tokens": 8}
WORKLOADS = (
    Workload(name="hybrid-mixed", **DEMO, shortest=16, longest=200),
    Workload(name="hybrid-shared-prefix", **DEMO, shortest=8, longest=40, prefix=256),
    Workload(name="llama-mixed", **LLAMA, shortest=32, longest=256),
    Workload(name="llama-shared-prefix", **LLAMA, shortest=8, longest=40, prefix=256),
    Workload(name="tiny", **TINY, shortest=4, longest=40, prefix=32),
)


def measure(workload: Workload, engines: Engines, repeats: int, advance: Callable[[int], object]) -> dict[str, Any]:
    """Let all systems take turns on the same batches, and time one request's first token if there is a prefix."""
    longest = workload.prefix + workload.longest + workload.num_new_tokens
    setting, config = setting_of(workload, max_model_len=longest, prefix_caching=workload.prefix > 0)
    batches = {repeat: workload.prompts(repeat, config["vocab_size"]) for repeat in range(-1, repeats)}
    load(engines, setting)
    served = serve_by_turns(
        workload.name, engines, repeats, lambda repeat: (batches[repeat], workload.num_new_tokens), advance
    )
    num_tokens = workload.num_prompts * workload.num_new_tokens
    speeds = {name: [num_tokens / each["seconds"] for each in rounds] for name, rounds in served.items()}
    found = {
        "batch": attrs.asdict(workload),
        "model": Path(setting.path).name,
        "tokens_per_second": speeds,
        "cache_bytes": {name: rounds[-1]["cache_bytes"] for name, rounds in served.items()},
        "tokens_equal": True,
        "times_as_fast": {
            name: statistics.median(ratios(speeds[KVFRAME], each)) for name, each in speeds.items() if name != KVFRAME
        },
        "dense_bytes": dense_bytes(workload, config, max(len(each) for batch in batches.values() for each in batch)),
    }
    if workload.prefix:
        load(engines, setting)
        found["first_token_seconds"] = measure_first_token(workload.name, engines, batches)
    return found


def dense_bytes(workload: Workload, config: Mapping[str, Any], longest: int) -> int:
    """Return the bytes of the largest batch if every layer keeps every token in float32, in one padded tensor."""
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    of_token = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_size * 4
    return int(workload.num_prompts * (longest + workload.num_new_tokens) * of_token)


def measure_first_token(
    name: str, engines: Engines, batches: Mapping[int, Sequence[Sequence[int]]]
) -> dict[str, list[float]]:
    """Time the first token of a prompt in transformers and in kvframe, and of a second prompt with its prefix."""
    seconds: dict[str, list[float]] = {system: [] for system in (GENERATE, KVFRAME, "kvframe, prefix served before")}
    for repeat, (first, second, *_) in batches.items():
        turns = ((GENERATE, first), (KVFRAME, first), (KVFRAME, second), (GENERATE, second))
        served = [serve(engines[system], [prompt], 1) for system, prompt in turns]
        theirs, ours, ours_again, theirs_again = (each["tokens"] for each in served)
        if (theirs, theirs_again) != (ours, ours_again):
            sys.exit(f"{name}: the first token differs")
        if repeat >= 0:
            for times, each in zip(seconds.values(), served, strict=False):
                times.append(each["seconds"])
    return seconds


COLUMNS: dict[str, Column] = {
    "speed": ("generated tokens/s", "{:,.0f}"),
    "ratio": ("kvframe is … times as fast", "{:.2f}"),
    "held": ("keys and values held at most", "{:.1f} MB", 1e-6),
}


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    note = "float32, greedy; the tokens of all systems are equal in every repeat."
    return case_page("Generating: kvframe and transformers", record, "workloads", _section, note)


def _section(measured: Mapping[str, Any]) -> Iterator[str]:
    batch = measured["batch"]
    prefix = f" after a common prefix of {batch['prefix']}" if batch["prefix"] else ", nothing in common"
    yield (
        f"Model `{measured['model']}`; {batch['num_prompts']} prompts of {batch['shortest']} to {batch['longest']} "
        f"tokens{prefix}; {batch['num_new_tokens']} new tokens each."
    )
    rows = {
        name: {
            "speed": speeds,
            "ratio": measured["times_as_fast"].get(name),
            "held": measured["cache_bytes"][name] or "not reported",
        }
        for name, speeds in measured["tokens_per_second"].items()
    }
    yield figures({**rows, "every layer full, padded, contiguous": {"held": measured["dense_bytes"]}}, COLUMNS)
    times = {system: {"seconds": each} for system, each in measured.get("first_token_seconds", {}).items()}
    yield figures(times, {"seconds": ("time to its first token, ms", "{:,.1f}", 1000)}, "one request alone")


@benchmark("generate", write_report, cases="workloads")
@options.repeats(7)
@options.threads(1)
@options.choose("--workload", "workloads", WORKLOADS)
def main(repeats: int, threads: int, workloads: Sequence[Workload]) -> dict[str, Any]:
    """Measure the workloads; write one JSON file and one page."""
    with start_servers((KVFRAME, GENERATE, CONTINUOUS), threads) as engines:
        found = measure_each(workloads, repeats + 1, lambda each, advance: measure(each, engines, repeats, advance))
    return {"repeats": repeats, "workloads": found}


if __name__ == "__main__":
    main()
