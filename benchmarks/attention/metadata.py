"""Measure the host's time for a step's attention metadata. See benchmarks/README.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import attrs
import numpy as np
import torch
from kvframe_chunked_local.spec import ChunkedLocalSpec
from kvframe_chunked_local.wrapper import ChunkedLocal
from kvframe_decode_only.wrapper import DecodeOnly
from kvframe_sliding_window.spec import SlidingWindowSpec
from kvframe_triton.backend import TritonBackend

from benchmarks.harness import options
from benchmarks.harness.pages import Column, figures, heading, medians, page
from benchmarks.harness.process import timed
from benchmarks.harness.record import benchmark, by_turns, counted, progress, ratios
from kvframe import Stack
from kvframe.attention.batch_metadata import StepBatch, build_metadata
from kvframe.attention.layers import Layers
from kvframe.attention.staging import Staging
from kvframe.builtin.full_attention import FullAttentionSpec
from kvframe.cache.block_table import BlockTables
from kvframe.contract import hookimpl
from kvframe.contract.hookspecs import Register
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.specs import LayerSpec, QuerySpec
from kvframe.loading.plugins import load_plugins
from kvframe.planning.groups import Grouping, KVCacheGroup
from kvframe.selection.choice import bind_chain
from kvframe.selection.select import select_backends

SEED = 11
CPU = torch.device("cpu")
WITHOUT_MEMORY = torch.device("meta")
"""Stands for a GPU: a copy to it costs the host's work and moves no bytes."""

CALLS = 20
"""Calls that are timed together, because a single one is near the clock's resolution."""

KINDS = ("decodes", "mixed")
NUM_REQS = 256
BLOCK_SIZE, CHUNK = 16, 512
SHORTEST, LONGEST = 100, 2000
NUM_GROUPS = 10
WINDOWS: Mapping[str, Sequence[int]] = {
    "windows 32 to 288": range(32, 289, 32),
    "windows 16 to 4,096": [16 << i for i in range(9)],
}
SMALL, LARGE = QuerySpec(num_heads=8, head_size=64, scale=0.125), QuerySpec(num_heads=32, head_size=128, scale=0.1)
TRITON_LIMIT = 50.0
"""Microseconds for each group."""


