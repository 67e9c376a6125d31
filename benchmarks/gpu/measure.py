"""Measure one case on one device: every backend that serves it, and torch's own attention beside them."""

from __future__ import annotations

import sys
import time
from functools import partial

import torch

from benchmarks.gpu.cases import Case, StateCase, decodes
from benchmarks.gpu.steps import BLOCK_SIZE, ERROR, PagedLayer, make_chain, make_layer, needed_bytes, rotation
from benchmarks.gpu.timing import Measured, in_a_sentence, seconds_each, time_calls
from kvframe.contract.backend import AttentionBackend
from kvframe.contract.specs import align_up
from kvframe.loading.registry import Registry
from kvframe.selection.chains import bind_chain

MAX_FREE = 0.8
"""The most memory of a case, as a share of the device's free memory."""

MAX_BACKEND_SECONDS = 60.0
"""The most seconds of a backend in a run, compilation included, so that others get their turn."""

HOST_REQUESTS = 256
HOST_CALLS = 30


def measure_case(
    case: Case,
    backends: dict[str, type[AttentionBackend]],
    registry: Registry,
    device: torch.device,
    spent: dict[str, float],
) -> dict[str, Measured]:
    """Return each system's figures for a case, and add the seconds of each backend to ``spent``."""
    if isinstance(case, StateCase):
        return measure_states(case, device)
    found: dict[str, Measured | None] = {}
    for name, backend_class in backends.items():
        if spent[name] > MAX_BACKEND_SECONDS:
            found[name] = Measured(reason="out of time")
            continue
        start = time.monotonic()
        found[name] = measure(case, backend_class, registry, device)
        spent[name] += time.monotonic() - start
    found["SDPA, dense"] = measure_dense(case, device)
    return {name: measured for name, measured in found.items() if measured is not None}


def why_refused(case: Case, backend_class: type[AttentionBackend], registry: Registry, device: str) -> str:
    """Return the codes with which a backend refuses a case's layer; empty if it serves the layer without copies."""
    capabilities = backend_class.capabilities
    dtype = "bfloat16" if "bfloat16" in capabilities.dtypes else "float32"
    layer = make_layer(case, align_up(BLOCK_SIZE, capabilities.block_size_multiple), registry, dtype)
    if capabilities.needs_copies(layer):
        return "format"
    _, seen, extensions = bind_chain(make_chain(case), layer)
    return " ".join(refusal.code for refusal in capabilities.refusals(seen, device, extensions))


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
    found: dict[str, Measured] = {}
    for name, function in (("kernel", selective_state_update), ("plain torch", selective_state_update_reference)):
        run = partial(function, pages.clone(), place, place, *arguments, softplus=True)
        error = float((run() - exact).norm() / exact.norm())
        is_right = error <= ERROR
        found[name] = time_calls([run], device, error) if is_right else Measured(error=error, reason="wrong")
    return found


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


def measure_host(
    backends: dict[str, type[AttentionBackend]], registry: Registry, device: torch.device
) -> dict[str, list[float]]:
    """Return the seconds in which the host builds each backend's metadata of 256 decodes."""
    lengths = torch.randint(101, 2001, (HOST_REQUESTS,), generator=torch.Generator().manual_seed(5)).tolist()
    requests = tuple(request for length in lengths for request in decodes(1, length))
    case = Case(name="host", kind="host", requests=requests, num_heads=8, num_kv_heads=2, head_size=64)
    found = {}
    for name, backend_class in backends.items():
        if why_refused(case, backend_class, registry, device.type):
            continue
        try:
            step = next(PagedLayer(case, backend_class, registry, device).steps())
            step.build()
            found[name] = seconds_each(step.build, HOST_CALLS, device)
        except Exception as problem:  # as above
            print(f"{name}: {problem}", file=sys.stderr)
    return found
