"""The CPU backend reads pages of every format itself, with the output of any backend on copies of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import torch
from kvframe_cpu.backend import CpuBackend
from kvframe_testing.case import Request
from kvframe_testing.metadata import make_metadata

from kvframe import load_plugins
from kvframe.builtin.full_attention import FullAttentionSpec
from kvframe.builtin.torch_reference import TorchReferenceBackend
from kvframe.contract import LayerSpec, QuerySpec
from kvframe.contract.backend import KVCache
from kvframe.contract.formats import KVFormat
from kvframe.contract.slots import Slots
from kvframe.selection.refusals import find_refusals, needs_copies

REQUESTS = [Request(40, 1), Request(0, 19), Request(23, 7), Request(100, 1), Request(0, 1)]
FORMATS = ("fp8_tensor", "fp8_token_head", "int8_token_head", "int4_token_head")


def make_format(name: str, **options: Any) -> KVFormat:
    made: KVFormat = load_plugins().registry.formats.load(name)(**options)
    return made


def layer_of(kv_format: KVFormat, dtype: str) -> LayerSpec:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=24, head_size_v=40, dtype=dtype, format=kv_format)
    return LayerSpec(name="layer", spec=spec, query=QuerySpec(num_heads=6, head_size=24, scale=0.3))


def pages(layer: LayerSpec, num_ids: int) -> dict[str, torch.Tensor]:
    """Return the layer's state tensors in block-major pages, every byte of them 0xFF."""
    assert layer.spec is not None
    tensors: Mapping[str, Any] = layer.spec.state_tensors()
    page = sum(-(-tensor.num_bytes // 16) * 16 for tensor in tensors.values())
    pool = torch.full((num_ids, page), 0xFF, dtype=torch.uint8)
    found, start = {}, 0
    for name, tensor in tensors.items():
        dtype = getattr(torch, tensor.dtype)
        part = pool[:, start : start + tensor.num_bytes].view(dtype)
        found[name] = part.unflatten(1, tensor.shape)
        start += -(-tensor.num_bytes // 16) * 16
    return found


def attend(backend: type[Any], layer: LayerSpec, query: torch.Tensor, cache: KVCache, metadata: Any) -> torch.Tensor:
    made = backend([layer], torch.device("cpu"))
    output: torch.Tensor = made.attend(layer, query, cache, made.make_builder().build(metadata))
    return output.double()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in FORMATS), ("fp8_tensor", {"k_scale": 0.5, "v_scale": 0.02})]
)
def test_it_reads_what_the_format_wrote(name: str, options: dict[str, Any], dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    kv_format = make_format(name, **options)
    layer = layer_of(kv_format, dtype)
    assert not find_refusals(CpuBackend.capabilities, layer, "cpu")
    assert not needs_copies(CpuBackend.capabilities, layer)
    metadata = make_metadata(REQUESTS, 16)
    num_ids = int(metadata.block_table.max()) + 1
    cache = pages(layer, num_ids)
    for row, request in enumerate(REQUESTS):
        tokens = torch.arange(request.seq_len)
        slots = Slots.at(metadata.block_table[row, tokens // 16].long(), tokens % 16, 16)
        key, value = (torch.randn(len(tokens), 2, size, generator=generator) for size in (24, 40))
        kv_format.write(key, value, cache, slots)
    query = torch.randn(metadata.num_actual_tokens, 6, 24, generator=generator).to(getattr(torch, dtype))
    copies = {side: torch.zeros(num_ids, 16, 2, size, dtype=torch.float64) for side, size in (("k", 24), ("v", 40))}
    kv_format.read(cache, torch.arange(num_ids), copies)
    assert layer.spec is not None
    plain = attrs.evolve(layer, spec=attrs.evolve(layer.spec, format=make_plain(layer)))
    exact = attend(TorchReferenceBackend, plain, query.double(), copies, metadata)
    found = attend(CpuBackend, layer, query, cache, metadata)
    assert float((found - exact).abs().max()) <= {"float32": 1e-5, "bfloat16": 0.02}[dtype] * float(exact.abs().max())


def make_plain(layer: LayerSpec) -> KVFormat:
    from kvframe.contract.formats import PLAIN

    return PLAIN
