"""What the metadata of steps is measured on: batches, block tables, and layers without memory for their caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import attrs
import numpy as np
import torch
from kvframe_sliding_window.spec import SlidingWindowSpec
from kvframe_triton.backend import TritonBackend

from kvframe import Stack
from kvframe.attention.layers import AttentionLayers
from kvframe.attention.step import StepBatch
from kvframe.builtin.full_attention import FullAttentionSpec
from kvframe.cache.block_table import BlockTables
from kvframe.contract import hookimpl
from kvframe.contract.hookspecs import Register
from kvframe.contract.specs import LayerSpec, QuerySpec
from kvframe.loading.plugins import load_plugins
from kvframe.planning.groups import Grouping, KVCacheGroup
from kvframe.selection.select import select_backends

SEED = 11
CPU = torch.device("cpu")
WITHOUT_MEMORY = torch.device("meta")
"""Stands for a GPU: what is copied to it arrives nowhere."""

BLOCK_SIZE = 16
SHORTEST, LONGEST = 100, 2000
NUM_GROUPS = 10
WINDOWS: Mapping[str, Sequence[int]] = {
    "windows 32 to 288": range(32, 289, 32),
    "windows 16 to 4,096": [16 << i for i in range(9)],
}


def decode_batch(num_reqs: int) -> StepBatch:
    """Return a step of decodes."""
    lengths = np.random.default_rng(SEED).integers(SHORTEST, LONGEST + 1, num_reqs)
    return _batch(lengths, np.ones_like(lengths))


def mixed_batch(num_reqs: int) -> StepBatch:
    """Return a step of decodes and, for each 32 of them, one chunk of a prompt; every second one is the first."""
    source = np.random.default_rng(SEED)
    lengths = source.integers(SHORTEST, LONGEST + 1, num_reqs)
    new = np.ones_like(lengths)
    new[31::32] = np.minimum(source.integers(64, 257, num_reqs // 32), lengths[31::32])
    lengths[63::64] = new[63::64]
    return _batch(lengths, new)


BATCHES: Mapping[str, Callable[[int], StepBatch]] = {"decodes": decode_batch, "mixed": mixed_batch}


def _batch(lengths: Any, new: Any) -> StepBatch:
    return StepBatch(
        rows=np.arange(len(lengths)), num_computed=lengths - new, query_lens=new, generating_indices=np.cumsum(new) - 1
    )


def tables_of(num_groups: int, num_reqs: int) -> BlockTables:
    """Return block tables in which every block is some page."""
    tables = BlockTables(num_reqs, LONGEST, [BLOCK_SIZE] * num_groups)
    for stack in tables.stacks:
        stack.ids[:] = np.random.default_rng(SEED).integers(1, 1 << 16, stack.ids.shape)
    return tables


def ten_layers(
    windows: Sequence[int], query: QuerySpec, num_kv_heads: int, backend: str, device: torch.device = CPU
) -> AttentionLayers:
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
    return AttentionLayers(layers, choices, Grouping(groups=groups, follows={}), views, device)


class TritonWithoutGPU(TritonBackend):
    """Cuts steps as for a GPU; its kernels are not called."""

    name = "triton_without_gpu"
    capabilities = attrs.evolve(TritonBackend.capabilities, devices=frozenset({"cpu"}))

    @classmethod
    def unusable_reason(cls) -> str | None:
        """Return None: what is measured runs on the host."""
        return None


def _plugin() -> ModuleType:
    """Return a plugin that registers the backend without a GPU."""

    def kvframe_register_backends(register: Register) -> None:
        register(TritonWithoutGPU.name, TritonWithoutGPU)

    module = ModuleType("benchmark_of_metadata")
    vars(module)["kvframe_register_backends"] = hookimpl(kvframe_register_backends)
    return module
