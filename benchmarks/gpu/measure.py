"""Measuring one case on one device: every backend that serves it, and what torch and plain kernels take beside it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import attrs
import torch

from benchmarks.gpu.cases import Case, LatentCase, StateCase
from benchmarks.gpu.steps import BLOCK_SIZE, ERROR, PagedLayer, make_chain, make_layer, needed_bytes, rotation
from benchmarks.gpu.timing import in_a_sentence, seconds_each, time_calls
from kvframe.contract.backend import AttentionBackend
from kvframe.contract.specs import align_up
from kvframe.loading.registry import Registry
from kvframe.selection.chains import bind_chain
from kvframe.testing.case import Request

MAX_FREE = 0.8
"""Share of the device's free memory that a case may take."""

MAX_BACKEND_SECONDS = 60.0
"""What one backend may take of a run, compiling included, so that one which compiles for each case leaves time."""

HOST_REQUESTS = 256
HOST_CALLS = 30


@attrs.frozen(kw_only=True)
class Measured:
    """What came of one backend on one case.

    Attributes:
        seconds: Of one call on the device; None where it was not timed.
        host_seconds: Of one call, until the host has queued it.
        error: How far the output is from the reference, by norms.
        how: ``"graph"`` where calls were replayed from a graph, ``"events"`` where the host launched them.
        reason: Why it was not timed; empty where it was.
    """

    seconds: float | None = None
    host_seconds: float | None = None
    error: float | None = None
    how: str = ""
    reason: str = ""


def measure_case(
    case: Case,
    backends: dict[str, type[AttentionBackend]],
    registry: Registry,
    device: torch.device,
    spent: dict[str, float],
) -> dict[str, Measured]:
    """Return what each system does on a case; adds the seconds that each backend took to ``spent``."""
    if isinstance(case, StateCase):
        return measure_states(case, device)
    found = {}
    for name, backend_class in backends.items():
        if spent[name] > MAX_BACKEND_SECONDS:
            found[name] = Measured(reason="out of time")
            continue
        start = time.monotonic()
        measured = measure(case, backend_class, registry, device)
        spent[name] += time.monotonic() - start
        if measured is not None:
            found[name] = measured
    dense = None if isinstance(case, LatentCase) else measure_dense(case, device)
    if dense is not None:
        found["SDPA, dense"] = dense
    return found


def why_refused(case: Case, backend_class: type[AttentionBackend], registry: Registry, device: str) -> str:
    """Return the codes with which a backend refuses a case's layer; empty if it serves it itself, without copies."""
    capabilities = backend_class.capabilities
    dtype = "bfloat16" if "bfloat16" in capabilities.dtypes else "float32"
    layer = make_layer(case, align_up(BLOCK_SIZE, capabilities.block_size_multiple), registry, dtype)
    if capabilities.needs_copies(layer):
        return "format"
    _, seen, extensions = bind_chain(make_chain(case), layer)
    return " ".join(refusal.code for refusal in capabilities.refusals(seen, device, extensions))


def measure(
    case: Case, backend_class: type[AttentionBackend], registry: Registry, device: torch.device
) -> Measured | None:
    """Return what a backend does on a case; None if it does not serve it."""
    if why_refused(case, backend_class, registry, device.type):
        return None
    if device.type == "cuda" and needed_bytes(case) > MAX_FREE * torch.cuda.mem_get_info(device)[0]:
        return Measured(reason="too little memory")
    try:
        steps = list(PagedLayer(case, backend_class, registry, device).steps())
        error = steps[0].check(steps[0].run())
        if not error <= ERROR:
            return Measured(error=error, reason="wrong")
        timing = time_calls([step.run for step in steps], device)
    except Exception as problem:  # what a library raises must not end the run
        return Measured(reason=in_a_sentence(problem))
    return Measured(seconds=timing.seconds, host_seconds=timing.host_seconds, error=error, how=timing.how)


