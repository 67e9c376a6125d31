"""Measure kvframe's engine beside transformers on the same batches. See benchmarks/README.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from benchmarks.engine.serving import CONTINUOUS, KVFRAME, Engines, load, serve_by_turns, setting_of, start_servers
from benchmarks.engine.stepping import Prompts
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
    """Let all systems take turns on the same batches."""
    longest = workload.prefix + workload.longest + workload.num_new_tokens
    setting, config = setting_of(workload, max_model_len=longest, prefix_caching=workload.prefix > 0)
    load(engines, setting)

    def draw(repeat: int) -> tuple[Prompts, int]:
        return workload.prompts(repeat, config["vocab_size"]), workload.num_new_tokens

    served = serve_by_turns(workload.name, engines, repeats, draw, advance)
    num_tokens = workload.num_prompts * workload.num_new_tokens
    speeds = {name: [num_tokens / result["seconds"] for result in rounds] for name, rounds in served.items()}
    return {
        "batch": attrs.asdict(workload),
        "model": Path(setting.path).name,
        "tokens_per_second": speeds,
        "cache_bytes": {name: rounds[-1]["cache_bytes"] for name, rounds in served.items()},
        "times_as_fast": {
            name: statistics.median(ratios(speeds[KVFRAME], speed)) for name, speed in speeds.items() if name != KVFRAME
        },
    }


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
    yield figures(rows, COLUMNS)


@benchmark("generate", write_report, cases="workloads")
@options.repeats(7)
@options.threads(1)
@options.choose("--workload", "workloads", WORKLOADS)
def main(repeats: int, threads: int, workloads: Sequence[Workload]) -> dict[str, Any]:
    """Measure the workloads; write one JSON file and one page."""
    with start_servers((KVFRAME, GENERATE, CONTINUOUS), threads) as engines:
        results = measure_each(workloads, repeats + 1, lambda batch, advance: measure(batch, engines, repeats, advance))
    return {"repeats": repeats, "workloads": results}


if __name__ == "__main__":
    main()
