"""Measure a device's limits and, on it, each case: every backend that serves it, beside torch's own attention."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import attrs
import torch

from benchmarks.attention.shapes import decodes
from benchmarks.gpu.cases import Case, Ceilings, StateCase
from benchmarks.gpu.steps import BLOCK_SIZE, ERROR, PagedLayer, make_chain, make_layer, needed_bytes, rotation
from benchmarks.harness.process import timed
from kvframe.contract.backend import AttentionBackend
from kvframe.contract.specs import align_up
from kvframe.loading.registry import Registry
from kvframe.selection.choice import bind_chain
from kvframe.selection.refusals import find_refusals, needs_copies

MAX_FREE = 0.8
"""The most memory of a case, as a share of the device's free memory."""

MAX_BACKEND_SECONDS = 60.0
"""The most seconds of a backend in a run, compilation included, so that others get their turn."""

HOST_REQUESTS, HOST_CALLS = 256, 30
COPIED_BYTES, MATRIX_SIZE = 4 << 30, 8192
REPEATS = 7
TIMED_SECONDS = 0.02
"""The least time that is measured at once, because events have a resolution of half a microsecond."""


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


Backends = dict[str, type[AttentionBackend]]


def measure_case(
    case: Case, backends: Backends, registry: Registry, device: torch.device, spent: dict[str, float]
) -> dict[str, Measured]:
    """Return each system's figures for a case, and add the seconds of each backend to ``spent``."""
    if isinstance(case, StateCase):
        return measure_states(case, device)
    results: dict[str, Measured | None] = {}
    for name, backend_class in backends.items():
        if spent[name] > MAX_BACKEND_SECONDS:
            is_served = not why_refused(case, backend_class, registry, device.type)
            results[name] = Measured(reason="out of time") if is_served else None
            continue
        start = time.monotonic()
        results[name] = measure(case, backend_class, registry, device)
        spent[name] += time.monotonic() - start
    results["SDPA, dense"] = measure_dense(case, device)
    return {name: measured for name, measured in results.items() if measured is not None}


def why_refused(case: Case, backend_class: type[AttentionBackend], registry: Registry, device: str) -> str:
    """Return the codes with which a backend refuses a case's layer; empty if it serves the layer without copies."""
    capabilities = backend_class.capabilities
    dtype = "bfloat16" if "bfloat16" in capabilities.dtypes else "float32"
    layer = make_layer(case, align_up(BLOCK_SIZE, capabilities.block_size_multiple), registry, dtype)
    if needs_copies(capabilities, layer):
        return "format"
    _, inner_layer, extensions = bind_chain(make_chain(case), layer)
    return " ".join(refusal.code for refusal in find_refusals(capabilities, inner_layer, device, extensions))


def is_too_large(num_bytes: int, device: torch.device) -> bool:
    """Return whether the device has too little free memory for so many bytes."""
    return device.type == "cuda" and num_bytes > MAX_FREE * torch.cuda.mem_get_info(device)[0]


def measure(
    case: Case, backend_class: type[AttentionBackend], registry: Registry, device: torch.device
) -> Measured | None:
    """Return a backend's figures for a case; None if it does not serve the case."""
    if why_refused(case, backend_class, registry, device.type):
        return None
    if is_too_large(needed_bytes(case), device):
        return Measured(reason="too little memory")
    try:
        steps = list(PagedLayer(case, backend_class, registry, device).steps())
        error = steps[0].check(steps[0].run())
        if not error <= ERROR:
            return Measured(error=error, reason="wrong")
        return time_calls([step.run for step in steps], device, error)
    except Exception as problem:  # An error of a library must not end the run.
        return Measured(reason=in_a_sentence(problem))


def in_a_sentence(problem: Exception) -> str:
    """Return an error of a library in a few words."""
    lines = str(problem).splitlines()
    return f"{type(problem).__name__}: {lines[0][:120] if lines else ''}"