def make_batch(kind: str, num_reqs: int) -> StepBatch:
    """Return a step of decodes. In a mixed step, every 32nd request computes a chunk of its prompt instead."""
    source = np.random.default_rng(SEED)
    lengths = source.integers(SHORTEST, LONGEST + 1, num_reqs)
    new = np.ones_like(lengths)
    if kind == "mixed":
        new[31::32] = np.minimum(source.integers(64, 257, num_reqs // 32), lengths[31::32])
        lengths[63::64] = new[63::64]
    return StepBatch(
        rows=np.arange(num_reqs), num_computed=lengths - new, query_lens=new, generating_indices=np.cumsum(new) - 1
    )


def tables_of(num_groups: int, num_reqs: int) -> BlockTables:
    """Return block tables in which every block has a page."""
    tables = BlockTables(num_reqs, LONGEST, [BLOCK_SIZE] * num_groups)
    for stack in tables.stacks:
        stack.ids[:] = np.random.default_rng(SEED).integers(1, 1 << 16, stack.ids.shape)
    return tables


def ten_layers(
    windows: Sequence[int], query: QuerySpec, num_kv_heads: int, backend: str, device: torch.device = CPU
) -> Layers:
    """Return a layer of full attention and nine with windows, each with a cache group of its own without memory."""
    sizes: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": num_kv_heads, "head_size": query.head_size}
    specs = [FullAttentionSpec(**sizes), *(SlidingWindowSpec(window=size, **sizes) for size in windows)]
    layers = [LayerSpec(name=f"layer{index}", spec=spec, query=query) for index, spec in enumerate(specs)]
    stack = Stack.from_mapping({"rules": [{"layers": "*", "backend": backend}]})
    choices = select_backends(layers, stack, load_plugins(plugins=[_plugin()]).registry, "cpu")
    groups = tuple(
        KVCacheGroup(index=index, spec=spec, layers=(layer.name,), stored=(spec,))
        for index, (layer, spec) in enumerate(zip(layers, specs, strict=True))
    )
    assert len(groups) == NUM_GROUPS
    views: dict[str, Any] = {layer.name: {} for layer in layers}
    return Layers(layers, choices, Grouping(groups=groups, follows={}), views, device)


class TritonWithoutGPU(TritonBackend):
    """The Triton backend on the host: it builds a GPU's metadata, and its kernels are never called."""

    name = "triton_without_gpu"
    capabilities = attrs.evolve(TritonBackend.capabilities, devices=frozenset({"cpu"}))

    @classmethod
    def unusable_reason(cls) -> str | None:
        """Return None: the metadata is built on the host."""
        return None


def _plugin() -> ModuleType:
    """Return a plugin that registers the backend without a GPU."""

    def kvframe_register_backends(register: Register) -> None:
        register(TritonWithoutGPU.name, TritonWithoutGPU)

    module = ModuleType("benchmark_of_metadata")
    vars(module)["kvframe_register_backends"] = hookimpl(kvframe_register_backends)
    return module


@attrs.frozen
class Part:
    """One part of a step's host work.

    Attributes:
        name: The name in the record.
        run: Does the work once.
        num_elements: The block ids or slots that the work reads; a dense operation of this size is timed beside it.
        limit: The aim in microseconds on the machine of the recorded run; None for no aim.
    """

    name: str
    run: Callable[[], Any]
    num_elements: int
    limit: float | None


def one_group(kind: str, num_reqs: int = NUM_REQS) -> CommonAttentionMetadata:
    """Return the metadata of a batch of one kind for one group."""
    (metadata,) = build_metadata(make_batch(kind, num_reqs), tables_of(1, num_reqs), CPU)
    return metadata


def wrapper_parts() -> Iterator[Part]:
    """Yield the work of both wrappers: making virtual requests, and selecting generating tokens."""
    spec = ChunkedLocalSpec(chunk=CHUNK, block_size=BLOCK_SIZE, num_kv_heads=2, head_size=SMALL.head_size)
    ((chunked,), _, _) = bind_chain([ChunkedLocal()], LayerSpec(name="local", spec=spec, query=SMALL))
    for num_reqs, limit in ((64, 60.0), (NUM_REQS, 120.0)):
        for kind in KINDS:
            metadata, name = one_group(kind, num_reqs), f"chunked_local, {num_reqs} requests, {kind}"
            yield Part(name, partial(chunked, metadata), metadata.block_table.numel(), limit)
    for state, kind, aim in (("idle", "decodes", None), ("armed", "mixed", 15.0)):
        metadata, name = one_group(kind), f"decode_only, {NUM_REQS} requests, {state}"
        yield Part(name, partial(DecodeOnly(), metadata), metadata.slot_mapping.numel(), aim)


def model_parts() -> Iterator[Part]:
    """Yield the whole metadata of a model of ten cache groups, from the batch to what its layers read."""
    for windows, sizes in WINDOWS.items():
        layers = ten_layers(sizes, SMALL, 2, "torch")
        for kind, limit in (("decodes", 1000.0), ("mixed", 2500.0)):
            yield _step(f"ten groups, {windows}, {NUM_REQS} requests, {kind}", layers, kind, limit)


def triton_parts() -> Iterator[Part]:
    """Yield the same for Triton's kernels, the copy to a GPU included, and one group's share of it."""
    for windows, sizes in WINDOWS.items():
        layers = ten_layers(sizes, LARGE, 8, TritonWithoutGPU.name, WITHOUT_MEMORY)
        for kind in KINDS:
            name = f"triton, ten groups, {windows}, {NUM_REQS} requests, {kind}"
            yield _step(name, layers, kind, NUM_GROUPS * TRITON_LIMIT)
    builder, staging = layers.groups[0].builder, Staging(WITHOUT_MEMORY)

    def share(metadata: CommonAttentionMetadata) -> None:
        staging.to_device(builder.build(metadata))

    for kind in KINDS:
        metadata, name = one_group(kind), f"triton, one group's share, {NUM_REQS} requests, {kind}"
        yield Part(name, partial(share, metadata), metadata.block_table.numel(), TRITON_LIMIT)


def _step(name: str, layers: Layers, kind: str, limit: float) -> Part:
    """Return all metadata of one step of a model of ten cache groups."""
    batch, tables = make_batch(kind, NUM_REQS), tables_of(NUM_GROUPS, NUM_REQS)

    def run() -> None:
        # A step has a new batch, so the values that a batch caches are computed in each step.
        layers.begin_step(build_metadata(attrs.evolve(batch), tables, CPU))

    return Part(name, run, NUM_GROUPS * NUM_REQS * -(-LONGEST // BLOCK_SIZE), limit)


def microseconds(run: Callable[[], Any]) -> float:
    """Return the time of one of ``CALLS`` calls."""

    def run_all() -> None:
        for _ in range(CALLS):
            run()

    return 1e6 * timed(run_all)[0] / CALLS


def measure(part: Part, repeats: int) -> dict[str, Any]:
    """Let a part and one dense operation of its size take turns; the first round warms up and is not counted."""
    values = torch.zeros(part.num_elements, dtype=torch.int32)
    runs: dict[str, Callable[[], Any]] = {"microseconds": part.run, "dense_microseconds": lambda: values + 1}
    times = counted(by_turns([*runs], repeats, lambda name, _: microseconds(runs[name]), warm_up=True))
    return {
        **times,
        "dense_elements": part.num_elements,
        "times_dense": statistics.median(ratios(times["microseconds"], times["dense_microseconds"])),
        "limit": part.limit,
    }


COLUMNS: dict[str, Column] = {
    "microseconds": ("µs per step", "{:,.1f}"),
    "limit": ("at most", "{:,.0f}"),
    "dense": ("one dense operation, µs", "{:,.1f}"),
    "times_dense": ("times that", "{:.1f}"),
}


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    rows = {
        name: {**part, "dense": statistics.median(part["dense_microseconds"])} for name, part in record["parts"].items()
    }
    title, note = "Attention metadata: host time per step", "float32, all on the host."
    return page(heading(title, record, medians(record), note), figures(rows, COLUMNS))


@benchmark("metadata", write_report)
@options.repeats(11)
@options.threads(1)
def main(repeats: int, threads: int) -> dict[str, Any]:
    """Measure the parts; write one JSON file and one page."""
    parts = [*wrapper_parts(), *model_parts(), *triton_parts()]
    results: dict[str, Any] = {}
    with progress("measuring", len(parts)) as advance, torch.inference_mode():
        # The C library keeps memory for a process that has freed large tensors, as an engine's process has. Running
        # every part once brings all of them into this state.
        for part in parts:
            part.run()
        for part in parts:
            results[part.name] = measure(part, repeats)
            advance(1)
    return {"repeats": repeats, "parts": results}


if __name__ == "__main__":
    main()
