"""Measure kvframe against transformers on the same batches, side by side. The README of benchmarks says how."""

from __future__ import annotations

import logging
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from transformers import AutoConfig

from benchmarks.engine.peers import ContinuousBatching, KVFrame, PaddedGenerate, System
from benchmarks.engine.workloads import Workload
from benchmarks.harness import models, options
from benchmarks.harness.pages import heading, medians, page, spread, table
from benchmarks.harness.process import timed
from benchmarks.harness.record import benchmark, progress, ratios, rounds

PAGE_SIZE = 16


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


def measure_throughput(workload: Workload, path: Path, repeats: int, advance: Callable[[int], None]) -> dict[str, Any]:
    """Run all systems on the same batches, the order turned by one at each repeat.

    Raises:
        SystemExit: Two systems generated different tokens.
    """
    config = AutoConfig.from_pretrained(path)
    most = workload.num_prompts * (workload.prefix + workload.longest + workload.num_new_tokens + PAGE_SIZE)
    sharing = workload.prefix > 0
    systems: list[System] = [
        KVFrame(path, memory=workload.memory, prefix_caching=sharing),
        PaddedGenerate(path),
        ContinuousBatching(path, num_tokens=most, page_size=PAGE_SIZE, prefix_caching=sharing),
    ]
    seconds: dict[str, list[float]] = {system.name: [] for system in systems}
    dense_bytes = 0
    try:
        for repeat, order in rounds(systems, repeats, warm_up=True):
            prompts = workload.prompts(repeat, config.vocab_size)
            outputs = {}
            for system in order:
                took, outputs[system.name] = timed(lambda: system.generate(prompts, workload.num_new_tokens))  # noqa: B023
                if repeat >= 0:
                    seconds[system.name].append(took)
            _check_equal(workload, outputs)
            longest = max(map(len, prompts)) + workload.num_new_tokens
            dense_bytes = max(dense_bytes, workload.num_prompts * longest * _bytes_per_token(config))
            advance(1)
        cache_bytes = {system.name: system.cache_bytes() for system in systems}
    finally:
        for system in systems:
            system.close()
    num_tokens = workload.num_prompts * workload.num_new_tokens
    return {
        "tokens_per_second": {name: [num_tokens / took for took in times] for name, times in seconds.items()},
        "cache_bytes": cache_bytes,
        "dense_bytes": dense_bytes,
        "tokens_equal": True,
    }


def _check_equal(workload: Workload, outputs: dict[str, list[list[int]]]) -> None:
    expected = outputs[PaddedGenerate.name]
    for name, tokens in outputs.items():
        different = [index for index, (mine, theirs) in enumerate(zip(tokens, expected, strict=True)) if mine != theirs]
        if different:
            sys.exit(f"{workload.name}: {name} differs from {PaddedGenerate.name} in prompts {different}")


def _bytes_per_token(config: Any) -> int:
    """Return the bytes of one token's float32 keys and values in every layer."""
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_hidden_layers * 2 * config.num_key_value_heads * head_size * 4)


def measure_first_token(workload: Workload, path: Path, repeats: int) -> dict[str, list[float]]:
    """Time one prompt's first token: in transformers, in kvframe, and there again after a prefix served before."""
    vocab_size = AutoConfig.from_pretrained(path).vocab_size
    ours, theirs = KVFrame(path, memory=workload.memory, prefix_caching=True), PaddedGenerate(path)
    names = (theirs.name, ours.name, "kvframe, prefix served before")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    try:
        for repeat in range(-1, repeats):
            first, second = workload.prompts(repeat, vocab_size)[:2]
            took = (
                timed(lambda: theirs.generate([first], 1)),  # noqa: B023
                timed(lambda: ours.generate([first], 1)),  # noqa: B023
                timed(lambda: ours.generate([second], 1)),  # noqa: B023
            )
            if took[0][1] != took[1][1] or took[2][1] != theirs.generate([second], 1):
                sys.exit(f"{workload.name}: the first token differs")
            if repeat >= 0:
                for times, (each, _) in zip(seconds.values(), took, strict=True):
                    times.append(each)
    finally:
        ours.close()
    return seconds


def summarise(speeds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return, for each peer, the median over the repeats of how many times as fast kvframe was on the same batch."""
    own = speeds[KVFrame.name]
    return {name: statistics.median(ratios(own, each)) for name, each in speeds.items() if name != KVFrame.name}


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page as Markdown."""
    note = "float32, greedy; the tokens of all systems are equal in every repeat."
    parts = [heading("Generating: kvframe and transformers", record, medians(record), note)]
    for name, measured in record["workloads"].items():
        parts += [f"## {name}", _batch(measured), _speeds(measured)]
        times = measured.get("first_token_seconds", {})
        rows = [(system, spread(each, "{:,.1f}", scale=1000)) for system, each in times.items()]
        parts.append(table(("one request alone", "time to its first token, ms"), rows))
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
    models.silence_transformers()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # it asks for packages it can do without
    found: dict[str, Any] = {}
    with progress("measuring", len(workloads) * (repeats + 1)) as advance:
        for workload in workloads:
            path = models.path_of(workload.model)
            measured = measure_throughput(workload, path, repeats, advance)
            measured["times_as_fast"] = summarise(measured["tokens_per_second"])
            if workload.prefix:
                measured["first_token_seconds"] = measure_first_token(workload, path, repeats)
            found[workload.name] = {"batch": attrs.asdict(workload), "model": path.name, **measured}
    return {"repeats": repeats, "workloads": found}


if __name__ == "__main__":
    main()
