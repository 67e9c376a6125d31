"""Measure a device's limits, and the time of calls on it."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence

import attrs
import torch

from benchmarks.gpu.cases import Ceilings
from benchmarks.harness.process import timed

COPIED_BYTES = 4 << 30
MATRIX_SIZE = 8192
REPEATS = 7
TIMED_SECONDS = 0.02
"""The least time that is measured at once, because events have a resolution of half a microsecond."""


def in_a_sentence(problem: Exception) -> str:
    """Return an error of a library in a few words."""
    lines = str(problem).splitlines()
    return f"{type(problem).__name__}: {lines[0][:120] if lines else ''}"


@attrs.frozen(kw_only=True)
class Measured:
    """The figures of one system for one case.

    Attributes:
        seconds: The time of one call on the device; None if it was not timed.
        error: The error of the output, by norms.
        how: ``"graph"`` if calls were replayed from a graph; ``"events"`` if the host launched each call, so that
            launches count; ``"clock"`` on a CPU.
        reason: The reason why it was not timed; empty if it was.
    """

    seconds: float | None = None
    error: float | None = None
    how: str = ""
    reason: str = ""


def measure_ceilings(device: torch.device) -> Ceilings:
    """Return the rates of a large copy and of a large product, each the median of seven."""
    on_gpu = device.type == "cuda"
    num_bytes, size = (COPIED_BYTES, MATRIX_SIZE) if on_gpu else (4 << 20, 256)
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copying = _median([functools.partial(target.copy_, source)], device)
    del source, target
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    multiplying = _median([functools.partial(torch.matmul, left, right)], device)
    return Ceilings(bytes_per_second=2 * num_bytes / copying, flops_per_second=2 * size**3 / multiplying)


def time_calls(
    calls: Sequence[Callable[[], torch.Tensor]], device: torch.device, error: float | None = None
) -> Measured:
    """Return the time of one of several calls that are made by turns.

    Args:
        calls: The calls, each over memory of its own. They are captured as one graph and replayed if this is possible.
        device: The device.
        error: The error of their outputs.
    """
    for call in calls:
        call()
    if device.type != "cuda":
        return Measured(seconds=_median(calls, device), error=error, how="clock")
    try:
        graph = _capture(calls)
    except Exception:  # A library did something that a graph cannot capture.
        torch.cuda.synchronize(device)
        return Measured(seconds=_median(calls, device), error=error, how="events")
    return Measured(seconds=_median([graph.replay], device) / len(calls), error=error, how="graph")


def seconds_each(call: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Return the host's time of each of several calls, with an idle device."""
    found = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(timed(call)[0])
    return found


def _capture(calls: Sequence[Callable[[], torch.Tensor]]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _median(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Return the median time of one call over repeats; the calls are made by turns."""
    rounds = max(1, int(TIMED_SECONDS / max(1e-6, _once(calls, 1, device) * len(calls))))
    return statistics.median(_once(calls, rounds, device) for _ in range(REPEATS))


def _once(calls: Sequence[Callable[[], object]], rounds: int, device: torch.device) -> float:
    def run() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    if device.type != "cuda":
        return timed(run)[0] / (rounds * len(calls))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000 / (rounds * len(calls))
