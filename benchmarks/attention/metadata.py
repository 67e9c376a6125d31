"""Measure what a step's attention metadata costs on the host. The README of benchmarks says how."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import attrs
import torch
from kvframe_chunked_local.spec import ChunkedLocalSpec
from kvframe_chunked_local.wrapper import ChunkedLocal
from kvframe_decode_only.wrapper import DecodeOnly

from benchmarks.attention.metadata_cases import (
    BATCHES,
    BLOCK_SIZE,
    CPU,
    LONGEST,
    NUM_GROUPS,
    WINDOWS,
    WITHOUT_MEMORY,
    TritonWithoutGPU,
    tables_of,
    ten_layers,
)
from benchmarks.harness import options
from benchmarks.harness.pages import heading, medians, page, spread, table
from benchmarks.harness.record import benchmark, progress
from kvframe.attention.layers import AttentionLayers
from kvframe.attention.staging import Staging
from kvframe.attention.step import build_metadata
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.specs import LayerSpec, QuerySpec
from kvframe.selection.chains import bind_chain

CHUNK = 512
CALLS = 20
"""Calls that are timed together: one alone is near what the clock can tell."""

NUM_REQS = 256
SMALL, LARGE = QuerySpec(num_heads=8, head_size=64, scale=0.125), QuerySpec(num_heads=32, head_size=128, scale=0.1)
TRITON_LIMIT = 50.0
"""Microseconds for each group."""


@attrs.frozen
class Part:
    """One part of a step's host work.

    Attributes:
        name: For the results.
        run: Does it.
        num_elements: Block ids or slots that it reads: the size of the dense operation beside it.
        limit: Microseconds that it is to stay within on the machine of the recorded run; None for no limit.
    """

    name: str
    run: Callable[[], Any]
    num_elements: int
    limit: float | None


def one_group(kind: str, num_reqs: int = NUM_REQS) -> CommonAttentionMetadata:
    """Return the metadata of a batch of one kind for one group."""
    (metadata,) = build_metadata(BATCHES[kind](num_reqs), tables_of(1, num_reqs), CPU)
    return metadata


def wrapper_parts() -> Iterator[Part]:
    """Yield the transform to virtual requests, and the selection of generating tokens."""
    spec = ChunkedLocalSpec(chunk=CHUNK, block_size=BLOCK_SIZE, num_kv_heads=2, head_size=SMALL.head_size)
    ((chunked,), _, _) = bind_chain([ChunkedLocal()], LayerSpec(name="local", spec=spec, query=SMALL))
    for num_reqs, limit in ((64, 60.0), (NUM_REQS, 120.0)):
        for kind in BATCHES:
            metadata, name = one_group(kind, num_reqs), f"chunked_local, {num_reqs} requests, {kind}"
            yield Part(name, partial(chunked, metadata), metadata.block_table.numel(), limit)
    for state, kind, most in (("idle", "decodes", None), ("armed", "mixed", 15.0)):
        metadata, name = one_group(kind), f"decode_only, {NUM_REQS} requests, {state}"
        yield Part(name, partial(DecodeOnly(), metadata), metadata.slot_mapping.numel(), most)


def model_parts() -> Iterator[Part]:
    """Yield all metadata of a model of ten cache groups, from the batch to what the layers read."""
    for windows, sizes in WINDOWS.items():
        layers = ten_layers(sizes, SMALL, 2, "torch")
        for kind, limit in (("decodes", 1000.0), ("mixed", 2500.0)):
            yield _step(f"ten groups, {windows}, {NUM_REQS} requests, {kind}", layers, kind, limit)


def triton_parts() -> Iterator[Part]:
    """Yield the same for Triton's kernels up to the copy to a GPU, and one group's share of it."""
    for windows, sizes in WINDOWS.items():
        layers = ten_layers(sizes, LARGE, 8, TritonWithoutGPU.name, WITHOUT_MEMORY)
        for kind in BATCHES:
            name = f"triton, ten groups, {windows}, {NUM_REQS} requests, {kind}"
            yield _step(name, layers, kind, NUM_GROUPS * TRITON_LIMIT)
    builder, staging = layers.groups[0].builder, Staging(WITHOUT_MEMORY)

    def share(metadata: CommonAttentionMetadata) -> None:
        staging.to_device(builder.build(metadata))

    for kind in BATCHES:
        metadata, name = one_group(kind), f"triton, one group's share, {NUM_REQS} requests, {kind}"
        yield Part(name, partial(share, metadata), metadata.block_table.numel(), TRITON_LIMIT)


def _step(name: str, layers: AttentionLayers, kind: str, limit: float) -> Part:
    """Return all metadata of one step of a model of ten cache groups."""
    batch, tables = BATCHES[kind](NUM_REQS), tables_of(NUM_GROUPS, NUM_REQS)

    def run() -> None:
        # A step's batch is made anew in each step; what it caches is part of the work.
        layers.begin_step(build_metadata(attrs.evolve(batch), tables, CPU))

    return Part(name, run, NUM_GROUPS * NUM_REQS * -(-LONGEST // BLOCK_SIZE), limit)


def microseconds(run: Callable[[], Any]) -> float:
    """Return what one of ``CALLS`` calls takes."""
    start = time.perf_counter()
    for _ in range(CALLS):
        run()
    return 1e6 * (time.perf_counter() - start) / CALLS


def measure(part: Part, repeats: int) -> dict[str, Any]:
    """Time a part and one dense operation of its size by turns; the first repeat warms up and is not counted."""
    values = torch.zeros(part.num_elements, dtype=torch.int32)
    times = [(microseconds(part.run), microseconds(lambda: values + 1)) for _ in range(repeats + 1)][1:]
    return {
        "microseconds": [own for own, _ in times],
        "dense_microseconds": [dense for _, dense in times],
        "dense_elements": part.num_elements,
        "times_dense": statistics.median(own / dense for own, dense in times),
        "limit": part.limit,
    }


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    rows = [
        (
            name,
            spread(part["microseconds"], "{:,.1f}"),
            "" if part["limit"] is None else f"{part['limit']:,.0f}",
            f"{statistics.median(part['dense_microseconds']):,.1f}",
            f"{part['times_dense']:.1f}",
        )
        for name, part in record["parts"].items()
    ]
    title, note = "Attention metadata: host time per step", "float32, all on the host."
    heads = ("", "µs per step", "at most", "one dense operation, µs", "times that")
    return page(heading(title, record, medians(record), note), table(heads, rows))


@benchmark("metadata", write_report)
@options.repeats(11)
@options.threads(1)
def main(repeats: int, threads: int) -> dict[str, Any]:
    """Measure the parts and write one JSON file and one page of results."""
    parts = [*wrapper_parts(), *model_parts(), *triton_parts()]
    found: dict[str, Any] = {}
    with progress("measuring", len(parts)) as advance, torch.inference_mode():
        # The C library keeps memory for a process that has freed large tensors, as one that runs a model has: all parts
        # are to find it so.
        for part in parts:
            part.run()
        for part in parts:
            found[part.name] = measure(part, repeats)
            advance(1)
    return {"repeats": repeats, "parts": found}


if __name__ == "__main__":
    main()
