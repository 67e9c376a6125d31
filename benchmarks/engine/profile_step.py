"""Measure the parts of an engine's steps. See benchmarks/README.md."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
from kvframe_engine.requests.request import SamplingParams
from kvframe_engine.running import model_runner

from benchmarks.engine.workloads import Workload
from benchmarks.harness import models, options
from benchmarks.harness.pages import heading, page, spread, table
from benchmarks.harness.record import benchmark, in_columns, measure_each
from kvframe import Engine
from kvframe.attention.layer import AttentionLayer

PARTS = ("scheduling", "cache", "metadata", "attention", "rest of the model", "sampling", "requests")
HOST_PARTS = ("scheduling", "cache", "metadata", "sampling", "requests")
WARM_STEPS = 2
CACHE_VERBS = ("start", "fork", "has_capacity", "extend", "extend_rows", "commit_rows", "free")


@attrs.frozen(kw_only=True)
class Steps(Workload):
    """Requests that all run at once, on one backend; the model around its attention may be compiled."""

    backend: str = "auto"
    is_compiled: bool = False


DEMO: dict[str, Any] = {"model": "demo", "shortest": 200}
LLAMA: dict[str, Any] = {"model": "bench-llama-100m", "num_prompts": 16, "shortest": 256}
WORKLOADS = (
    Steps(name="demo, 16 requests", **DEMO, num_prompts=16, memory="64MiB"),
    Steps(name="demo, 128 requests", **DEMO, num_prompts=128, memory="256MiB"),
    Steps(name="demo, 128 requests, torch", **DEMO, num_prompts=128, memory="256MiB", backend="torch"),
    Steps(name="llama-100m, 16 requests", **LLAMA, memory="512MiB"),
    Steps(name="llama-100m, 128 requests", **{**LLAMA, "num_prompts": 128, "shortest": 48}, memory="1GiB"),
    Steps(name="llama-100m, 16 requests, compiled", **LLAMA, memory="512MiB", is_compiled=True),
    Steps(name="tiny", model="bench-llama-tiny", num_prompts=3, shortest=20, memory="8MiB"),
)


class Clock:
    """Adds up the seconds of each part of a step, without those of the parts that it calls.

    Invariant: the ``seconds`` of all parts add up to those of the step.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._inner = [0.0]

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls this one and adds its time to the part."""

        def call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            self._inner.append(0.0)
            try:
                return function(*arguments, **options)
            finally:
                elapsed = time.perf_counter() - start
                self.seconds[part] += elapsed - self._inner.pop()
                self._inner[-1] += elapsed

        return call


@contextmanager
def profiled(engine: Engine) -> Iterator[Clock]:
    """Time the parts of the engine's steps inside the block."""
    clock = Clock()
    core: Any = engine
    manager, scheduler, runner, layers = core._manager, core._scheduler, core._runner, core._runner._layers
    parts: list[tuple[Any, str, str]] = [
        *((manager, name, "cache") for name in CACHE_VERBS),
        *((scheduler, name, "scheduling") for name in ("schedule", "complete")),
        *((runner, name, "metadata") for name in ("pack", "forward")),
        (layers, "begin_step", "metadata"),
        (engine.model, "forward", "rest of the model"),
        (AttentionLayer, "__call__", "attention"),
        (model_runner, "sample", "sampling"),
        (engine, "step", "requests"),
    ]
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in parts]
    for owner, name, part in parts:
        setattr(owner, name, clock.timed(part, getattr(owner, name)))
    try:
        yield clock
    finally:
        for owner, name, own in before:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


