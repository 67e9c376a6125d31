"""Native sparse attention (after arXiv 2502.11089): compressed tokens, chosen blocks and a window, mixed by gates.

Each query head attends three times: to the means of all earlier blocks, to the tokens of the blocks whose means fit it
best, and to a window. Gates of the query mix the results; in a trained model they would be learned.

    python examples/by_content/native_sparse.py
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from compare import run
from kvframe_entries import TokenEntriesSpec

from kvframe.contract import (
    AttentionBackend,
    AttentionSpec,
    Capabilities,
    EntryStep,
    KVCache,
    KVCacheSpec,
    LayerSpec,
    TokenRange,
    hookimpl,
    positive_int,
)


@attrs.frozen(kw_only=True)
class NativeSparseSpec(AttentionSpec):
    """Keys and values of all tokens, of which a query reads means, ``num_blocks`` blocks and a window.

    Attributes:
        chunk: Tokens of a block; it divides the block size of the cache.
        num_blocks: Earlier blocks that a query reads.
        window: Tokens up to its own that it reads.
    """

    kind = "native_sparse"
    chunk: int = positive_int
    num_blocks: int = positive_int
    window: int = positive_int

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        """Return all past tokens: any of them may be chosen."""
        return ((0, n),) if n else ()

    @property
    def entries(self) -> Mapping[str, KVCacheSpec]:
        """The means of the keys and values of whole blocks."""
        mean = dict.fromkeys("kv", (self.num_kv_heads, self.head_size))
        sizes = {"block_size": self.block_size, "tokens_per_entry": self.chunk}
        return {"means": TokenEntriesSpec(tensors=mean, model_dtype=self.dtype, **sizes)}

    def dense_attention(
        self, layer: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, inputs: KVCache
    ) -> torch.Tensor:
        """Return attention of a whole request by definition."""
        means = {name: means_of(tensor, self.chunk) for name, tensor in (("k", key), ("v", value))}
        return attend(self, layer, query, {"k": key, "v": value}, means, first=0)


def means_of(tokens: torch.Tensor, chunk: int) -> torch.Tensor:
    """Return the mean of each whole block of ``[num_tokens, …]``."""
    return tokens[: len(tokens) // chunk * chunk].view(-1, chunk, *tokens.shape[1:]).mean(1)


def attend(
    spec: NativeSparseSpec, layer: LayerSpec, query: torch.Tensor, tokens: KVCache, means: KVCache, first: int
) -> torch.Tensor:
    """Return attention of the queries at the positions from ``first`` on, over the tokens of their request."""
    assert layer.query is not None
    scale, group_size = layer.query.scale, query.shape[1] // tokens["k"].shape[1]
    key, value, old_key, old_value = (
        states[name].repeat_interleave(group_size, dim=1) for states in (tokens, means) for name in "kv"
    )
    position, token = torch.arange(first, first + len(query))[:, None], torch.arange(len(key))
    own, block = position // spec.chunk, torch.arange(len(old_key))
    scores = torch.einsum("qhd,bhd->hqb", query, old_key) * scale
    scores = scores.masked_fill(block >= own, -torch.inf)
    best = scores.topk(min(spec.num_blocks, len(block)), dim=-1)
    chosen_blocks = torch.zeros(*scores.shape[:2], int(own.max()) + 1, dtype=torch.bool)
    chosen_blocks = chosen_blocks.scatter(-1, best.indices, best.values > -torch.inf)
    read = chosen_blocks[..., token // spec.chunk] & (token <= position)
    near = (token <= position) & (token > position - spec.window)
    products = torch.einsum("qhd,thd->hqt", query, key) * scale
    outputs = [
        torch.einsum("hqt,thd->qhd", masked.softmax(-1).nan_to_num(), values)  # early queries have no earlier block
        for masked, values in (
            (scores, old_value),
            (products.masked_fill(~read, -torch.inf), value),
            (products.masked_fill(~near, -torch.inf), value),
        )
    ]
    gates = query[..., :3].sigmoid()
    return sum((gate[..., None] * output for gate, output in zip(gates.unbind(-1), outputs, strict=True)), query * 0)


class NativeSparseBackend(AttentionBackend):
    """Computes native sparse attention request by request in plain torch."""

    capabilities = Capabilities(devices={"cpu"}, dtypes={"float32", "float64"}, masks=(), kinds={"native_sparse"})

    def attend(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, *, more: Any = None, **_: Any
    ) -> torch.Tensor:
        """Store the means of the blocks that the step completes, then choose and attend."""
        spec: Any = layer.spec
        tokens, means, output = EntryStep(kv_cache, metadata), more.entries["means"], torch.zeros_like(query)
        for new in means.requests:
            own, num_complete = tokens.read(new.request), new.first // spec.chunk
            # The means of the blocks that this step completes; those of earlier ones are stored.
            rest = {name: means_of(own[name][num_complete * spec.chunk :], spec.chunk) for name in "kv"}
            means.store(new.request, num_complete, **rest)
            output[new.rows] = attend(spec, layer, query[new.rows], own, means.read(new.request), new.first)
        return output


@hookimpl
def kvframe_register_specs(register: Any) -> None:
    """Register the type."""
    register("native_sparse", NativeSparseSpec)


@hookimpl
def kvframe_register_backends(register: Any) -> None:
    """Register its backend."""
    register("native_sparse", NativeSparseBackend)


if __name__ == "__main__":
    run(sys.modules[__name__], NativeSparseSpec, {"chunk": 4, "num_blocks": 2, "window": 6})
