"""Measure kvframe against transformers on the same batches, side by side, and record the results.

    python -m benchmarks.engine.generate [--repeats N] [--threads N] [--workload NAME ...] [--results FOLDER]

benchmarks/README.md says how, and what the figures mean.
"""

from __future__ import annotations

import logging
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from transformers import AutoConfig

from benchmarks.engine.peers import ContinuousBatching, KVFrame, PaddedGenerate, System
from benchmarks.harness import models, options
from benchmarks.harness.pages import heading, medians, spread, table
from benchmarks.harness.process import timed
from benchmarks.harness.record import benchmark, rounds
from kvframe.cli.render import progress

SEED = 11
PAGE_SIZE = 16


@attrs.frozen(kw_only=True)
class Workload:
    """A batch, and the model that serves it.

    Attributes:
        name: For ``--workload`` and the results.
        model: Makes the model's folder.
        memory: Of kvframe's cache.
        num_prompts: Requests in the batch.
        shortest: Tokens of the shortest prompt, without the prefix.
        longest: Tokens of the longest prompt, without the prefix.
        prefix: Tokens that all prompts of a batch begin with; prefix caching is on where there are any.
        num_new_tokens: Generated for each prompt, end tokens ignored.
    """

    name: str
    model: Callable[[], Path]
    memory: str
    num_prompts: int
    shortest: int
    longest: int
    prefix: int = 0
    num_new_tokens: int

    def prompts(self, repeat: int, vocab_size: int) -> list[list[int]]:
        """Return the batch of one repeat. No two repeats share a token sequence, so no cache is warm from the last."""
        source = random.Random(f"{SEED}-{self.name}-{repeat}")
        prefix = [source.randrange(3, vocab_size) for _ in range(self.prefix)]
        lengths = [source.randint(self.shortest, self.longest) for _ in range(self.num_prompts)]
        return [prefix + [source.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


WORKLOADS = (
    Workload(
        name="hybrid-mixed",
        model=models.demo,
        memory="64MiB",
        num_prompts=32,
        shortest=16,
        longest=200,
        num_new_tokens=64,
    ),
    Workload(
        name="hybrid-shared-prefix",
        model=models.demo,
        memory="64MiB",
        num_prompts=32,
        shortest=8,
        longest=40,
        prefix=256,
        num_new_tokens=64,
    ),
    Workload(
        name="llama-mixed",
        model=models.llama,
        memory="256MiB",
        num_prompts=16,
        shortest=32,
        longest=256,
        num_new_tokens=32,
    ),
    Workload(
        name="llama-shared-prefix",
        model=models.llama,
        memory="256MiB",
        num_prompts=16,
        shortest=8,
        longest=40,
        prefix=256,
        num_new_tokens=32,
    ),
    Workload(
        name="tiny",
        model=models.tiny,
        memory="8MiB",
        num_prompts=4,
        shortest=4,
        longest=40,
        prefix=32,
        num_new_tokens=8,
    ),
)
MEASURED = tuple(workload.name for workload in WORKLOADS if workload.name != "tiny")


def measure_throughput(workload: Workload, path: Path, repeats: int, advance: Callable[[int], None]) -> dict[str, Any]:
    """Run all systems on the same batches, the order turned by one at each repeat.

    Raises:
        SystemExit: Two systems generated different tokens.
    """
    vocab_size = AutoConfig.from_pretrained(path).vocab_size
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
            prompts = workload.prompts(repeat, vocab_size)
            outputs = {}
            for system in order:
                took, outputs[system.name] = timed(lambda: system.generate(prompts, workload.num_new_tokens))  # noqa: B023
                if repeat >= 0:
                    seconds[system.name].append(took)
            _check_equal(workload, outputs)
            longest = max(map(len, prompts)) + workload.num_new_tokens
            dense_bytes = max(dense_bytes, workload.num_prompts * longest * _bytes_per_token(path))
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


def _bytes_per_token(path: Path) -> int:
    """Return the bytes of one token's float32 keys and values in every layer."""
    config = AutoConfig.from_pretrained(path)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_hidden_layers * 2 * config.num_key_value_heads * head_size * 4)


def measure_first_token(workload: Workload, path: Path, repeats: int) -> dict[str, list[float]]:
    """Time one prompt's first token: in transformers, in kvframe, and there again behind a prefix served before."""
    vocab_size = AutoConfig.from_pretrained(path).vocab_size
    ours, theirs = KVFrame(path, memory=workload.memory, prefix_caching=True), PaddedGenerate(path)
    seconds: dict[str, list[float]] = {
        "transformers generate()": [],
        "kvframe": [],
        "kvframe, prefix served before": [],
    }
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


def summarise(measured: dict[str, Any]) -> dict[str, float]:
    """Return, for each peer, the median over the repeats of how many times as fast kvframe was on the same batch."""
    speeds = measured["tokens_per_second"]
    return {
        name: statistics.median(ours / theirs for ours, theirs in zip(speeds["kvframe"], times, strict=True))
        for name, times in speeds.items()
        if name != "kvframe"
    }


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page as Markdown."""
    note = "float32, greedy; the tokens of all systems are equal in every repeat."
    lines = heading("Generating: kvframe and transformers", record["machine"], medians(record), note)
    for name, measured in record["workloads"].items():
        lines += ["", f"## {name}", "", _batch(measured), "", *_speeds(measured)]
        if "first_token_seconds" in measured:
            lines += ["", *_first_token(measured["first_token_seconds"])]
    return "\n".join(lines) + "\n"


def _batch(measured: Mapping[str, Any]) -> str:
    batch = measured["batch"]
    prefix = f" after a common prefix of {batch['prefix']}" if batch["prefix"] else ", nothing in common"
    return (
        f"Model `{measured['model']}`; {batch['num_prompts']} prompts of {batch['shortest']} to {batch['longest']} "
        f"tokens{prefix}; {batch['num_new_tokens']} new tokens each."
    )


def _speeds(measured: Mapping[str, Any]) -> list[str]:
    rows = []
    dense = measured["dense_bytes"]
    for name, speeds in measured["tokens_per_second"].items():
        ratio = measured["times_as_fast"].get(name)
        num_bytes = measured["cache_bytes"][name]
        held = "not reported" if num_bytes is None else f"{num_bytes / 1e6:.1f} MB"
        rows.append((name, spread(speeds, "{:,.0f}"), "" if ratio is None else f"{ratio:.2f}", held))
    rows.append(("every layer full, padded, contiguous", "", "", f"{dense / 1e6:.1f} MB"))
    return table(("", "generated tokens/s", "kvframe is … times as fast", "keys and values held at most"), rows)


def _first_token(seconds: Mapping[str, Sequence[float]]) -> list[str]:
    rows = [(name, spread(times, "{:,.1f}", scale=1000)) for name, times in seconds.items()]
    return table(("one request alone", "time to its first token, ms"), rows)


@benchmark("generate", write_report)
@options.repeats(7)
@options.threads(1)
@options.choose("--workload", "names", [each.name for each in WORKLOADS], default=MEASURED)
def main(repeats: int, threads: int, names: Sequence[str]) -> dict[str, Any]:
    """Measure the workloads and write one JSON file and one page of results."""
    models.silence_transformers()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # it asks for packages it can do without
    found: dict[str, Any] = {}
    chosen = [workload for workload in WORKLOADS if workload.name in names]
    with progress("measuring", len(chosen) * (repeats + 1)) as advance:
        for workload in chosen:
            path = workload.model()
            measured = measure_throughput(workload, path, repeats, advance)
            measured["times_as_fast"] = summarise(measured)
            if workload.prefix:
                measured["first_token_seconds"] = measure_first_token(workload, path, repeats)
            shape = attrs.asdict(workload, filter=lambda field, _: field.name != "model")
            found[workload.name] = {"batch": shape, "model": path.name, **measured}
    return {"repeats": repeats, "workloads": found}


if __name__ == "__main__":
    main()