def measure_states(case: StateCase, device: torch.device) -> dict[str, Measured]:
    """Return what the kernel that updates Mamba-2's states does, and plain torch."""
    found: dict[str, Measured] = {}
    try:
        from kvframe_kernels.triton.states import selective_state_update, selective_state_update_reference
    except ImportError as error:
        return {"kernel": Measured(reason=str(error))}
    generator = torch.Generator(device).manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    rows, heads, size, states = len(case.requests), case.num_heads, case.head_size, case.state_size
    pages = draw(rows + 1, 1, heads, size, states)
    ids = torch.randperm(rows, generator=generator, device=device) + 1
    place = ids, torch.zeros_like(ids)
    x, dt = draw(rows, heads, size), draw(rows, heads, 1).expand(-1, -1, size)
    decay = -draw(heads, 1, 1).exp().expand(-1, size, states)
    arguments = (x, dt, decay, draw(rows, 1, states), draw(rows, 1, states), draw(heads, 1).expand(-1, size))
    exact = selective_state_update_reference(pages.clone(), place, place, *arguments, softplus=True)
    for name, function in (("kernel", selective_state_update), ("plain torch", selective_state_update_reference)):
        own = pages.clone()

        def run(function: Callable[..., torch.Tensor] = function, own: torch.Tensor = own) -> torch.Tensor:
            return function(own, place, place, *arguments, softplus=True)

        error = float((run() - exact).norm() / exact.norm())
        if not error <= ERROR:
            found[name] = Measured(error=error, reason="wrong")
            continue
        timing = time_calls([run], device)
        found[name] = Measured(seconds=timing.seconds, host_seconds=timing.host_seconds, error=error, how=timing.how)
    return found


def measure_dense(case: Case, device: torch.device) -> Measured | None:
    """Return what torch's attention does on the same step without pages: keys and values side by side."""
    lengths = {(request.seq_len, request.num_new) for request in case.requests}
    plain = case.format == "plain" and case.window is None and case.chunk is None and not case.skips
    if type(case) is not Case or not plain or len(lengths) != 1:
        return None
    (num_keys, num_queries), *_ = lengths
    if num_queries not in (1, num_keys):
        return None
    if device.type == "cuda" and case.kv_bytes() > MAX_FREE * torch.cuda.mem_get_info(device)[0]:
        return Measured(reason="too little memory")
    generator = torch.Generator(device).manual_seed(4)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

    batch, size = len(case.requests), case.head_size
    turns = rotation(case)
    query = draw(batch, case.num_heads, num_queries, size)
    pairs = [(draw(batch, case.num_kv_heads, num_keys, size), draw(batch, case.num_kv_heads, num_keys, size))]
    pairs += [(draw(*pairs[0][0].shape), draw(*pairs[0][0].shape)) for _ in range(turns - 1)]

    def attend(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=num_queries > 1, enable_gqa=True
        )

    calls = [lambda pair=pair: attend(*pair) for pair in pairs]
    try:
        timing = time_calls(calls, device)
    except Exception as problem:  # likewise
        return Measured(reason=in_a_sentence(problem))
    return Measured(seconds=timing.seconds, host_seconds=timing.host_seconds, how=timing.how)


def measure_host(
    backends: dict[str, type[AttentionBackend]], registry: Registry, device: torch.device
) -> dict[str, list[float]]:
    """Return how long each backend's metadata of a step of 256 decodes takes to build on the host, in seconds."""
    lengths = torch.randint(100, 2000, (HOST_REQUESTS,), generator=torch.Generator().manual_seed(5)).tolist()
    requests = tuple(Request(length, 1) for length in lengths)
    case = Case(name="host", group="host", requests=requests, num_heads=8, num_kv_heads=2, head_size=64)
    found = {}
    for name, backend_class in backends.items():
        if why_refused(case, backend_class, registry, device.type):
            continue
        try:
            step = next(PagedLayer(case, backend_class, registry, device).steps())
            step.build()
            found[name] = seconds_each(step.build, HOST_CALLS, device)
        except Exception as problem:  # likewise
            print(f"{name}: {problem}", file=sys.stderr)
    return found
