"""Measure steps of an engine with a batch of 128: the time of a step, and the time in which the device works.

The host's work costs nothing while the device works, so the host's time is the time in which the device is idle.
"""

from __future__ import annotations

import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from kvframe_engine.requests.request import SamplingParams

from benchmarks.engine.workloads import Workload
from benchmarks.gpu.measure import in_a_sentence
from benchmarks.harness.process import timed
from kvframe import Engine

NUM_STEPS, WARM_STEPS = 24, 3
"""The number of timed steps, and of steps before them. As many steps as are timed are profiled afterwards."""
GRAPHS = ("off", "decode", "decode, overlap", "decode, overlap, compiled")
"""Without graphs; with a graph of the steps in which every request decodes; with steps that overlap, too; and with a
compiled model, too."""
MAX_KERNELS = 12
"""The number of kernels that are named, the longest first."""

LARGE, TINY = "128 decodes at 1,024, 8 layers", "3 decodes at 20, 2 layers"
WORKLOAD = Workload(name=LARGE, model="bench-llama-8b", num_prompts=128, shortest=1024, memory="8GiB")
TINY_WORKLOAD = Workload(name=TINY, model="bench-llama-tiny", num_prompts=3, shortest=20, memory="8MiB")

Found = dict[str, Any]
"""The median ``seconds`` of a step, the mean ``busy_seconds`` in which the device works in a step, the seconds of its
longest ``kernels`` in a step, and the layers' ``backends``. If the times could not be measured, both are None and
``reason`` says why."""


def not_measured(why: str) -> Found:
    """Return the figures of steps that could not be measured."""
    return {"seconds": None, "busy_seconds": None, "kernels": {}, "backends": [], "reason": why}


def measure_steps(
    workload: Workload, device: torch.device, backend: str = "auto", modes: Sequence[str] = GRAPHS
) -> dict[str, Found]:
    """Return the figures of steps in some of the modes ``GRAPHS``, by their names."""

    def measured(path: Path, graphs: str) -> Found:
        try:
            from benchmarks.harness.models import save_random

            if not any(path.iterdir()):
                with device:
                    save_random(workload.model, path, dtype_on(device))
            return _measure(workload, path, device, graphs, backend)
        except Exception as problem:  # An error of a library must not end the run; transformers may be missing.
            return not_measured(in_a_sentence(problem))

    with tempfile.TemporaryDirectory() as folder:
        return {graphs: measured(Path(folder), graphs) for graphs in modes}


def dtype_on(device: torch.device) -> torch.dtype:
    """Return the dtype of engines."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _measure(workload: Workload, path: Path, device: torch.device, graphs: str, backend: str) -> Found:
    with decoding(workload, path, device, graphs, backend) as engine:
        for _ in range(WARM_STEPS):
            engine.step()
        # A step ends when the host has its tokens; if steps overlap, the device computes the next one then.
        seconds = statistics.median(timed(engine.step)[0] for _ in range(NUM_STEPS))
        work = profile(lambda: [engine.step() for _ in range(NUM_STEPS)], device)
        runner: Any = engine
        replayed = runner._runner.graphs
        if graphs != "off" and (replayed is None or replayed.num_replays < NUM_STEPS):
            return not_measured("not replayed")
        backends = sorted({choice.backend for choice in engine.choices})
    return {
        "seconds": seconds,
        "busy_seconds": work.busy_seconds / NUM_STEPS or None,
        "kernels": {name: seconds / NUM_STEPS for name, seconds in work.longest_kernels()},
        "backends": backends,
        "reason": "" if work.busy_seconds else "no kernels were seen",
    }


@contextmanager
def decoding(workload: Workload, path: Path, device: torch.device, graphs: str, backend: str) -> Iterator[Engine]:
    """Yield an engine whose requests all decode, for as many steps as are measured."""
    count, length = workload.num_prompts, workload.shortest
    tables: dict[str, Any] = {
        "model": {
            "device": str(device),
            "dtype": str(dtype_on(device)).removeprefix("torch."),
            "graphs": "off" if graphs == "off" else [count],
            "compile": "compiled" in graphs,
        },
        "limits": {
            "max_num_seqs": count,
            "max_num_batched_tokens": max(count, min(16384, count * length)),
            "max_model_len": 2 * length + 2 * NUM_STEPS,
        },
        "engine": {"self_check": False, "overlap": "on" if "overlap" in graphs else "off"},
    }
    # More tokens than are generated while prompts are computed.
    params = SamplingParams(max_new_tokens=length + 2 * NUM_STEPS - 1, ignore_eos=True)
    with Engine.from_pretrained(path, stack=workload.stack(backend, **tables)) as engine:
        for prompt in workload.prompts(0, engine.model.description.vocab_size or 0):
            engine.add_request(prompt, params)
        computed = -1
        while computed != count:
            before = engine.stats().computed_tokens
            engine.step()
            computed = engine.stats().computed_tokens - before
        yield engine


@attrs.frozen
class Work:
    """What a device did while a function ran.

    Attributes:
        busy_seconds: The time in which it worked.
        kernels: The seconds of each kernel and kind of copy, by name; empty on a CPU.
    """

    busy_seconds: float
    kernels: Mapping[str, float]

    def longest_kernels(self) -> list[tuple[str, float]]:
        """Return the names and seconds of the kernels that took the most time, the longest first."""
        return sorted(self.kernels.items(), key=lambda item: -item[1])[:MAX_KERNELS]


def profile(run: Callable[[], object], device: torch.device) -> Work:
    """Run a function and return what the device did meanwhile. A CPU works the whole time."""
    if device.type != "cuda":
        return Work(timed(run)[0], {})
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize(device)
    events: Iterable[Any] = profiled.events() or ()
    intervals = []
    kernels: dict[str, float] = defaultdict(float)
    for event in events:
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False):
            interval = (event.time_range.start, event.time_range.end)
            intervals.append(interval)
            kernels[short_name(event.name)] += (interval[1] - interval[0]) / 1e6
    return Work(covered(intervals), kernels)


def short_name(kernel: str) -> str:
    """Return a kernel's name without its result, namespaces and arguments; with the operation of torch's kernels."""
    name = re.split(r"[<(]", re.sub(r"\(anonymous namespace\)::", "", kernel).removeprefix("void "), maxsplit=1)[0]
    operation = re.search(r"\w*Functor\w*|\w+_kernel_cuda", kernel)
    return f"{name.strip().rpartition('::')[2]}{f' ({operation[0]})' if operation else ''}"


def covered(times: Sequence[tuple[float, float]]) -> float:
    """Return the seconds that intervals of microseconds cover together; overlaps count once."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(times):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e6
