"""What formats do to one layer: how far its output moves on random data, its tokens' bytes, its decodes' time."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np
import torch

from benchmarks.harness.machine import ROOT
from benchmarks.harness.process import timed
from kvframe import FullAttentionSpec, Stack, group_layers, plan_cache
from kvframe.attention.layers import AttentionLayers
from kvframe.attention.step import StepBatch, build_metadata
from kvframe.attention.storage import KVCacheStorage
from kvframe.cache.manager import KVCacheManager
from kvframe.contract import LayerSpec, QuerySpec
from kvframe.contract.formats import PLAIN, KVFormat
from kvframe.loading.registry import Registry
from kvframe.planning.groups import make_layer_specs
from kvframe.planning.layer_file import read_layer_file
from kvframe.planning.sizing import plan_for_stack
from kvframe.selection.select import select_backends
from kvframe.testing.formats import round_trip
from kvframe.testing.reference import dense_attention

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 32, 8, 128
QUERY = QuerySpec(num_heads=NUM_HEADS, head_size=HEAD_SIZE, scale=HEAD_SIZE**-0.5)
LLAMA = ROOT / "examples" / "layers" / "llama_3_1_8b.toml"
MEMORY_BYTES = 8 * 2**30


@attrs.frozen
class Stored:
    """One way to store keys and values.

    Attributes:
        title: For people.
        kv_format: The format.
        dtype: What attention computes in.
    """

    title: str
    kv_format: KVFormat
    dtype: str


# --- random data ------------------------------------------------------------------------------------------------------


def draw_data(num_tokens: int, outliers: bool) -> dict[str, torch.Tensor]:
    """Return queries of 16 tokens, and keys and values, normally distributed, in float64.

    Args:
        num_tokens: Keys and values.
        outliers: Whether four channels of every key head are 20 times as large, and the queries' as much smaller, as in
            trained models some channels of keys are: the scores stay what they were.
    """
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(16, NUM_HEADS, HEAD_SIZE, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, num_tokens, NUM_KV_HEADS, HEAD_SIZE, generator=generator, dtype=torch.float64)
    if outliers:
        channels = torch.randperm(HEAD_SIZE, generator=generator)[:4]
        key[:, :, channels] *= 20
        query[:, :, channels] /= 20
    return {"query": query, "key": key, "value": value}


def output_error(stored: Stored, data: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return how far keys, values and the attention output are from those of float64: root mean squares, relative."""
    dtype = getattr(torch, stored.dtype)
    key, value = data["key"].to(dtype), data["value"].to(dtype)
    if stored.kv_format != PLAIN:
        key, value = round_trip(stored.kv_format, key, value, stored.dtype)
    visible = torch.ones(len(data["query"]), len(key), dtype=torch.bool)
    exact = dense_attention(QUERY, data["query"], data["key"], data["value"], visible)
    found = dense_attention(QUERY, data["query"], key.double(), value.double(), visible)
    return {
        "key": _relative(key.double(), data["key"]),
        "value": _relative(value.double(), data["value"]),
        "output": _relative(found, exact),
    }


def _relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


# --- memory -----------------------------------------------------------------------------------------------------------


def memory(stored: Stored, registry: Registry) -> dict[str, int]:
    """Return what a token of Llama 3.1 8B takes, and how many fit into 8 GiB."""
    description = read_layer_file(LLAMA)
    stack = Stack.from_mapping(
        {"cache": {"memory": MEMORY_BYTES, "dtype": stored.dtype, "format": stored.kv_format.name}}
    )
    layers = make_layer_specs(description, registry, stack, stored.dtype)
    plan = plan_for_stack(group_layers(layers), stack, description.max_model_len, description.max_input_lens)
    num_pages = sum(plan.num_slabs * group.pages_per_slab for group in plan.groups)
    return {"bytes_per_token": plan.bytes_per_token, "tokens": num_pages * plan.groups[0].block_size}


# --- speed ------------------------------------------------------------------------------------------------------------


class Decode:
    """One layer's decode over a paged cache that is full of random tokens.

    Attributes:
        on_copies: Whether the backend is given copies, because it does not read the format itself.
        num_bytes: Of stored keys and values that a call reads.
    """

    def __init__(self, stored: Stored, backend: str, registry: Registry, num_reqs: int, context: int) -> None:
        spec = FullAttentionSpec(
            block_size=16, num_kv_heads=NUM_KV_HEADS, head_size=HEAD_SIZE, dtype=stored.dtype, format=stored.kv_format
        )
        layer = LayerSpec(name="layer", spec=spec, query=QUERY)
        grouping = group_layers([layer])
        (group,) = grouping.groups
        self.num_bytes = num_reqs * context * group.page_bytes // 16
        plan = plan_cache(
            grouping,
            memory_bytes=int(1.1 * self.num_bytes) + 64 * group.page_bytes,
            max_model_len=context,
            max_num_batched_tokens=context,
        )
        stack = Stack.from_mapping({"rules": [{"layers": "*", "backend": backend}]})
        choices = select_backends([layer], stack, registry, "cpu")
        self.on_copies = choices[0].on_copies
        device = torch.device("cpu")
        storage = KVCacheStorage(plan, grouping, device)
        manager = KVCacheManager(plan, max_num_seqs=num_reqs, prefix_caching=False)
        for index in range(num_reqs):
            manager.start(str(index), [0] * context)
        for length in range(16, context + 1, 16):  # by turns, so that no request's pages follow one another
            for index in range(num_reqs):
                assert manager.extend(str(index), length)
        self._attention = AttentionLayers([layer], choices, grouping, storage.views, device)
        dtype, generator = getattr(torch, stored.dtype), torch.Generator().manual_seed(0)

        def draw(num_tokens: int, num_heads: int) -> torch.Tensor:
            return torch.randn(num_tokens, num_heads, HEAD_SIZE, generator=generator).to(dtype)

        rows = np.array([manager.row(str(index)) for index in range(num_reqs)])
        ids = torch.from_numpy(manager.tables[0].ids[rows][:, : context // 16]).long()
        key, value = draw(context, NUM_KV_HEADS), draw(context, NUM_KV_HEADS)
        for row in ids:  # all requests have the same tokens, in pages of its own
            slots = row.repeat_interleave(16), torch.arange(context) % 16
            stored.kv_format.write(key, value, storage.views["layer"], slots)
        ones = np.ones(num_reqs, dtype=np.int64)
        batch = StepBatch(
            rows=rows, num_computed=ones * (context - 1), query_lens=ones, generating_indices=np.arange(num_reqs)
        )
        self._attention.begin_step(build_metadata(batch, manager.tables, device))
        self._inputs = draw(num_reqs, NUM_HEADS), draw(num_reqs, NUM_KV_HEADS), draw(num_reqs, NUM_KV_HEADS)

    def __call__(self) -> torch.Tensor:
        """Store a token of each request, and attend."""
        return self._attention["layer"](*self._inputs)


def decode_seconds(decodes: Mapping[str, Decode], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each one's calls; all take turns."""
    found: dict[str, list[float]] = {name: [] for name in decodes}
    for repeat in range(repeats + 1):
        for name, decode in decodes.items():
            seconds, _ = timed(decode)
            if repeat:  # the first one warms up
                found[name].append(seconds)
    return found
