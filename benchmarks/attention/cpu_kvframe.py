"""One backend of kvframe on the pages of one layer, called as an engine's step calls it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import attrs
import torch
from kvframe_sliding_window.spec import SlidingWindowSpec

from benchmarks.attention.cpu_shapes import Inputs, Refused, Step, answer_turns, block_table, slots
from benchmarks.attention.shapes import Shape
from benchmarks.harness.layers import make_backend, page_views
from kvframe.builtin.full_attention import FullAttentionSpec
from kvframe.contract.backend import AttentionBackend
from kvframe.contract.slots import Slots
from kvframe.contract.specs import KVCacheSpec, LayerSpec, QuerySpec
from kvframe.loading.plugins import load_plugins
from kvframe.testing.case import Request
from kvframe.testing.metadata import make_metadata


class KVFrame:
    """A backend that takes its turns on shapes."""

    def __init__(self, backend: str) -> None:
        """Look the backend up by its registered name."""
        self._class: type[AttentionBackend] = load_plugins().registry.backends.load(backend)

    def why_not(self, shape: Shape) -> str:
        """Return the reasons why the backend refuses the layer; an empty text if it serves the layer."""
        return "; ".join(each.reason for each in self._class.capabilities.refusals(_layer(shape), "cpu"))

    def prepare(self, shape: Shape, inputs: Inputs, pool: torch.Tensor) -> Step:
        """Write the pool block-major, keys before values, by the backend's ``write_kv``."""
        if reason := self.why_not(shape):
            raise Refused(reason)
        layer, pages = _layer(shape), block_table(shape)
        assert layer.spec is not None
        backend = make_backend(self._class, layer, torch.device("cpu"))
        kv_cache = page_views(layer.spec, pool)
        backend.write_kv(inputs.key, inputs.value, kv_cache, Slots(slots(shape, pages), shape.block_size))
        requests = [Request(computed, new) for computed, new in shape.requests]
        metadata = attrs.evolve(make_metadata(requests, shape.block_size), block_table=pages)
        builder = backend.make_builder()
        built: list[Any] = []

        def build() -> None:
            built[:] = [builder.finish(each) for each in builder.build_together([(builder, metadata)])]

        def attend() -> torch.Tensor:
            return backend.forward(layer, inputs.query, kv_cache, built[0], None)

        return build, attend


def _layer(shape: Shape) -> LayerSpec:
    heads: dict[str, Any] = {"num_kv_heads": shape.num_kv_heads, "head_size": shape.head_size}
    sizes: dict[str, Any] = {"block_size": shape.block_size, "dtype": shape.dtype, **heads}
    spec: KVCacheSpec
    spec = FullAttentionSpec(**sizes) if shape.window is None else SlidingWindowSpec(window=shape.window, **sizes)
    query = QuerySpec(num_heads=shape.num_heads, head_size=shape.head_size, scale=shape.head_size**-0.5)
    return LayerSpec(name="layer", spec=spec, query=query)


def load(backend: str, threads: str, file: str) -> tuple[dict[str, str], Callable[[dict[str, Any]], Any]]:
    """Return the versions that a backend's figures depend on, and the function that does its turns."""
    versions = {"kvframe": version("kvframe"), "torch": torch.__version__}
    return versions, answer_turns(KVFrame(backend).prepare, threads, file)