def measure(workload: Steps, num_steps: int, advance: Callable[[int], object]) -> dict[str, Any]:
    """Serve the workload; return the seconds of each part of each step, by kind of step."""
    path, num_requests = models.path_of(workload.model), workload.num_prompts
    stack = workload.stack(
        workload.backend,
        model={"compile": workload.is_compiled},
        limits={"max_num_seqs": num_requests},
        engine={"self_check": False},
    )
    steps: dict[str, list[dict[str, float]]] = {"prefill": [], "decode": []}
    params = SamplingParams(max_new_tokens=num_steps + WARM_STEPS + 1, ignore_eos=True)
    with Engine.from_pretrained(path, stack=stack) as engine:
        # A small batch does the work of first calls: allocations and compilation.
        engine.generate([[3] * 20] * 2, SamplingParams(max_new_tokens=3, ignore_eos=True))
        for prompt in workload.prompts(0, engine.model.description.vocab_size or 0):
            engine.add_request(prompt, params)
        with profiled(engine) as clock:
            while engine.has_unfinished:
                before, stats = dict(clock.seconds), engine.stats()
                engine.step()
                num_computed = engine.stats().computed_tokens - stats.computed_tokens
                decodes = num_computed == engine.stats().generated_tokens - stats.generated_tokens
                steps["decode" if decodes else "prefill"].append(
                    {part: clock.seconds[part] - before[part] for part in PARTS} | {"tokens": num_computed}
                )
        backends = sorted({choice.backend for choice in engine.choices})
    advance(1)
    steps["decode"] = [step for step in steps["decode"] if step["tokens"] == num_requests][WARM_STEPS:]
    return {
        "model": path.name,
        "num_requests": num_requests,
        "prompt_len": workload.shortest,
        "backends": backends,
        "is_compiled": workload.is_compiled,
        "steps": {kind: _in_columns(kind_steps) for kind, kind_steps in steps.items()},
    }


def _in_columns(steps: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return each part's seconds of all steps, the steps' tokens, and the median of the host's share of a step."""
    columns: dict[str, Any] = in_columns(steps)
    shares = [sum(step[part] for part in HOST_PARTS) / sum(step[part] for part in PARTS) for step in steps]
    columns["host_share"] = statistics.median(shares)
    return columns


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    what = (
        f": medians over {record['repeats']} decodes of all requests, and over the steps that compute prompts (lowest "
        "to highest in brackets)."
    )
    parts = [heading("Where the time of an engine's step goes", record, what, "float32.")]
    for name, measured in record["workloads"].items():
        backends = ", ".join(f"`{backend}`" for backend in measured["backends"])
        compiled = ", compiled around the attention" if measured["is_compiled"] else ""
        words = (
            f"Model `{measured['model']}`{compiled}; {measured['num_requests']} requests with prompts of "
            f"{measured['prompt_len']} tokens; attention by {backends}."
        )
        parts += [f"## {name}", words, _steps(measured["steps"])]
    return page(*parts)


def _steps(steps: Mapping[str, Any]) -> str:
    kinds, parts = ("decode", "prefill"), [part for part in steps["decode"] if part not in ("tokens", "host_share")]
    totals = {kind: [sum(step) for step in zip(*(steps[kind][part] for part in parts), strict=True)] for kind in kinds}
    rows = [[part] for part in parts]
    step_row, host_row = ["the step"], ["all but attention and the model"]
    for kind in kinds:
        for part, row in zip(parts, rows, strict=True):
            seconds = steps[kind][part]
            share = statistics.median(part_time / total for part_time, total in zip(seconds, totals[kind], strict=True))
            row += [spread(seconds, "{:,.3f}", scale=1000), f"{100 * share:.1f} %"]
        step_row += [spread(totals[kind], "{:,.3f}", scale=1000), "100 %"]
        host_row += ["", f"{100 * steps[kind]['host_share']:.1f} %"]
    return table(("", "decode, ms", "share", "prompts, ms", "share"), [*rows, step_row, host_row])


@benchmark("step_profile", write_report, cases="workloads")
@options.repeats(16, flag="--steps")
@options.threads(1)
@options.choose("--workload", "workloads", WORKLOADS)
def main(steps: int, threads: int, workloads: Sequence[Steps]) -> dict[str, Any]:
    """Measure the workloads; write one JSON file and one page."""
    results = measure_each(workloads, 1, lambda batch, advance: measure(batch, steps, advance))
    return {"repeats": steps, "workloads": results}


if __name__ == "__main__":
    main()
