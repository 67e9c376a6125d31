"""Measure what a step's attention metadata costs on the host, and record the results.

    python -m benchmarks.attention.metadata [--repeats N] [--threads N] [--results FOLDER]

benchmarks/README.md says how, and what the figures mean.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import click
import torch
from kvframe_chunked_local.spec import ChunkedLocalSpec
from kvframe_chunked_local.wrapper import ChunkedLocal
from kvframe_decode_only.wrapper import DecodeOnly
from kvframe_sliding_window.spec import SlidingWindowSpec
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.attention.metadata_cases import (
    CPU,
    QUERY,
    SIZES,
    WINDOWS,
    Part,
    decode_batch,
    layers_of,
    mixed_batch,
    model_part,
    tables_of,
    windowed_layers,
)
from benchmarks.attention.metadata_triton import triton_parts
from benchmarks.harness.pages import heading, medians, spread, table
from benchmarks.harness.record import benchmark
from kvframe.attention.step import build_metadata
from kvframe.cli.render import progress
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.specs import LayerSpec
from kvframe.selection.chains import bind_chain

CHUNK = 512
CALLS = 20
"""Calls that are timed together: one alone is near what the clock can tell."""


def chunked_parts() -> Iterator[Part]:
    """Yield the transform to virtual requests."""
    layer = LayerSpec(name="local", spec=ChunkedLocalSpec(chunk=CHUNK, **SIZES), query=QUERY)
    ((wrapper,), _, _) = bind_chain([ChunkedLocal()], layer)
    for num_reqs, limit in ((64, 60.0), (256, 120.0)):
        for kind, make in (("decodes", decode_batch), ("mixed", mixed_batch)):
            (metadata,) = build_metadata(make(num_reqs), tables_of(1, num_reqs), CPU)
            yield Part(
                name=f"chunked_local, {num_reqs} requests, {kind}",
                run=lambda metadata=metadata: wrapper(metadata),  # type: ignore[misc]
                num_elements=metadata.block_table.numel(),
                limit=limit,
                upload=uploaded_bytes(wrapper, metadata),
            )


def decode_only_parts() -> Iterator[Part]:
    """Yield the selection of generating tokens, where all generate and where not."""
    wrapper = DecodeOnly()
    for state, make, limit in (("idle", decode_batch, None), ("armed", mixed_batch, 15.0)):
        (metadata,) = build_metadata(make(256), tables_of(1, 256), CPU)
        yield Part(
            name=f"decode_only, 256 requests, {state}",
            run=lambda metadata=metadata: wrapper(metadata),  # type: ignore[misc]
            num_elements=metadata.slot_mapping.numel(),
            limit=limit,
            upload=uploaded_bytes(wrapper, metadata),
        )


def model_parts() -> Iterator[Part]:
    """Yield all metadata of a model of ten cache groups, from the batch to what the layers read."""
    for windows, sizes in WINDOWS.items():
        layers = windowed_layers(sizes, "torch")
        for kind, make in (("decodes", decode_batch), ("mixed", mixed_batch)):
            limit = 1000.0 if kind == "decodes" else 2500.0
            yield model_part(f"ten groups, {windows}, 256 requests, {kind}", layers, make(256), limit)
    # Nine groups take over what was built for the first; or there is nothing to build.
    equal = layers_of([SlidingWindowSpec(window=256, **SIZES)] * 10, "torch")
    yield model_part("ten groups, all windows of 256, 256 requests, decodes", equal, decode_batch(256))
    passing = windowed_layers(WINDOWS["windows 32 to 288"], "torch_reference")
    for kind, make in (("decodes", decode_batch), ("mixed", mixed_batch)):
        yield model_part(f"ten groups, nothing built, 256 requests, {kind}", passing, make(256))


class _Uploads(TorchDispatchMode):
    """Counts the bytes that are copied from one device to another."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("device", args[0].device) != args[0].device:
            self.num_bytes += args[0].nbytes
        return func(*args, **kwargs)


def uploaded_bytes(wrapper: Callable[[CommonAttentionMetadata], Any], metadata: CommonAttentionMetadata) -> int:
    """Return the bytes that a wrapper copies to the device, with torch's device without memory as the device."""
    fields = ("query_start_loc", "seq_lens", "block_table", "slot_mapping", "generating_indices")
    on_device = attrs.evolve(metadata, **{name: getattr(metadata, name).to("meta") for name in fields})
    with _Uploads() as uploads:
        wrapper(on_device)
    return uploads.num_bytes


def microseconds(run: Callable[[], Any]) -> float:
    """Return what one of ``CALLS`` calls takes."""
    start = time.perf_counter()
    for _ in range(CALLS):
        run()
    return 1e6 * (time.perf_counter() - start) / CALLS


def measure(part: Part, repeats: int) -> dict[str, Any]:
    """Time a part and one dense operation of its size by turns; the first repeat warms up and is not counted."""
    values = torch.zeros(part.num_elements, dtype=torch.int32)
    own, dense = [], []
    for repeat in range(-1, repeats):
        times = microseconds(part.run), microseconds(lambda: values + 1)
        if repeat >= 0:
            own.append(times[0])
            dense.append(times[1])
    return {
        "microseconds": own,
        "dense_microseconds": dense,
        "dense_elements": part.num_elements,
        "times_dense": statistics.median(one / other for one, other in zip(own, dense, strict=True)),
        "limit": part.limit,
        "uploaded_bytes": part.upload,
    }


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    lines = heading(
        "Attention metadata: host time per step", record["machine"], medians(record), "float32, all on the host."
    )
    rows = []
    for name, part in record["parts"].items():
        limit, num_bytes = part["limit"], part["uploaded_bytes"]
        rows.append(
            (
                name,
                spread(part["microseconds"], "{:,.1f}"),
                "" if limit is None else f"{limit:,.0f}",
                f"{statistics.median(part['dense_microseconds']):,.1f}",
                f"{part['times_dense']:.1f}",
                "" if num_bytes is None else f"{num_bytes:,}",
            )
        )
    heads = ("", "µs per step", "at most", "one dense operation, µs", "times that", "bytes uploaded")
    return "\n".join([*lines, "", *table(heads, rows)]) + "\n"


@benchmark("metadata", write_report)
@click.option("--repeats", type=click.IntRange(min=1), default=11, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Of torch.")
def main(repeats: int, threads: int) -> dict[str, Any]:
    """Measure the parts and write one JSON file and one page of results."""
    parts = [*chunked_parts(), *decode_only_parts(), *model_parts(), *triton_parts()]
    found: dict[str, Any] = {}
    with progress("measuring", len(parts)) as advance, torch.inference_mode():
        for part in parts:
            # The C library keeps memory for a process that has freed large tensors, as one that runs a model has: all
            # parts are to find it so.
            part.run()
        for part in parts:
            found[part.name] = measure(part, repeats)
            advance(1)
    return {"repeats": repeats, "parts": found}


if __name__ == "__main__":
    main()
