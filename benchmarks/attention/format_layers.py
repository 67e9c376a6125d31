"""Measure formats on one layer: the bytes of a token, and a layer that decodes over stored tokens."""

from __future__ import annotations

import attrs
import numpy as np
import torch

from benchmarks.harness.layers import page_views
from benchmarks.harness.machine import ROOT
from kvframe import FullAttentionSpec, Stack, group_layers
from kvframe.attention.batch_metadata import StepBatch, build_metadata
from kvframe.attention.layers import AttentionLayers
from kvframe.cache.block_table import BlockTables
from kvframe.contract import LayerSpec, QuerySpec
from kvframe.contract.formats import KVFormat
from kvframe.contract.slots import Slots
from kvframe.loading.registry import Registry
from kvframe.planning.groups import make_layer_specs
from kvframe.planning.layer_file import read_layer_file
from kvframe.planning.sizing import plan_for_stack
from kvframe.selection.select import select_backends

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 32, 8, 128, 16
QUERY = QuerySpec(num_heads=NUM_HEADS, head_size=HEAD_SIZE, scale=HEAD_SIZE**-0.5)
LLAMA = ROOT / "examples" / "layers" / "llama_3_1_8b.toml"
MEMORY_BYTES = 8 * 2**30
CPU = torch.device("cpu")


@attrs.frozen
class Stored:
    """One way to store keys and values.

    Attributes:
        title: The name in the record.
        kv_format: The format.
        dtype: The dtype of the attention.
    """

    title: str
    kv_format: KVFormat
    dtype: str


def memory_of(kv_format: KVFormat, dtype: str, registry: Registry) -> dict[str, int]:
    """Return the bytes of a token of Llama 3.1 8B, and the number of tokens that fit into 8 GiB."""
    description = read_layer_file(LLAMA)
    stack = Stack.from_mapping({"cache": {"memory": MEMORY_BYTES, "dtype": dtype, "format": kv_format.name}})
    layers = make_layer_specs(description, registry, stack, dtype)
    plan = plan_for_stack(group_layers(layers), stack, description.max_model_len, description.max_input_lens)
    num_pages = sum(plan.num_slabs * group.pages_per_slab for group in plan.groups)
    return {"bytes_per_token": plan.bytes_per_token, "tokens": num_pages * plan.groups[0].block_size}


class Decode:
    """One layer's decode over a paged cache that is full of random tokens.

    Attributes:
        on_copies: Whether the backend reads copies, because it does not read the format itself.
        num_bytes: The stored bytes that a call reads.
    """

    def __init__(self, stored: Stored, backend: str, registry: Registry, num_reqs: int, context: int) -> None:
        """Fill the cache and begin a step.

        Args:
            stored: The format of keys and values, and the dtype of the attention.
            backend: The backend's registered name.
            registry: Finds the backend.
            num_reqs: The number of requests. All have the same tokens, each in its own pages.
            context: The tokens of each request, a multiple of 16.
        """
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE,
            num_kv_heads=NUM_KV_HEADS,
            head_size=HEAD_SIZE,
            dtype=stored.dtype,
            format=stored.kv_format,
        )
        layer = LayerSpec(name="layer", spec=spec, query=QUERY)
        stack = Stack.from_mapping({"rules": [{"layers": "*", "backend": backend}]})
        choices = select_backends([layer], stack, registry, "cpu")
        num_blocks = context // BLOCK_SIZE
        self.on_copies = choices[0].on_copies
        self.num_bytes = num_reqs * num_blocks * spec.block_bytes
        # Pages go to the requests by turns, so that no request's pages lie side by side.
        table = 1 + torch.arange(num_reqs * num_blocks).view(num_blocks, num_reqs).T
        views = page_views(spec, torch.zeros((1 + table.numel()) * spec.block_bytes, dtype=torch.uint8))
        generator, dtype = torch.Generator().manual_seed(0), getattr(torch, stored.dtype)

        def draw(num_tokens: int, num_heads: int) -> torch.Tensor:
            return torch.randn(num_tokens, num_heads, HEAD_SIZE, generator=generator).to(dtype)

        key, value = draw(context, NUM_KV_HEADS), draw(context, NUM_KV_HEADS)
        for row in table:
            slots = Slots.at(row.repeat_interleave(BLOCK_SIZE), torch.arange(context) % BLOCK_SIZE, BLOCK_SIZE)
            stored.kv_format.write(key, value, views, slots)
        tables = BlockTables(num_reqs, context, [BLOCK_SIZE])
        tables.stacks[0].ids[0] = table.numpy()
        ones, rows = np.ones(num_reqs, dtype=np.int64), np.arange(num_reqs)
        batch = StepBatch(rows=rows, num_computed=ones * (context - 1), query_lens=ones, generating_indices=rows)
        self._attention = AttentionLayers([layer], choices, group_layers([layer]), {"layer": views}, CPU)
        self._attention.begin_step(build_metadata(batch, tables, CPU))
        self._inputs = draw(num_reqs, NUM_HEADS), draw(num_reqs, NUM_KV_HEADS), draw(num_reqs, NUM_KV_HEADS)

    def __call__(self) -> torch.Tensor:
        """Store a token of each request, and attend."""
        return self._attention["layer"](*self._inputs)
