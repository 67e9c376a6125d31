"""Steps of an engine at a batch of 128: how long one takes, how long the device works in it, and how long it idles.

What the host does while the device works costs nothing: the host's time is that in which the device has nothing to do.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch

from benchmarks.gpu.timing import in_a_sentence
from kvframe import Engine, Stack
from kvframe.engine.requests.request import SamplingParams

NUM_STEPS = 24
"""That are timed, and as many again under the profiler."""

WARM_STEPS = 3
GRAPHS = ("off", "decode")
"""Without graphs, and with one of the steps in which every request decodes."""


@attrs.frozen(kw_only=True)
class Workload:
    """A random Llama, and requests that all run at once.

    Attributes:
        num_requests: Requests.
        prompt_len: Tokens of each prompt.
        memory: Of the cache.
        sizes: What transformers' config is given.
    """

    num_requests: int
    prompt_len: int
    memory: str
    sizes: dict[str, int]

    @property
    def name(self) -> str:
        """What the page calls it."""
        return f"{self.num_requests} decodes at {self.prompt_len:,}, {self.sizes['num_hidden_layers']} layers"


WORKLOAD = Workload(
    num_requests=128,
    prompt_len=1024,
    memory="8GiB",
    sizes={
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32768,
    },
)
"""A fourth of the layers of Llama 3 with 8 billion parameters: with all, the device works four times as long."""

TINY_WORKLOAD = Workload(
    num_requests=3,
    prompt_len=20,
    memory="8MiB",
    sizes={
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
    },
)


@attrs.frozen(kw_only=True)
class MeasuredSteps:
    """What came of an engine's steps.

    Attributes:
        seconds: Of a step, the median; None where it was not timed.
        busy_seconds: In which the device works during a step, the mean.
        backends: What the layers were served by.
        reason: Why it was not timed; empty where it was.
    """

    seconds: float | None = None
    busy_seconds: float | None = None
    backends: tuple[str, ...] = ()
    reason: str = ""


def measure_steps(workload: Workload, device: torch.device, backend: str = "auto") -> dict[str, MeasuredSteps]:
    """Return what steps take without graphs and with one, by the names in ``GRAPHS``."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            save_model(workload, Path(folder), device)
        except Exception as problem:  # transformers may be missing, and the disk full
            return dict.fromkeys(GRAPHS, MeasuredSteps(reason=in_a_sentence(problem)))
        found = {}
        for graphs in GRAPHS:
            try:
                found[graphs] = _measure(workload, Path(folder), device, graphs, backend)
            except Exception as problem:  # what a library raises must not end the run
                found[graphs] = MeasuredSteps(reason=in_a_sentence(problem))
        return found


def save_model(workload: Workload, path: Path, device: torch.device) -> None:
    """Save a random model, drawn where it will run."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **workload.sizes,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,
        dtype="bfloat16" if device.type == "cuda" else "float32",
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(path)


def _measure(workload: Workload, path: Path, device: torch.device, graphs: str, backend: str) -> MeasuredSteps:
    with decoding(workload, path, device, graphs, backend) as engine:
        for _ in range(WARM_STEPS):
            engine.step()
        seconds = []
        for _ in range(NUM_STEPS):
            start = time.perf_counter()
            engine.step()  # ends when the host has the tokens
            seconds.append(time.perf_counter() - start)
        busy = busy_seconds(engine, device)
        runner: Any = engine
        replayed = runner._runner.graphs
        if graphs != "off" and (replayed is None or replayed.num_replays < NUM_STEPS):
            return MeasuredSteps(reason="not replayed")
        backends = tuple(sorted({choice.backend for choice in engine.choices}))
    if not busy:
        return MeasuredSteps(seconds=statistics.median(seconds), backends=backends, reason="no kernels were seen")
    return MeasuredSteps(seconds=statistics.median(seconds), busy_seconds=busy, backends=backends)


@contextmanager
def decoding(
    workload: Workload, path: Path, device: torch.device, graphs: str, backend: str = "auto"
) -> Iterator[Engine]:
    """Yield an engine all of whose requests decode from now on, for as many steps as are measured."""
    count = workload.num_requests
    options: dict[str, Any] = {
        "device": str(device),
        "dtype": "bfloat16" if device.type == "cuda" else "float32",
        "max_num_seqs": count,
        "max_num_batched_tokens": max(count, min(16384, count * workload.prompt_len)),
        "max_model_len": 2 * workload.prompt_len + 2 * NUM_STEPS,
        "self_check": False,
        "graphs": "off" if graphs == "off" else [count],
    }
    stack = Stack.from_mapping(
        {
            "cache": {"memory": workload.memory, "prefix_caching": False},
            "engine": options,
            "rules": [{"layers": "*", "backend": backend}],
        }
    )
    # More than can be asked for while prompts are computed.
    params = SamplingParams(max_new_tokens=workload.prompt_len + 2 * NUM_STEPS - 1, ignore_eos=True)
    generator = torch.Generator().manual_seed(6)
    with Engine.from_pretrained(path, stack=stack) as engine:
        for _ in range(count):
            prompt = torch.randint(3, workload.sizes["vocab_size"], (workload.prompt_len,), generator=generator)
            engine.add_request(prompt.tolist(), params)
        computed = -1
        while computed != count:
            before = engine.stats().computed_tokens
            engine.step()
            computed = engine.stats().computed_tokens - before
        yield engine


def busy_seconds(engine: Engine, device: torch.device) -> float:
    """Return how long the device works in a step, the mean over some; on a CPU, which is the device, all of it."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(NUM_STEPS):
            engine.step()
        return (time.perf_counter() - start) / NUM_STEPS
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(NUM_STEPS):
            engine.step()
        torch.cuda.synchronize(device)
    return covered(intervals(profile.events() or ())) / NUM_STEPS


def intervals(events: Iterable[Any]) -> list[tuple[float, float]]:
    """Return when the profiler saw the device at work: start and end in microseconds."""
    return [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]


def covered(found: Sequence[tuple[float, float]]) -> float:
    """Return the seconds that intervals of microseconds cover together, what several cover counted once."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(found):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e6
