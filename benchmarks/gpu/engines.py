"""Measure whole engines on a GPU: kvframe and transformers' continuous batching beside the floor of the device.

``benchmarks/gpu.sh`` calls it after the layers; see benchmarks/README.md. Both systems have a process of their own and
serve the same batches by turns.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import torch
from safetensors import safe_open

from benchmarks.engine import own_engines, serving
from benchmarks.engine.generate import GENERATE
from benchmarks.engine.serving import CONTINUOUS, KVFRAME, Engines
from benchmarks.engine.stepping import Answers, Served, Setting
from benchmarks.engine.workloads import Workload
from benchmarks.gpu.cases import Ceilings
from benchmarks.gpu.engine import dtype_on, profile
from benchmarks.gpu.measure import measure_ceilings
from benchmarks.harness import options
from benchmarks.harness.machine import PEER
from benchmarks.harness.models import save_random, silence_transformers
from benchmarks.harness.pages import Column, case_page, figures
from benchmarks.harness.process import start_engines
from benchmarks.harness.record import benchmark, ratios
from kvframe.config.stack import Stack
from kvframe.contract.sizes import parse_bytes
from kvframe.contract.specs import num_covered
from kvframe.hosting.setup import Setup
from kvframe.loading.plugins import load_plugins

PROMPT, NEW = 1024, 256
WORKLOADS = (
    Workload(
        name="llama-64", model="bench-llama-1b", num_prompts=64, shortest=PROMPT, num_new_tokens=NEW, memory="6GiB"
    ),
    Workload(
        name="windows-64", model="bench-gemma3-1b", num_prompts=64, shortest=PROMPT, num_new_tokens=NEW, memory="6GiB"
    ),
    Workload(
        name="states-64", model="bench-bamba-1b", num_prompts=64, shortest=PROMPT, num_new_tokens=NEW, memory="8GiB"
    ),
    Workload(
        name="llama-256", model="bench-llama-1b", num_prompts=256, shortest=PROMPT, num_new_tokens=NEW, memory="16GiB"
    ),
    Workload(name="tiny-llama", model="bench-llama-tiny", num_prompts=3, shortest=20, num_new_tokens=4, memory="8MiB"),
    Workload(name="tiny-states", model="bench-bamba-tiny", num_prompts=3, shortest=20, num_new_tokens=4, memory="8MiB"),
)
"""Those that begin with ``tiny`` only try the script."""
MAX_NUM_BATCHED_TOKENS = 8192


# --- the floor --------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Floor:
    """The least seconds of a batch: of all prompts, and of the decodes after them."""

    prompts: float
    decodes: float


def floor(workload: Workload, path: Path, stack: Stack, ceilings: Ceilings) -> Floor:
    """Return the least seconds of a batch whose requests all decode together.

    Prompts need the products with all weights but those of the embedding and of the head; their attention is left out.
    A decode reads the weights and the live tokens of each layer once, and reads and writes each state once.
    """
    weights = _weights(path)
    inner = sum(count for name, count in weights.items() if "lm_head" not in name)
    num_tokens = workload.num_prompts * workload.shortest
    layers = [layer.spec for layer in Setup.read(path, stack, load_plugins().registry).layers if layer.spec is not None]

    def live_bytes(n: int) -> float:
        """Return the bytes of a request's caches that its token n reads, and of states that it writes."""
        return sum(
            2 * spec.block_bytes
            if spec.is_per_block
            else num_covered(spec.live_ranges(n)) * spec.block_bytes / spec.block_size
            for spec in layers
        )

    itemsize = getattr(torch, stack.model.dtype).itemsize
    weight_bytes, weight_flops = itemsize * sum(weights.values()), 2 * workload.num_prompts * sum(weights.values())
    lengths = range(workload.shortest + 1, workload.shortest + workload.num_new_tokens)
    num_bytes = [weight_bytes + workload.num_prompts * live_bytes(n) for n in lengths]
    return Floor(
        prompts=2 * inner * num_tokens / ceilings.flops_per_second,
        decodes=sum(
            max(size / ceilings.bytes_per_second, weight_flops / ceilings.flops_per_second) for size in num_bytes
        ),
    )


def _weights(path: Path) -> dict[str, int]:
    """Return the number of values of each weight by its name, without an embedding that is not the head as well."""
    counts: dict[str, int] = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names: list[str] = tensors.keys()
            counts |= {name: math.prod(tensors.get_slice(name).get_shape()) for name in names}
    is_tied = not any("lm_head" in name for name in counts)
    return {name: count for name, count in counts.items() if is_tied or "embed_tokens" not in name}


# --- the measurement --------------------------------------------------------------------------------------------------


class ProfiledAnswers(Answers):
    """Answers the same questions, and serves a batch under the profiler if asked to."""

    def __call__(self, question: dict[str, Any]) -> Any:
        """Answer; a profiled batch has the ``busy_seconds`` of the device."""
        if not question.pop("is_profiled", False):
            return super().__call__(question)
        served: list[Served] = []
        work = profile(lambda: served.append(super(ProfiledAnswers, self).__call__(question)), _device())
        return {**served[0], "busy_seconds": work.busy_seconds}


def load(system: str) -> tuple[dict[str, str], Answers]:
    """Return the versions that a system's figures depend on, and the answering object, in a process of its own."""
    torch.set_grad_enabled(False)
    return own_engines.load(system, ProfiledAnswers)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def systems_of(workload: Workload) -> tuple[str, str]:
    """Return the systems that serve a workload. Continuous batching of transformers takes no states."""
    return KVFRAME, GENERATE if "states" in workload.name else CONTINUOUS


