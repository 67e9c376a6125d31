"""Measure a decode step of kvframe's cache core and of vLLM's as one size grows; draw a plot.

See benchmarks/README.md.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cache.cases import CHAIN, TURNS, Case, setting_of
from benchmarks.cache.core import ENGINES, RATIO, core_heading, measure, versions_of
from benchmarks.cache.setting import BLOCK_SIZE, KVFRAME, VLLM, Side, apart, hybrid
from benchmarks.cache.work import Work, decode
from benchmarks.cache.worst_work import MAX_ROUNDS, chain, turns
from benchmarks.harness import options
from benchmarks.harness.pages import Column, figures, page
from benchmarks.harness.plots import plots
from benchmarks.harness.process import start_engines
from benchmarks.harness.record import benchmark, progress


@dataclasses.dataclass(frozen=True)
class Axis:
    """A size that grows (its title says which), what stays the same in words, and the case of each value."""

    name: str
    title: str
    words: str
    cases: Mapping[int, Case]


Point = tuple[Work, dict[str, int], dict[str, Any]]
"""A work, its sizes, and fields of its setting."""


def _axis(name: str, title: str, words: str, points: Mapping[int, Point]) -> Axis:
    """Return an axis. kvframe has a group for each layer, as vLLM has."""
    cases = {}
    for value, (work, sizes, fields) in points.items():
        setting = setting_of(work, sizes, **fields)
        both = Side(VLLM, "vllm", setting), Side(KVFRAME, "kvframe", apart(setting))
        cases[value] = Case(str(value), "", work, sizes, both)
    return Axis(name, title, words, cases)


def _steps(num_requests: int, length: int, **options: Any) -> Point:
    sizes = {"length": length, "num_requests": num_requests, "num_cycles": 2}
    return decode, sizes, {"num_blocks": 65_537, **options}


def _full_steps(num_branches: int) -> Point:
    """Return steps in a pool full of cached prompts with a common beginning: each new block evicts another one."""
    shared, num_requests, length = 8192, 8, 512
    blocks_of_a_layer = shared // BLOCK_SIZE + num_branches + num_requests * (length // BLOCK_SIZE - 8)
    options = {"windows": hybrid(1, 256), "num_blocks": 2 * blocks_of_a_layer + 1, "max_model_len": shared + 2048}
    work, sizes, _ = _steps(num_requests, length)
    return work, sizes | {"num_branches": num_branches, "shared": shared}, options


def standard_axes() -> tuple[Axis, ...]:
    """Return the axes that are measured by default."""
    full = "and the pool is full of cached blocks"
    both = f"a window of 1,024 and full attention, {full}"
    requests = {size: _steps(size, 512) for size in (1, 4, 16, 64, 256, 1024)}
    groups = {
        size: _steps(16, 1536, windows=hybrid(size - 1, 256), num_blocks=131_073) for size in (1, 2, 4, 8, 16, 32, 64)
    }
    of_groups = "16 requests of 1,536 tokens, one layer of full attention and the others with windows"
    of_branches = f"8 requests of 512 tokens, a window of 256 and full attention; 8,192 tokens are in common, {full}"
    of_depth = f"Slowest step of 16 tokens of a request of 1,024; {both}"
    of_turns = f"Slowest of the 192 decode steps of a turn; {both}"
    widths = (10, 100, 1000, 10_000)
    branches = {size: _full_steps(size) for size in widths}
    deep = CHAIN | {"length": 1024, "chunk": BLOCK_SIZE}
    depths: dict[int, Point] = {size: (chain, deep | {"depth": size}, {}) for size in widths}
    talks: dict[int, Point] = {size: (turns, TURNS | {"num_turns": size}, {}) for size in (10, 30, 100, 300, 1000)}
    return (
        _axis("requests", "requests", "512 tokens each, full attention, 65,536 blocks", requests),
        _axis("groups", "groups", of_groups, groups),
        _axis("branches", "cached prompts with a common beginning", of_branches, branches),
        _axis("depth", "blocks of a chain, with a branch at each", of_depth, depths),
        _axis("turns", "turns of a conversation whose reasoning is stripped", of_turns, talks),
    )


def tiny_axis() -> Axis:
    """Return a small axis that tries the script."""
    points = {size: _steps(2, 64, windows=hybrid(size - 1, 32), num_blocks=257) for size in (1, 2)}
    return _axis("tiny", "groups", "2 requests of 64 tokens", points)


STYLES: dict[str, dict[str, Any]] = {
    VLLM: {"color": "#d95f02", "marker": "o", "markersize": 7, "markerfacecolor": "none", "linewidth": 2.5},
    KVFRAME: {"color": "#1b6ca8", "marker": "s", "markersize": 3.5, "linewidth": 1.2},
}
"""The styles of both sides; if their figures are the same, both markers are seen."""


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
    """Return the power of a size with which a side's time grows; 0 if it does not grow."""
    values = [math.log(int(value)) for value in points]
    times = [math.log(statistics.median(point["sides"][side]["seconds"])) for point in points.values()]
    return statistics.linear_regression(values, times).slope


def _growth_of(axis: Mapping[str, Any]) -> str:
    slopes = ", ".join(f"{slope(axis['points'], side):.2f} for {side}" for side in _sides(axis))
    return f"The time grows with this power of the {axis['title']} (0: not at all; 1: in proportion): {slopes}."


def draw_plot(record: Mapping[str, Any], path: Path) -> None:
    """Draw the time of a step over each size, both on logarithmic scales."""
    axes = record["axes"].values()
    with plots([axis["words"] for axis in axes], path) as places:
        for place, axis in zip(places, axes, strict=True):
            values = [int(value) for value in axis["points"]]
            slowest = 0.0
            for side in _sides(axis):
                turns = [[1e6 * time for time in point["sides"][side]["seconds"]] for point in axis["points"].values()]
                place.loglog(values, [statistics.median(times) for times in turns], label=side, **STYLES[side])
                ends = [*map(min, turns)], [*map(max, turns)]
                slowest = max(slowest, *ends[1])
                place.fill_between(values, *ends, color=STYLES[side]["color"], alpha=0.15, linewidth=0)
            place.set(xlabel=axis["title"], ylabel="µs a step", ylim=(1, 2 * slowest))


@benchmark("cache_growth", write_report, cases="axes", plots={"cache_growth": draw_plot})
@options.repeats(7, flag="--rounds", max_rounds=MAX_ROUNDS)
@options.choose("--axis", "axes", (*standard_axes(), tiny_axis()))
@options.peer
def main(rounds: int, axes: Sequence[Axis], peer: Path) -> dict[str, Any]:
    """Measure steps as one size grows; write one JSON file, one page and a plot."""
    results = {}
    with (
        start_engines(ENGINES, peer) as engines,
        progress("measuring", rounds * sum(len(axis.cases) for axis in axes)) as advance,
    ):
        for axis in axes:
            points = {value: measure(case, engines, rounds, advance) for value, case in axis.cases.items()}
            results[axis.name] = {"title": axis.title, "words": axis.words, "points": points}
        return {"repeats": rounds, "versions": versions_of(engines), "axes": results}


if __name__ == "__main__":
    main()
