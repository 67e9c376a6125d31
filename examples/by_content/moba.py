"""MoBA (arXiv 2502.13189): each query head reads its own block of tokens, and the past blocks that fit it best.

A block fits a query by the product of the query and the mean of the block's keys. The means are an entry of the layer:
one for each block of ``chunk`` tokens, planned, freed and found in the cache as keys and values are.

    python examples/by_content/moba.py
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
class MobaSpec(AttentionSpec):
    """Keys and values of all tokens, of which a query reads its own block and ``num_blocks`` earlier ones.

    Attributes:
        chunk: Tokens of a block; it divides the block size of the cache.
        num_blocks: Earlier blocks that a query reads.
    """

    kind = "moba"
    chunk: int = positive_int
    num_blocks: int = positive_int

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        """Return all past tokens: any of them may be chosen."""
        return ((0, n),) if n else ()

    @property
    def entries(self) -> Mapping[str, KVCacheSpec]:
        """The means of the keys of whole blocks."""
        mean = {"mean": (self.num_kv_heads, self.head_size)}
        sizes = {"block_size": self.block_size, "tokens_per_entry": self.chunk}
        return {"means": TokenEntriesSpec(tensors=mean, model_dtype=self.dtype, **sizes)}

    def dense_attention(
        self, layer: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, inputs: KVCache
    ) -> torch.Tensor:
        """Return attention of a whole request by definition."""
        return attend(self, layer, query, key, value, means_of(key, self.chunk), first=0)


def means_of(tokens: torch.Tensor, chunk: int) -> torch.Tensor:
    """Return the mean of each whole block of ``[num_tokens, …]``."""
    return tokens[: len(tokens) // chunk * chunk].view(-1, chunk, *tokens.shape[1:]).mean(1)


def attend(
    spec: MobaSpec,
    layer: LayerSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    means: torch.Tensor,
    first: int,
) -> torch.Tensor:
    """Return attention of the queries at the positions from ``first`` on, over the tokens of their request."""
    group_size = query.shape[1] // key.shape[1]
    key, value, means = (tensor.repeat_interleave(group_size, dim=1) for tensor in (key, value, means))
    position = torch.arange(first, first + len(query))
    own, block = position // spec.chunk, torch.arange(-(-len(key) // spec.chunk))
    fits = query.new_full((query.shape[1], len(query), len(block)), -torch.inf)
    fits[..., : len(means)] = torch.einsum("qhd,bhd->hqb", query, means)
    fits = fits.masked_fill(block >= own[:, None], -torch.inf)
    best = fits.topk(min(spec.num_blocks, len(block)), dim=-1)
    chosen_blocks = torch.zeros_like(fits, dtype=torch.bool).scatter(-1, best.indices, best.values > -torch.inf)
    chosen_blocks |= block == own[:, None]
    token = torch.arange(len(key))
    mask = chosen_blocks[..., token // spec.chunk] & (token <= position[:, None])
    assert layer.query is not None
    scores = torch.einsum("qhd,thd->hqt", query, key) * layer.query.scale
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("hqt,thd->qhd", weights, value)


class MobaBackend(AttentionBackend):
    """Computes MoBA request by request in plain torch."""

    capabilities = Capabilities(devices={"cpu"}, dtypes={"float32", "float64"}, masks=(), kinds={"moba"})

    def attend(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, *, more: Any = None, **_: Any
    ) -> torch.Tensor:
        """Store the means of the blocks that the step completes, then choose and attend."""
        spec: Any = layer.spec
        tokens, means, output = EntryStep(kv_cache, metadata), more.entries["means"], torch.zeros_like(query)
        for new in means.requests:
            own, num_complete = tokens.read(new.request), new.first // spec.chunk
            # The means of the blocks that this step completes; those of earlier ones are stored.
            means.store(new.request, num_complete, mean=means_of(own["k"][num_complete * spec.chunk :], spec.chunk))
            mean = means.read(new.request)["mean"]
            output[new.rows] = attend(spec, layer, query[new.rows], own["k"], own["v"], mean, new.first)
        return output


@hookimpl
def kvframe_register_specs(register: Any) -> None:
    """Register the type."""
    register("moba", MobaSpec)


@hookimpl
def kvframe_register_backends(register: Any) -> None:
    """Register its backend."""
    register("moba", MobaBackend)


if __name__ == "__main__":
    run(sys.modules[__name__], MobaSpec, {"chunk": 4, "num_blocks": 2})
