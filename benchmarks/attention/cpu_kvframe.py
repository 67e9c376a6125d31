"""A backend of kvframe on a pool of one layer: written, described and attended to as an engine's step does it."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from kvframe_sliding_window.spec import SlidingWindowSpec

from benchmarks.attention.cpu_shapes import Buffers, Shape, Step
from kvframe.attention.step import StepBatch, build_metadata
from kvframe.builtin.full_attention import FullAttentionSpec
from kvframe.cache.block_table import BlockTables
from kvframe.contract.backend import AttentionBackend
from kvframe.contract.specs import KVCacheSpec, LayerSpec, QuerySpec
from kvframe.loading.plugins import load_plugins

CPU = torch.device("cpu")


class KVFrame:
    """One backend."""

    def __init__(self, backend: str) -> None:
        """Look the backend up.

        Args:
            backend: Its registered name.
        """
        self._class: type[AttentionBackend] = load_plugins().registry.backends.load(backend)

    def describe(self) -> dict[str, str]:
        """Return the versions of kvframe and torch."""
        return {"kvframe": version("kvframe"), "torch": torch.__version__}

    def why_not(self, shape: Shape) -> str:
        """Return why the backend refuses the layer."""
        return "; ".join(each.reason for each in self._class.capabilities.refusals(_layer(shape), "cpu"))

    def prepare(self, shape: Shape, buffers: Buffers) -> Step:
        """Write the pool block-major, keys before values, by the backend's ``write_kv``."""
        layer = _layer(shape)
        options = self._class.options_class
        made: Any = self._class
        backend: AttentionBackend = made([layer], CPU) if options is None else made([layer], CPU, options())
        kv_cache = _views(shape, layer, buffers.pool)
        table = shape.block_table()
        slots = shape.slots(table)
        backend.write_kv(buffers.key, buffers.value, kv_cache, (slots // shape.block_size, slots % shape.block_size))
        computed, new = (np.array(column) for column in zip(*shape.requests, strict=True))
        tables = BlockTables(len(new), max(shape.seq_lens), [shape.block_size])
        tables.stacks[0].ids[0] = table.numpy()
        batch = StepBatch(
            rows=np.arange(len(new)), num_computed=computed, query_lens=new, generating_indices=np.cumsum(new) - 1
        )
        (metadata,) = build_metadata(batch, tables, CPU)
        builder = backend.make_builder()
        query = buffers.query.clone()
        built: list[Any] = []

        def build() -> None:
            built[:] = [builder.finish(each) for each in builder.build_together([(builder, metadata)])]

        def attend() -> torch.Tensor:
            return backend.forward(layer, query, kv_cache, built[0], None)

        return Step(build=build, attend=attend)


def _layer(shape: Shape) -> LayerSpec:
    sizes: dict[str, Any] = {
        "block_size": shape.block_size,
        "num_kv_heads": shape.num_kv_heads,
        "head_size": shape.head_size,
        "dtype": shape.dtype,
    }
    spec: KVCacheSpec
    spec = FullAttentionSpec(**sizes) if shape.window is None else SlidingWindowSpec(window=shape.window, **sizes)
    query = QuerySpec(num_heads=shape.num_heads, head_size=shape.head_size, scale=shape.head_size**-0.5)
    return LayerSpec(name="layer", spec=spec, query=query)


def _views(shape: Shape, layer: LayerSpec, pool: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the layer's state tensors over the pool, page by page and in each page one after the other."""
    assert layer.spec is not None
    pages, start, found = pool.view(shape.num_pages, shape.page_bytes), 0, {}
    for name, tensor in layer.spec.state_tensors().items():
        stop = start + int(np.prod(tensor.shape)) * shape.torch_dtype.itemsize
        found[name] = pages[:, start:stop].view(shape.torch_dtype).unflatten(1, tensor.shape)
        start = stop
    assert start == shape.page_bytes
    return found