def measure(workload: Workload, engines: Engines, repeats: int, ceilings: Ceilings) -> dict[str, Any]:
    """Let both systems take turns on the same batches, and profile one more batch of each."""
    device = _device()
    longest = workload.shortest + workload.num_new_tokens
    dtype = str(dtype_on(device)).removeprefix("torch.")
    model = {"model": {"device": str(device), "dtype": dtype}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        with device:
            save_random(workload.model, path, dtype_on(device))
        vocab_size = json.loads((path / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        least = floor(workload, path, Stack.from_mapping(model), ceilings)
        setting = Setting(
            path=folder,
            memory=parse_bytes(workload.memory),
            max_num_seqs=workload.num_prompts,
            max_model_len=longest + 1,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            dtype=dtype,
            device=str(device),
            graphs=device.type == "cuda",
        )
        serving.load(engines, setting)

        def draw(repeat: int) -> tuple[Sequence[Sequence[int]], int]:
            return workload.prompts(repeat, vocab_size), workload.num_new_tokens

        served = serving.serve_by_turns(
            workload.name, engines, repeats, draw, lambda _: None, are_equal=device.type == "cpu"
        )
        busy = {
            name: engine.ask(
                {
                    "system": name,
                    "prompts": draw(repeats)[0],
                    "num_new_tokens": workload.num_new_tokens,
                    "is_profiled": True,
                }
            )["busy_seconds"]
            for name, engine in engines.items()
        }
    return {
        "batch": attrs.asdict(workload),
        "floor": attrs.asdict(least),
        "systems": {name: _figures(workload, rounds, busy[name], least) for name, rounds in served.items()},
        "times_as_fast": statistics.median(
            ratios(*([result["seconds"] for result in served[name]] for name in (systems_of(workload)[1], KVFRAME)))
        ),
    }


def _figures(workload: Workload, rounds: Sequence[Served], busy_seconds: float, least: Floor) -> dict[str, Any]:
    num_tokens = workload.num_prompts * workload.num_new_tokens
    decodes = [result["seconds"] - result["first_seconds"] for result in rounds]
    seconds = statistics.median(result["seconds"] for result in rounds)
    return {
        "speed": [num_tokens / result["seconds"] for result in rounds],
        "first": [statistics.median(result["waits"]) for result in rounds],
        "of_floor": [(least.prompts + least.decodes) / result["seconds"] for result in rounds],
        "of_decode_floor": [least.decodes / duration for duration in decodes],
        "idle": max(0.0, 1 - busy_seconds / seconds),
        "equal": statistics.fmean(result["equal_prompts"] for result in rounds),
    }


# --- the page ---------------------------------------------------------------------------------------------------------

COLUMNS: dict[str, Column] = {
    "speed": ("generated tokens/s", "{:,.0f}"),
    "first": ("first token, ms", "{:,.1f}", 1000),
    "of_floor": ("of the floor's rate", "{:.2f}"),
    "of_decode_floor": ("decodes, of the floor's rate", "{:.2f}"),
    "idle": ("the device waits", "{:.0%}"),
    "equal": ("prompts with kvframe's tokens", "{:.0%}"),
}


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page as Markdown."""
    note = (
        f"On {record['device']}. The floor is computed: prompts at the rate of a matrix product, without their "
        "attention, and decodes at the rate of a copy, all requests together. The device waits when no kernel and no "
        "copy runs on it, in a further batch under a profiler. In 16 bits, tokens differ where two logits are almost "
        "equal."
    )
    return case_page("Whole engines on a GPU", record, "workloads", _section, note)


def _section(measured: Mapping[str, Any]) -> Iterator[str]:
    if "reason" in measured:
        yield f"Not measured: {measured['reason']}."
        return
    batch, least = measured["batch"], measured["floor"]
    yield (
        f"Model `{batch['model']}`; {batch['num_prompts']} prompts of {batch['shortest']:,} tokens, "
        f"{batch['num_new_tokens']} new tokens each. The floor is {least['prompts']:.3f} s for prompts and "
        f"{least['decodes']:.3f} s for decodes. kvframe is {measured['times_as_fast']:.2f} times as fast."
    )
    yield figures(measured["systems"], COLUMNS)


@benchmark("gpu_engines", write_report, cases="workloads")
@options.repeats(2)
@options.threads(1)
@options.choose("--workload", "workloads", WORKLOADS)
@click.option("--budget", type=float, default=200.0, show_default=True, help="Seconds after which none is started.")
def main(repeats: int, threads: int, workloads: Sequence[Workload], budget: float) -> dict[str, Any]:
    """Measure the workloads; write one JSON file and one page."""
    silence_transformers()
    end = time.monotonic() + budget
    device = _device()
    ceilings = measure_ceilings(device)
    modules = {name: ["benchmarks.gpu.engines", name] for workload in workloads for name in systems_of(workload)}
    results: dict[str, Any] = {}
    with start_engines(modules, PEER, threads=threads) as engines:
        for workload in workloads:
            if time.monotonic() > end:
                results[workload.name] = {"reason": "the time was over"}
                continue
            own = {name: engines[name] for name in systems_of(workload)}
            results[workload.name] = measure(workload, own, repeats, ceilings)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    return {"repeats": repeats, "device": name, "ceilings": attrs.asdict(ceilings), "workloads": results}


if __name__ == "__main__":
    main()
