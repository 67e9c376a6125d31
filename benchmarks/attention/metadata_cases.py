"""What the metadata of steps is measured on: batches, block tables, and layers without memory for their caches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import attrs
import numpy as np
import torch
from kvframe_sliding_window.spec import SlidingWindowSpec

from benchmarks.engine.generate import SEED
from kvframe import Stack
from kvframe.attention.layers import AttentionLayers
from kvframe.attention.step import StepBatch, build_metadata
from kvframe.builtin.full_attention import FullAttentionSpec
from kvframe.cache.block_table import BlockTables
from kvframe.contract.specs import KVCacheSpec, LayerSpec, QuerySpec
from kvframe.loading.plugins import load_plugins
from kvframe.planning.groups import Grouping, KVCacheGroup
from kvframe.selection.select import select_backends

CPU = torch.device("cpu")
SHORTEST, LONGEST = 100, 2000
SIZES: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 64}
QUERY = QuerySpec(num_heads=8, head_size=64, scale=0.125)
WINDOWS: dict[str, Sequence[int]] = {
    "windows 32 to 288": range(32, 289, 32),
    "windows 16 to 4,096": [16 << i for i in range(9)],
}


@attrs.frozen(kw_only=True)
class Part:
    """One part of a step's host work.

    Attributes:
        name: For the results.
        run: Does it.
        num_elements: Block ids or slots that it reads: the size of the dense operation beside it.
        limit: Microseconds that it is to stay within on the machine of the recorded run; None for no limit.
        upload: Bytes that it copies to the device; None where this is not measured.
    """

    name: str
    run: Callable[[], Any]
    num_elements: int
    limit: float | None = None
    upload: int | None = None


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


def _batch(lengths: Any, new: Any) -> StepBatch:
    return StepBatch(
        rows=np.arange(len(lengths)), num_computed=lengths - new, query_lens=new, generating_indices=np.cumsum(new) - 1
    )


def tables_of(num_groups: int, num_reqs: int) -> BlockTables:
    """Return block tables in which every block is some page."""
    tables = BlockTables(num_reqs, LONGEST, [SIZES["block_size"]] * num_groups)
    for stack in tables.stacks:
        stack.ids[:] = np.random.default_rng(SEED).integers(1, 1 << 16, stack.ids.shape)
    return tables


def layers_of(
    specs: Sequence[KVCacheSpec],
    backend: str = "auto",
    *,
    query: QuerySpec = QUERY,
    plugins: Sequence[ModuleType] = (),
    device: torch.device = CPU,
) -> AttentionLayers:
    """Return layers, one for each spec and each with a cache group of its own, without memory for their caches."""
    layers = [LayerSpec(name=f"layer{index}", spec=spec, query=query) for index, spec in enumerate(specs)]
    stack = Stack.from_mapping({"rules": [{"layers": "*", "backend": backend}]})
    choices = select_backends(layers, stack, load_plugins(plugins=plugins).registry, "cpu")
    groups = tuple(
        KVCacheGroup(index=index, spec=spec, layers=(layer.name,), stored=(spec,))
        for index, (layer, spec) in enumerate(zip(layers, specs, strict=True))
    )
    views: dict[str, Any] = {layer.name: {} for layer in layers}
    return AttentionLayers(layers, choices, Grouping(groups=groups, follows={}), views, device)


def windowed_layers(
    windows: Iterable[int], backend: str = "auto", *, sizes: Mapping[str, Any] = SIZES, **options: Any
) -> AttentionLayers:
    """Return a layer of full attention and nine with windows; ``options`` as for ``layers_of``."""
    specs = [FullAttentionSpec(**sizes), *(SlidingWindowSpec(window=size, **sizes) for size in windows)]
    assert len(specs) == 10
    return layers_of(specs, backend, **options)


def model_part(name: str, layers: AttentionLayers, batch: StepBatch, limit: float | None = None) -> Part:
    """Return all metadata of one step of a model of ten cache groups."""
    tables = tables_of(10, len(batch.rows))

    def run() -> None:
        # A step's batch is made anew in each step; what it caches is part of the work.
        layers.begin_step(build_metadata(attrs.evolve(batch), tables, CPU))

    num_elements = 10 * len(batch.rows) * -(-LONGEST // SIZES["block_size"])
    return Part(name=name, run=run, num_elements=num_elements, limit=limit)
