"""Measure prefill skipping: the same long prompts with it on and off. See benchmarks/README.md."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import attrs

from benchmarks.engine.workloads import Workload
from benchmarks.harness import models, options
from benchmarks.harness.pages import Column, case_page, figures, page
from benchmarks.harness.record import benchmark, by_turns, measure_each, ratios
from kvframe import Engine, SamplingParams

WRAPPER = "decode_only"
MAX_NUM_BATCHED_TOKENS = 2048
ONE_TOKEN = SamplingParams(max_new_tokens=1, ignore_eos=True)
CLOCKS = {"time": time.perf_counter, "processor time": time.process_time}
"""Wall-clock time, and the processor time of this process, which leaves out the work of other processes."""

Seconds = dict[str, float]
"""Seconds by clock."""

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
        token: The generated token.
        whole: The seconds from the prompt to its first token.
        trailing: The part of them in the trailing layers, whole layers with their norms and feed-forward parts.
        rows: The rows that each trailing layer computed.
    """

    token: int
    whole: Seconds
    trailing: Seconds
    rows: int


class System:
    """An engine that times its model's trailing layers: the last ones, which only read caches of earlier layers.

    Attributes:
        num_layers: Layers of the model.
        num_trailing: Trailing layers.
        vocab_size: The vocabulary's size.
    """

    def __init__(self, workload: Workload, *, skipping: bool) -> None:
        """Load a workload's model, with prefill skipping or without."""
        of_engine = {"prefill_skipping": WRAPPER} if skipping else {}
        stack = workload.stack(max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS, **of_engine)
        path, plugins = models.path_of(workload.model), models.plugins_of(workload.model)
        self.engine = Engine.from_pretrained(path, stack=stack, plugins=plugins)
        model: Any = self.engine.model
        layers = model.description.layers
        last_owner = max(index for index, layer in enumerate(layers) if layer.shares_with is None)
        trailing = [layer.name for layer in layers[last_owner + 1 :]]
        self.num_layers, self.num_trailing = len(layers), len(trailing)
        self.vocab_size = int(model.description.vocab_size)
        for index, attention in enumerate(trailing):
            layer = model.model.get_submodule(attention.rpartition(".")[0])
            # This hook runs before those that cut the layer's inputs, and the next one after all others.
            layer.register_forward_pre_hook(self._enter, prepend=True)
            layer.register_forward_hook(partial(self._leave, index))

    def run(self, prompt: list[int]) -> Prefill:
        """Prefill a prompt, in as many steps as it takes."""
        self._trailing = dict.fromkeys(CLOCKS, 0.0)
        self._rows = [0] * self.num_trailing
        start = _now()
        (output,) = self.engine.generate([prompt], ONE_TOKEN)
        whole = _since(start)
        assert output.error is None, output.error
        (rows,) = set(self._rows)
        return Prefill(output.token_ids[0], whole, self._trailing, rows)

    def _enter(self, layer: Any, inputs: Any) -> None:
        self._entered = _now()

    def _leave(self, index: int, layer: Any, inputs: Any, output: Any) -> None:
        for clock, seconds in _since(self._entered).items():
            self._trailing[clock] += seconds
        self._rows[index] += (output[0] if isinstance(output, tuple) else output).shape[-2]


def _now() -> Seconds:
    return {name: clock() for name, clock in CLOCKS.items()}


def _since(start: Seconds) -> Seconds:
    return {name: end - start[name] for name, end in _now().items()}


def measure(workload: Workload, repeats: int, advance: Callable[[int], object]) -> dict[str, Any]:
    """Let both systems take turns on the same prompts.

    Raises:
        SystemExit: They generated different tokens.
    """
    off, on = System(workload, skipping=False), System(workload, skipping=True)
    systems, found = {"off": off, "on": on}, dict[str, list[Prefill]](off=[], on=[])

    def run(name: str, repeat: int) -> Prefill:
        return systems[name].run(*workload.prompts(repeat, off.vocab_size))

    with closing(off.engine), closing(on.engine):
        for repeat, runs in by_turns([*systems], repeats, run, advance, warm_up=True):
            if runs["on"].token != runs["off"].token:
                sys.exit(f"{workload.name}: the tokens of repeat {repeat} differ with prefill skipping on and off")
            for name, each in runs.items():
                found[name] += [each] if repeat >= 0 else []
    return {
        "model": models.path_of(workload.model).name,
        "num_prompt_tokens": workload.shortest,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "num_layers": off.num_layers,
        "num_trailing_layers": off.num_trailing,
        "rows": {name: runs[0].rows for name, runs in found.items()},
        "tokens_equal": True,
        "clocks": {clock: summarise(found, clock) for clock in CLOCKS},
    }


def summarise(found: Mapping[str, Sequence[Prefill]], clock: str) -> dict[str, Any]:
    """Return each round's seconds by one clock, and the medians of ratios on the same prompt.

    The predicted share of a whole prefill follows from the trailing layers alone: the time of all other layers stays,
    and that of the trailing layers is what they took with skipping.
    """
    seconds = {
        part: {name: [getattr(run, part)[clock] for run in runs] for name, runs in found.items()}
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


PUBLISHED = (
    "Published, on a GPU: in vLLM pull request 19719, with Qwen2 and a prompt of 8,192 tokens, the second group of "
    "layers takes 9.7 ms with skipping and 16.6 ms without, 0.58."
)
SECONDS: dict[str, Column] = {
    "off": ("off, ms", "{:,.1f}", 1000),
    "on": ("on, ms", "{:,.1f}", 1000),
    "ratio": ("on is … of off", "{:.3f}"),
}
PREDICTIONS: dict[str, Column] = {
    "trailing_share": ("trailing layers' share, off", "{:.2f}"),
    "predicted_whole_ratio": ("so of the whole is left", "{:.2f}"),
    "whole_ratio": ("measured", "{:.2f}"),
}


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    note = "float32, the first token is equal in every repeat."
    return page(case_page("Prefill skipping: on and off", record, "workloads", _section, note).rstrip(), PUBLISHED)


def _section(measured: Mapping[str, Any]) -> Iterator[str]:
    computed = measured["rows"]
    yield (
        f"Model `{measured['model']}`: the last {measured['num_trailing_layers']} of {measured['num_layers']} layers "
        f"share keys and values of earlier ones. Prompts of {measured['num_prompt_tokens']:,} tokens in steps of at "
        f"most {measured['max_num_batched_tokens']:,}; each trailing layer computes {computed['off']:,} rows of a "
        f"prompt without skipping and {computed['on']:,} with it."
    )
    rows = {
        f"{title}, {clock}": {**clocked["seconds"][part], "ratio": clocked[f"{part}_ratio"]}
        for clock, clocked in measured["clocks"].items()
        for title, part in (("trailing layers", "trailing"), ("whole prefill", "whole"))
    }
    yield figures(rows, SECONDS)
    yield figures(measured["clocks"], PREDICTIONS)


@benchmark("skipping", write_report, cases="workloads")
@options.repeats(11)
@options.threads(1)
@options.choose("--workload", "workloads", WORKLOADS)
def main(repeats: int, threads: int, workloads: Sequence[Workload]) -> dict[str, Any]:
    """Measure the workloads; write one JSON file and one page."""
    models.silence_transformers()
    found = measure_each(workloads, repeats + 1, lambda each, advance: measure(each, repeats, advance))
    return {"repeats": repeats, "workloads": found}


if __name__ == "__main__":
    main()
