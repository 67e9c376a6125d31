"""Measure what a decode step of kvframe's cache core costs as one size grows, beside vLLM's. It has a plot.

The README of benchmarks says how.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cache.cases import Case
from benchmarks.cache.core import ENGINES, RATIO, core_heading, measure, versions_of
from benchmarks.cache.setting import BLOCK_SIZE, KVFRAME, VLLM, Setting, Side, apart, hybrid
from benchmarks.cache.work import Decode, Work
from benchmarks.cache.worst_work import MAX_ROUNDS, Chain, Turns
from benchmarks.harness import options
from benchmarks.harness.pages import Column, figures, page
from benchmarks.harness.plots import plots
from benchmarks.harness.process import start_engines
from benchmarks.harness.record import benchmark, progress


@dataclasses.dataclass(frozen=True)
class Axis:
    """A size, and work at several values of it.

    Attributes:
        name: For the command line and the record.
        title: The size.
        words: What stays the same.
        cases: The work at each value.
    """

    name: str
    title: str
    words: str
    cases: Mapping[int, Case]


def _axis(
    name: str, title: str, words: str, values: Iterable[int], make: Callable[[int], tuple[Work, Setting]]
) -> Axis:
    """Return an axis; kvframe has a group for each layer, as vLLM has."""
    cases = {}
    for value in values:
        work, setting = make(value)
        sides = Side(VLLM, "vllm", setting), Side(KVFRAME, "kvframe", apart(setting))
        cases[value] = Case(str(value), "", work, sides)
    return Axis(name, title, words, cases)


def _set(work: Work, **options: Any) -> tuple[Work, Setting]:
    return work, work.make_setting(**options)


def _steps(num_requests: int = 8, length: int = 512, num_cached: int = 0, **options: Any) -> tuple[Work, Setting]:
    work = Decode(length=length, num_requests=num_requests, num_cycles=2, num_cached=num_cached)
    return _set(work, **{"num_blocks": 65_537, **options})


def _full_steps(num_branches: int) -> tuple[Work, Setting]:
    """Return decode steps in a pool that prompts with a common beginning fill: each new block takes another's place."""
    work = Decode(length=512, num_requests=8, num_cycles=2, num_branches=num_branches, shared=8192)
    blocks_per_layer = work.shared // BLOCK_SIZE + num_branches + work.num_requests * (work.length // BLOCK_SIZE - 8)
    return _set(work, windows=hybrid(1, 256), num_blocks=2 * blocks_per_layer + 1, max_model_len=work.shared + 2048)


def standard_axes() -> tuple[Axis, ...]:
    """Return what is measured by default."""
    full = "and the pool is full of cached blocks"
    return (
        _axis(
            "pool",
            "blocks in the pool",
            "4 requests of 256 tokens, full attention",
            (256, 1024, 4096, 16_384, 65_536),
            lambda size: _steps(4, 256, num_blocks=size),
        ),
        _axis(
            "requests",
            "requests",
            "512 tokens each, full attention, 65,536 blocks",
            (1, 4, 16, 64, 256, 1024),
            _steps,
        ),
        _axis(
            "groups",
            "groups",
            "16 requests of 1,536 tokens, one layer of full attention and the others with windows",
            (1, 2, 4, 8, 16, 32, 64),
            lambda size: _steps(16, 1536, windows=hybrid(size - 1, 256), num_blocks=131_073),
        ),
        _axis(
            "length",
            "tokens of each request",
            "8 requests, full attention, 65,536 blocks",
            (256, 1024, 4096, 16_384, 65_536),
            lambda size: _steps(length=size),
        ),
        _axis(
            "cached",
            "blocks cached before",
            "8 requests of 512 tokens, full attention, 65,536 blocks",
            (16, 1024, 4096, 16_384, 61_440),
            lambda size: _steps(num_cached=size),
        ),
        _axis(
            "branches",
            "cached prompts with a common beginning",
            f"8 requests of 512 tokens, a window of 256 and full attention; 8,192 tokens are in common, {full}",
            (10, 100, 1000, 10_000),
            _full_steps,
        ),
        _axis(
            "depth",
            "blocks of a chain, with a branch at each",
            f"Slowest step of 16 tokens of a request of 1,024; a window of 1,024 and full attention, {full}",
            (10, 100, 1000, 10_000),
            lambda size: _set(Chain(depth=size, length=1024, chunk=BLOCK_SIZE)),
        ),
        _axis(
            "turns",
            "turns of a conversation whose reasoning is stripped",
            f"Slowest of the 192 decode steps of a turn; a window of 1,024 and full attention, {full}",
            (10, 30, 100, 300, 1000),
            lambda size: _set(Turns(num_turns=size)),
        ),
    )


