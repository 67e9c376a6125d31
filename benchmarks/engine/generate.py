"""Measure kvframe against transformers on the same batches, side by side. The README of benchmarks says how."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from benchmarks.engine.serving import (
    CONTINUOUS,
    KVFRAME,
    Asked,
    Engines,
    config_of,
    load,
    serve_by_turns,
    start_servers,
)
from benchmarks.engine.stepping import Setting
from benchmarks.engine.workloads import Workload
from benchmarks.harness import models, options
from benchmarks.harness.pages import figures, heading, medians, page, spread, table
from benchmarks.harness.record import benchmark, progress, ratios
from kvframe.loading.checks import parse_bytes

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


def measure_throughput(
    workload: Workload, engines: Engines, vocab_size: int, repeats: int, advance: Callable[[int], object]
) -> dict[str, Any]:
    """Let all systems take turns on the same batches."""

    def ask(repeat: int) -> Asked:
        return {"prompts": workload.prompts(repeat, vocab_size), "num_new_tokens": workload.num_new_tokens}

    served = serve_by_turns(workload.name, engines, repeats, ask, advance)
    num_tokens = workload.num_prompts * workload.num_new_tokens
    speeds = {name: [num_tokens / each["seconds"] for each in rounds] for name, rounds in served.items()}
    return {
        "tokens_per_second": speeds,
        "cache_bytes": {name: rounds[-1]["cache_bytes"] for name, rounds in served.items()},
        "tokens_equal": True,
        "times_as_fast": summarise(speeds),
    }


def dense_bytes(workload: Workload, config: Mapping[str, Any], vocab_size: int, repeats: int) -> int:
    """Return the bytes of the largest batch if every layer keeps every token in float32, in one padded tensor."""
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    of_token = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_size * 4
    longest = max(len(prompt) for repeat in range(-1, repeats) for prompt in workload.prompts(repeat, vocab_size))
    return int(workload.num_prompts * (longest + workload.num_new_tokens) * of_token)


def measure_first_token(workload: Workload, engines: Engines, vocab_size: int, repeats: int) -> dict[str, list[float]]:
    """Time one prompt's first token: in transformers, in kvframe, and there again after a prefix served before."""
    seconds: dict[str, list[float]] = {name: [] for name in (GENERATE, KVFRAME, "kvframe, prefix served before")}
    for repeat in range(-1, repeats):
        first, second = ({"prompts": [each], "num_new_tokens": 1} for each in workload.prompts(repeat, vocab_size)[:2])
        served = [engines[name].ask(each) for name, each in ((GENERATE, first), (KVFRAME, first), (KVFRAME, second))]
        expected = [served[0]["tokens"]] * 2 + [engines[GENERATE].ask(second)["tokens"]]
        if [each["tokens"] for each in served] != expected:
            sys.exit(f"{workload.name}: the first token differs")
        if repeat >= 0:
            for times, each in zip(seconds.values(), served, strict=True):
                times.append(each["seconds"])
    return seconds


def summarise(speeds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return, for each peer, the median over the repeats of how many times as fast kvframe was on the same batch."""
    own = speeds[KVFRAME]
    return {name: statistics.median(ratios(own, each)) for name, each in speeds.items() if name != KVFRAME}


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page as Markdown."""
    note = "float32, greedy; the tokens of all systems are equal in every repeat."
    parts = [heading("Generating: kvframe and transformers", record, medians(record), note)]
    for name, measured in record["workloads"].items():
        parts += [f"## {name}", _batch(measured), _speeds(measured)]
        times = {system: {"seconds": each} for system, each in measured.get("first_token_seconds", {}).items()}
        parts.append(figures(times, {"seconds": ("time to its first token, ms", "{:,.1f}", 1000)}, "one request alone"))
    return page(*parts)


def _batch(measured: Mapping[str, Any]) -> str:
    batch = measured["batch"]
    prefix = f" after a common prefix of {batch['prefix']}" if batch["prefix"] else ", nothing in common"
    return (
        f"Model `{measured['model']}`; {batch['num_prompts']} prompts of {batch['shortest']} to {batch['longest']} "
        f"tokens{prefix}; {batch['num_new_tokens']} new tokens each."
    )


def _speeds(measured: Mapping[str, Any]) -> str:
    rows = []
    for name, speeds in measured["tokens_per_second"].items():
        ratio = measured["times_as_fast"].get(name)
        num_bytes = measured["cache_bytes"][name]
        held = "not reported" if num_bytes is None else f"{num_bytes / 1e6:.1f} MB"
        rows.append((name, spread(speeds, "{:,.0f}"), "" if ratio is None else f"{ratio:.2f}", held))
    rows.append(("every layer full, padded, contiguous", "", "", f"{measured['dense_bytes'] / 1e6:.1f} MB"))
    return table(("", "generated tokens/s", "kvframe is … times as fast", "keys and values held at most"), rows)


@benchmark("generate", write_report)
@options.repeats(7)
@options.threads(1)
@options.choose("--workload", "workloads", WORKLOADS)
def main(repeats: int, threads: int, workloads: Sequence[Workload]) -> dict[str, Any]:
    """Measure the workloads and write one JSON file and one page of results."""
    systems, found = (KVFRAME, GENERATE, CONTINUOUS), dict[str, Any]()
    with (
        start_servers(systems, threads) as engines,
        progress("measuring", len(workloads) * (repeats + 1)) as advance,
    ):
        for workload in workloads:
            path = models.path_of(workload.model)
            config = config_of(path)
            vocab_size = config["vocab_size"]
            setting = Setting(
                path=str(path),
                memory=parse_bytes(workload.memory),
                max_num_seqs=workload.num_prompts,
                max_model_len=workload.prefix + workload.longest + workload.num_new_tokens,
                prefix_caching=workload.prefix > 0,
            )
            load(engines, setting)
            measured = measure_throughput(workload, engines, vocab_size, repeats, advance)
            measured["dense_bytes"] = dense_bytes(workload, config, vocab_size, repeats)
            if workload.prefix:
                load(engines, setting)
                measured["first_token_seconds"] = measure_first_token(workload, engines, vocab_size, repeats)
            found[workload.name] = {"batch": attrs.asdict(workload), "model": path.name, **measured}
    return {"repeats": repeats, "workloads": found}


if __name__ == "__main__":
    main()
