"""Parts of a step's metadata for Triton's kernels, up to the copy to a GPU; a device without memory stands for one."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import attrs
import torch
from kvframe_triton.backend import TritonBackend

import kvframe
from benchmarks.attention.metadata_cases import (
    CPU,
    SIZES,
    WINDOWS,
    Part,
    decode_batch,
    mixed_batch,
    model_part,
    tables_of,
    windowed_layers,
)
from kvframe.attention.staging import Staging
from kvframe.attention.step import build_metadata
from kvframe.contract.hookspecs import Register
from kvframe.contract.specs import QuerySpec

GPU = torch.device("meta")
NAME = "triton_without_gpu"
NUM_KV_HEADS, HEAD_SIZE = 8, 128
QUERY = QuerySpec(num_heads=32, head_size=HEAD_SIZE, scale=0.1)
LIMIT = 50.0
"""Microseconds for each group."""


class TritonWithoutGPU(TritonBackend):
    """Cuts steps as for a GPU; its kernels are not called."""

    capabilities = attrs.evolve(TritonBackend.capabilities, devices=frozenset({"cpu"}))

    @classmethod
    def unusable_reason(cls) -> str | None:
        """Return None: what is measured runs on the host."""
        return None


def plugin() -> ModuleType:
    """Return a plugin that registers it."""

    def kvframe_register_backends(register: Register) -> None:
        register(NAME, TritonWithoutGPU)

    module = ModuleType("benchmark_of_metadata")
    vars(module)["kvframe_register_backends"] = kvframe.contract.hookimpl(kvframe_register_backends)
    return module


def triton_parts() -> Iterator[Part]:
    """Yield what one group adds to a step, its work and its way to the device; and whole steps of ten groups."""
    sizes = {**SIZES, "num_kv_heads": NUM_KV_HEADS, "head_size": HEAD_SIZE}
    for windows, each in WINDOWS.items():
        layers = windowed_layers(each, NAME, sizes=sizes, query=QUERY, plugins=[plugin()], device=GPU)
        for kind, make in (("decodes", decode_batch), ("mixed", mixed_batch)):
            yield model_part(f"triton, ten groups, {windows}, 256 requests, {kind}", layers, make(256), 10 * LIMIT)
    builder, staging = layers.groups[0].builder, Staging(GPU)
    for kind, make in (("decodes", decode_batch), ("mixed", mixed_batch)):
        (metadata,) = build_metadata(make(256), tables_of(1, 256), CPU)
        yield Part(
            name=f"triton, one group's share, 256 requests, {kind}",
            run=lambda metadata=metadata: staging.to_device(builder.build(metadata)),  # type: ignore[misc]
            num_elements=metadata.block_table.numel(),
            limit=LIMIT,
        )