def tiny_axis() -> Axis:
    """Return an axis to try the script on, not to measure."""
    return _axis(
        "tiny",
        "groups",
        "2 requests of 64 tokens",
        (1, 2),
        lambda size: _steps(2, 64, windows=hybrid(size - 1, 32), num_blocks=257),
    )


STYLES: dict[str, dict[str, Any]] = {
    VLLM: {"color": "#d95f02", "marker": "o", "markersize": 7, "markerfacecolor": "none", "linewidth": 2.5},
    KVFRAME: {"color": "#1b6ca8", "marker": "s", "markersize": 3.5, "linewidth": 1.2},
}
"""Where two sides have the same figures, both can be seen."""


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    parts = [core_heading("The cache core as sizes grow", record), "![Time of a step](cache_growth.svg)"]
    for axis in record["axes"].values():
        parts += [f"## Against {axis['title']}", f"{axis['words']}.", _times(axis), _growth_of(axis)]
    return page(*parts)


def _sides(axis: Mapping[str, Any]) -> list[str]:
    return list(next(iter(axis["points"].values()))["sides"])


def _times(axis: Mapping[str, Any]) -> str:
    names = _sides(axis)
    columns: dict[str, Column] = {f"{name}, µs": (f"{name}, µs", "{:,.1f}", 1e6) for name in names}
    columns |= dict.fromkeys(names[1:], ("times as fast", RATIO))
    rows = {
        f"{int(value):,}": {
            **{f"{name}, µs": values["seconds"] for name, values in point["sides"].items()},
            **{name: values["times_as_fast"] for name, values in point["sides"].items()},
        }
        for value, point in axis["points"].items()
    }
    return figures(rows, columns, axis["title"])


def slope(points: Mapping[str, Any], side: str) -> float:
    """Return the power of a size that a side's time grows with, over all that was measured: 0 for not at all."""
    values = [math.log(int(value)) for value in points]
    times = [math.log(statistics.median(point["sides"][side]["seconds"])) for point in points.values()]
    return statistics.linear_regression(values, times).slope


def _growth_of(axis: Mapping[str, Any]) -> str:
    found = ", ".join(f"{slope(axis['points'], side):.2f} for {side}" for side in _sides(axis))
    return f"The time grows with this power of the {axis['title']} (0: not at all; 1: in proportion): {found}."


def draw_plot(record: Mapping[str, Any], path: Path) -> None:
    """Draw the time of a step against each size, both on logarithmic scales."""
    axes = record["axes"].values()
    with plots([axis["words"] for axis in axes], path) as places:
        for place, axis in zip(places, axes, strict=True):
            values = [int(value) for value in axis["points"]]
            slowest = 0.0
            for side in _sides(axis):
                turns = [[1e6 * each for each in point["sides"][side]["seconds"]] for point in axis["points"].values()]
                place.loglog(values, [statistics.median(each) for each in turns], label=side, **STYLES[side])
                ends = [*map(min, turns)], [*map(max, turns)]
                slowest = max(slowest, *ends[1])
                place.fill_between(values, *ends, color=STYLES[side]["color"], alpha=0.15, linewidth=0)
            place.set(xlabel=axis["title"], ylabel="µs a step", ylim=(1, 2 * slowest))


@benchmark("cache_growth", write_report, plots={"cache_growth": draw_plot})
@options.repeats(7, flag="--rounds", most=MAX_ROUNDS)
@options.choose("--axis", "axes", (*standard_axes(), tiny_axis()))
@options.peer
def main(rounds: int, axes: Sequence[Axis], peer: Path) -> dict[str, Any]:
    """Measure decode steps as one size grows; write a record, a page and a plot."""
    found = {}
    with (
        start_engines(ENGINES, peer) as engines,
        progress("measuring", rounds * sum(len(axis.cases) for axis in axes)) as advance,
    ):
        for axis in axes:
            points = {value: measure(case, engines, rounds, advance) for value, case in axis.cases.items()}
            found[axis.name] = {"title": axis.title, "words": axis.words, "points": points}
        return {"repeats": rounds, "versions": versions_of(engines), "axes": found}


if __name__ == "__main__":
    main()
