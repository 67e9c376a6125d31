"""Measure what prefill skipping saves: the same long prompts with it on and off. The README of benchmarks says how."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from benchmarks.engine.workloads import Workload
from benchmarks.harness import models, options
from benchmarks.harness.pages import Column, figures, heading, medians, page
from benchmarks.harness.record import benchmark, by_turns, progress, ratios
from kvframe import Engine, SamplingParams, Stack

WRAPPER = "decode_only"
MAX_NUM_BATCHED_TOKENS = 2048
ONE_TOKEN = SamplingParams(max_new_tokens=1, ignore_eos=True)
CLOCKS = {"time": time.perf_counter, "processor time": time.process_time}
"""What passes on the wall, and what this process computes; the second leaves out what others compute meanwhile."""

Seconds = dict[str, float]
"""By clock."""


WORKLOADS = (
    Workload(name="gemma3n-8192", model="bench-gemma3n", memory="96MiB", shortest=8192),
    Workload(name="yoco-8192", model="bench-yoco", memory="96MiB", shortest=8192),
    Workload(name="tiny-gemma3n", model="bench-gemma3n-tiny", memory="8MiB", shortest=200),
    Workload(name="tiny-yoco", model="bench-yoco-tiny", memory="8MiB", shortest=200),
)


@attrs.frozen
class Prefill:
    """One prefill.

    Attributes:
        token: What it generated.
        whole: From the prompt to its first token.
        trailing: Of it, in the layers that can be skipped, with everything that is in such a layer.
        rows: Rows that each of these layers computed.
    """

    token: int
    whole: Seconds
    trailing: Seconds
    rows: int


def now() -> Seconds:
    """Read every clock."""
    return {name: clock() for name, clock in CLOCKS.items()}


def since(start: Seconds) -> Seconds:
    """Return what passed since ``start``."""
    return {name: end - start[name] for name, end in now().items()}


class System:
    """An engine that notes what its model's last layers take.

    Attributes:
        num_layers: Layers of the model.
        num_trailing: Those of the trailing run that keeps no cache of its own.
        vocab_size: Of the model.
    """

    def __init__(self, workload: Workload, path: Path, *, skipping: bool) -> None:
        """Load the model in ``path``.

        Args:
            workload: Its model and memory.
            path: A checkpoint.
            skipping: Whether prefill skipping is on.
        """
        engine: dict[str, Any] = {"max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS}
        if skipping:
            engine["prefill_skipping"] = WRAPPER
        cache = {"memory": workload.memory, "prefix_caching": False}
        stack = Stack.from_mapping({"cache": cache, "engine": engine})
        self.engine = Engine.from_pretrained(path, stack=stack, plugins=models.plugins_of(workload.model))
        model: Any = self.engine.model
        description = model.description
        owners = [index for index, layer in enumerate(description.layers) if layer.shares_with is None]
        trailing = [layer.name for layer in description.layers[owners[-1] + 1 :]]
        self.num_layers, self.num_trailing = len(description.layers), len(trailing)
        self.vocab_size = int(description.vocab_size)
        self._reset()
        for index, attention in enumerate(trailing):
            # The layer that holds the attention module: norms, feed-forward and all.
            layer = model.model.get_submodule(attention.rpartition(".")[0])
            # Ahead of the hooks that cut the layer's inputs, and behind all others.
            layer.register_forward_pre_hook(self._enter, prepend=True)
            layer.register_forward_hook(partial(self._leave, index))

    def run(self, prompt: list[int]) -> Prefill:
        """Prefill a prompt, in as many steps as it takes."""
        self._reset()
        start = now()
        (output,) = self.engine.generate([prompt], ONE_TOKEN)
        whole = since(start)
        assert output.error is None, output.error
        (rows,) = set(self._rows)
        return Prefill(output.token_ids[0], whole, self._trailing, rows)

    def close(self) -> None:
        """Detach the model."""
        self.engine.close()

    def _reset(self) -> None:
        self._trailing = dict.fromkeys(CLOCKS, 0.0)
        self._rows = [0] * self.num_trailing

    def _enter(self, layer: Any, inputs: Any) -> None:
        self._entered = now()

    def _leave(self, index: int, layer: Any, inputs: Any, output: Any) -> None:
        for clock, seconds in since(self._entered).items():
            self._trailing[clock] += seconds
        self._rows[index] += (output[0] if isinstance(output, tuple) else output).shape[-2]


def measure(workload: Workload, repeats: int, advance: Callable[[int], None]) -> dict[str, Any]:
    """Run both systems on the same prompts by turns.

    Raises:
        SystemExit: They generated different tokens.
    """
    path = models.path_of(workload.model)
    systems = {name: System(workload, path, skipping=name == "on") for name in ("off", "on")}
    some, found = systems["off"], dict[str, list[Prefill]](off=[], on=[])

    def run(name: str, repeat: int) -> Prefill:
        return systems[name].run(*workload.prompts(repeat, some.vocab_size))

    try:
        for repeat, runs in by_turns([*systems], repeats, run, advance, warm_up=True):
            if runs["on"].token != runs["off"].token:
                sys.exit(f"{workload.name}: the tokens of repeat {repeat} differ with prefill skipping on and off")
            for name, each in runs.items():
                found[name] += [each] if repeat >= 0 else []
    finally:
        for system in systems.values():
            system.close()
    return {
        "model": path.name,
        "num_prompt_tokens": workload.shortest,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "num_layers": some.num_layers,
        "num_trailing_layers": some.num_trailing,
        "rows": {name: runs[0].rows for name, runs in found.items()},
        "tokens_equal": True,
        "clocks": {clock: summarise(found["off"], found["on"], clock) for clock in CLOCKS},
    }


def summarise(off: Sequence[Prefill], on: Sequence[Prefill], clock: str) -> dict[str, Any]:
    """Return every repeat's seconds, and medians over the repeats of ratios on the same prompt.

    What is left of a whole prefill follows from the trailing layers: all that others take, and of theirs what was
    measured with skipping.

    Args:
        off: Each repeat's prefill without skipping.
        on: The same repeat's with it.
        clock: Which seconds.
    """
    seconds = {
        part: {name: [getattr(run, part)[clock] for run in runs] for name, runs in (("off", off), ("on", on))}
        for part in ("trailing", "whole")
    }
    trailing, whole = seconds["trailing"], seconds["whole"]
    saved = [before - after for before, after in zip(trailing["off"], trailing["on"], strict=True)]
    return {
        "seconds": seconds,
        "trailing_ratio": statistics.median(ratios(trailing["on"], trailing["off"])),
        "whole_ratio": statistics.median(ratios(whole["on"], whole["off"])),
        "trailing_share": statistics.median(ratios(trailing["off"], whole["off"])),
        "predicted_whole_ratio": statistics.median(1 - each for each in ratios(saved, whole["off"])),
    }


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    note = "float32, the first token is equal in every repeat."
    parts = [heading("Prefill skipping: on and off", record, medians(record), note)]
    for name, measured in record["workloads"].items():
        parts += [f"## {name}", _shape(measured), _seconds(measured), figures(measured["clocks"], PREDICTIONS)]
    published = (
        "Published, on a GPU: in vLLM pull request 19719, with Qwen2 and a prompt of 8,192 tokens, the second group of "
        "layers takes 9.7 ms with skipping and 16.6 ms without, 0.58."
    )
    return page(*parts, published)


def _shape(measured: Mapping[str, Any]) -> str:
    rows = measured["rows"]
    return (
        f"Model `{measured['model']}`: the last {measured['num_trailing_layers']} of {measured['num_layers']} layers "
        f"share keys and values of earlier ones. Prompts of {measured['num_prompt_tokens']:,} tokens in steps of at "
        f"most {measured['max_num_batched_tokens']:,}; each trailing layer computes {rows['off']:,} rows of a prompt "
        f"without skipping and {rows['on']:,} with it."
    )


def _seconds(measured: Mapping[str, Any]) -> str:
    rows = {
        f"{title}, {clock}": {**clocked["seconds"][part], "ratio": clocked[f"{part}_ratio"]}
        for clock, clocked in measured["clocks"].items()
        for title, part in (("trailing layers", "trailing"), ("whole prefill", "whole"))
    }
    columns: dict[str, Column] = {
        "off": ("off, ms", "{:,.1f}", 1000),
        "on": ("on, ms", "{:,.1f}", 1000),
        "ratio": ("on is … of off", "{:.3f}"),
    }
    return figures(rows, columns)


PREDICTIONS: dict[str, Column] = {
    "trailing_share": ("trailing layers' share, off", "{:.2f}"),
    "predicted_whole_ratio": ("so of the whole is left", "{:.2f}"),
    "whole_ratio": ("measured", "{:.2f}"),
}


@benchmark("skipping", write_report)
@options.repeats(11)
@options.threads(1)
@options.choose("--workload", "workloads", WORKLOADS)
def main(repeats: int, threads: int, workloads: Sequence[Workload]) -> dict[str, Any]:
    """Measure the workloads and write one JSON file and one page of results."""
    models.silence_transformers()
    with progress("measuring", len(workloads) * (repeats + 1)) as advance:
        found = {each.name: measure(each, repeats, advance) for each in workloads}
    return {"repeats": repeats, "workloads": found}


if __name__ == "__main__":
    main()