def measure_states(case: StateCase, device: torch.device) -> dict[str, Measured]:
    """Return the figures of the kernel that updates Mamba-2's states, and of plain torch."""
    try:
        from kvframe_kernels.triton.states import selective_state_update, selective_state_update_reference
    except ImportError as problem:
        return {"kernel": Measured(reason=str(problem))}
    generator = torch.Generator(device).manual_seed(3)
    draw = partial(torch.randn, generator=generator, device=device)
    rows, heads, size, states = len(case.requests), case.num_heads, case.head_size, case.state_size
    pages = draw(rows + 1, 1, heads, size, states)
    ids = torch.randperm(rows, generator=generator, device=device) + 1
    place = ids, torch.zeros_like(ids)
    x, dt = draw(rows, heads, size), draw(rows, heads, 1).expand(-1, -1, size)
    decay = -draw(heads, 1, 1).exp().expand(-1, size, states)
    arguments = (x, dt, decay, draw(rows, 1, states), draw(rows, 1, states), draw(heads, 1).expand(-1, size))
    exact = selective_state_update_reference(pages.clone(), place, place, *arguments, softplus=True)
    results: dict[str, Measured] = {}
    for name, function in (("kernel", selective_state_update), ("plain torch", selective_state_update_reference)):
        run = partial(function, pages.clone(), place, place, *arguments, softplus=True)
        error = float((run() - exact).norm() / exact.norm())
        is_right = error <= ERROR
        results[name] = time_calls([run], device, error) if is_right else Measured(error=error, reason="wrong")
    return results


def measure_dense(case: Case, device: torch.device) -> Measured | None:
    """Return the figures of torch's attention on contiguous keys and values; None if it cannot compute the case."""
    is_plain = case.format == "plain" and case.window is None and case.chunk is None and not case.skips
    if type(case) is not Case or not is_plain or len(set(case.requests)) != 1:
        return None
    computed, num_queries = case.requests[0]
    if computed and num_queries != 1:
        return None
    if is_too_large(case.kv_bytes(), device):
        return Measured(reason="too little memory")
    draw = partial(torch.randn, generator=torch.Generator(device).manual_seed(4), device=device, dtype=torch.bfloat16)
    query = draw(len(case.requests), case.num_heads, num_queries, case.head_size)
    shape = len(case.requests), case.num_kv_heads, computed + num_queries, case.head_size
    attend = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=num_queries > 1, enable_gqa=True)
    calls = [partial(attend, query, draw(*shape), draw(*shape)) for _ in range(rotation(case))]
    try:
        return time_calls(calls, device)
    except Exception as problem:  # as above
        return Measured(reason=in_a_sentence(problem))


def measure_host(backends: Backends, registry: Registry, device: torch.device) -> dict[str, list[float]]:
    """Return the seconds in which the host builds each backend's metadata of 256 decodes, with an idle device."""
    lengths = torch.randint(101, 2001, (HOST_REQUESTS,), generator=torch.Generator().manual_seed(5)).tolist()
    requests = tuple(request for length in lengths for request in decodes(1, length))
    case = Case(name="host", kind="host", requests=requests, num_heads=8, num_kv_heads=2, head_size=64)
    seconds_by_name: dict[str, list[float]] = {}
    for name, backend_class in backends.items():
        if why_refused(case, backend_class, registry, device.type):
            continue
        try:
            step = next(PagedLayer(case, backend_class, registry, device).steps())
            step.build()
            seconds_by_name[name] = []
            for _ in range(HOST_CALLS):
                synchronize(device)
                seconds_by_name[name].append(timed(step.build)[0])
        except Exception as problem:  # as above
            print(f"{name}: {problem}", file=sys.stderr)
    return seconds_by_name


# --- clocks of a device -----------------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_ceilings(device: torch.device) -> Ceilings:
    """Return the rates of a large copy and of a large product, each the median of seven."""
    num_bytes, size = (COPIED_BYTES, MATRIX_SIZE) if device.type == "cuda" else (4 << 20, 256)
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copying = _median([partial(target.copy_, source)], device)
    del source, target
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    multiplying = _median([partial(torch.matmul, left, right)], device)
    return Ceilings(bytes_per_second=2 * num_bytes / copying, flops_per_second=2 * size**3 / multiplying)


def time_calls(
    calls: Sequence[Callable[[], torch.Tensor]], device: torch.device, error: float | None = None
) -> Measured:
    """Return the time of one of several calls over memory of their own, made by turns, and their outputs' error.

    On a GPU the calls are captured as one graph and replayed, if this is possible.
    """
    for call in calls:
        call()
    if device.type != "cuda":
        return Measured(seconds=_median(calls, device), error=error, how="clock")
    try:
        graph = _capture(calls)
    except Exception:  # A library did something that a graph cannot capture.
        synchronize(device)
        return Measured(seconds=_median(calls, device), error=error, how="events")
    return Measured(seconds=_median([graph.replay], device) / len(calls), error=error, how="graph")


def _capture(calls: Sequence[Callable[[], torch.Tensor]]) -> torch.cuda.CUDAGraph:
    def run() -> None:
        for call in calls:
            call()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
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
