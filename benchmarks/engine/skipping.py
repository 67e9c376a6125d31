"""Measure prefill skipping: the same long prompts with it on and off. See benchmarks/README.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.engine.serving import KVFRAME, SKIPPING, Engines, load, serve_by_turns, setting_of, start_servers
from benchmarks.engine.stepping import MAX_NUM_BATCHED_TOKENS
from benchmarks.engine.workloads import Workload
from benchmarks.harness import options
from benchmarks.harness.pages import Column, case_page, figures
from benchmarks.harness.record import benchmark, measure_each, ratios

SYSTEMS = {"off": KVFRAME, "on": KVFRAME + SKIPPING}
CLOCKS = {"time": "seconds", "processor time": "cpu_seconds"}
"""Wall-clock time, and the processor time of the engine's process, which leaves out the work of other processes."""

GEMMA = "10 layers, of which the last 4 read keys and values of earlier ones"
YOCO = "12 layers, of which the last 6 read keys and values of an earlier one"
MODELS = {"bench-gemma3n": GEMMA, "bench-yoco": YOCO, "bench-gemma3n-tiny": "", "bench-yoco-tiny": ""}
WORKLOADS = (
    Workload(name="gemma3n-8192", model="bench-gemma3n", memory="96MiB", shortest=8192),
    Workload(name="yoco-8192", model="bench-yoco", memory="96MiB", shortest=8192),
    Workload(name="tiny-gemma3n", model="bench-gemma3n-tiny", memory="8MiB", shortest=200),
    Workload(name="tiny-yoco", model="bench-yoco-tiny", memory="8MiB", shortest=200),
)


def measure(workload: Workload, engines: Engines, repeats: int, advance: Callable[[int], object]) -> dict[str, Any]:
    """Let both systems prefill the same prompts by turns; their first tokens must be equal."""
    setting, config = setting_of(workload)
    load(engines, setting)
    served = serve_by_turns(
        workload.name, engines, repeats, lambda repeat: (workload.prompts(repeat, config["vocab_size"]), 1), advance
    )
    return {
        "model": workload.model,
        "num_prompt_tokens": workload.shortest,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "systems": {
            way: {key: [row[key] for row in served[name]] for key in CLOCKS.values()} for way, name in SYSTEMS.items()
        },
    }


SECONDS: dict[str, Column] = {
    "off": ("off, ms", "{:,.1f}", 1000),
    "on": ("on, ms", "{:,.1f}", 1000),
    "ratio": ("on is … of off", "{:.3f}"),
}


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    note = "float32, the first token is equal in every repeat."
    return case_page("Prefill skipping: on and off", record, "workloads", _section, note)


def _section(measured: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"Model `{measured['model']}`: {MODELS[measured['model']]}. Prompts of {measured['num_prompt_tokens']:,} "
        f"tokens in steps of at most {measured['max_num_batched_tokens']:,}."
    )
    rows: dict[str, dict[str, Any]] = {}
    for clock, key in CLOCKS.items():
        off, on = (measured["systems"][way][key] for way in ("off", "on"))
        rows[f"whole prefill, {clock}"] = {"off": off, "on": on, "ratio": statistics.median(ratios(on, off))}
    yield figures(rows, SECONDS)


@benchmark("skipping", write_report, cases="workloads")
@options.repeats(11)
@options.threads(1)
@options.choose("--workload", "workloads", WORKLOADS)
def main(repeats: int, threads: int, workloads: Sequence[Workload]) -> dict[str, Any]:
    """Measure the workloads; write one JSON file and one page."""
    with start_servers(SYSTEMS.values(), threads) as engines:
        results = measure_each(workloads, repeats + 1, lambda batch, advance: measure(batch, engines, repeats, advance))
    return {"repeats": repeats, "workloads": results}


if __name__ == "__main__":
    main()
