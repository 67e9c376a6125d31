"""A compressive memory: of the tokens before the last ones, the mean of every 16 is read instead of the tokens.

So the oldest 64 tokens become 4. Their keys and values are no longer live, and their blocks are freed; the means are an
entry of the layer, and found in the cache with the recent tokens (after arXiv 1911.05507, without its learned parts).

    python examples/by_content/compressive_memory.py
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
class CompressiveMemorySpec(AttentionSpec):
    """Keys and values of at least ``recent`` tokens, and one mean for each ``group`` tokens before them.

    Attributes:
        group: Tokens of a mean.
        recent: Tokens that are read as they are, before the group that they begin in.
    """

    kind = "compressive_memory"
    group: int = positive_int
    recent: int = positive_int

    def first_recent(self, n: int) -> int:
        """Return the first token that a query at ``n`` reads as it is; those before it are whole groups."""
        return max(0, n - self.recent) // self.group * self.group

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        """Return the recent tokens."""
        start = self.first_recent(n)
        return ((start, n),) if start < n else ()

    @property
    def entries(self) -> Mapping[str, KVCacheSpec]:
        """The means of the keys and values of whole groups."""
        shape = (self.num_kv_heads, self.head_size)
        sizes = {"block_size": self.block_size, "tokens_per_entry": self.group}
        return {"memory": TokenEntriesSpec(tensors={"k": shape, "v": shape}, model_dtype=self.dtype, **sizes)}

    def dense_attention(
        self, layer: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, inputs: KVCache
    ) -> torch.Tensor:
        """Return attention of a whole request by definition."""
        means = [means_of(tensor, self.group) for tensor in (key, value)]
        outputs = []
        for n in range(len(query)):
            start = self.first_recent(n)
            keys, values = (
                torch.cat([mean[: start // self.group], tokens[start : n + 1]])
                for mean, tokens in ((means[0], key), (means[1], value))
            )
            outputs.append(attend(layer, query[n : n + 1], keys, values))
        return torch.cat(outputs)


def means_of(tokens: torch.Tensor, group: int) -> torch.Tensor:
    """Return the mean of each whole group of ``[num_tokens, …]``."""
    return tokens[: len(tokens) // group * group].view(-1, group, *tokens.shape[1:]).mean(1)


def attend(layer: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return attention of one query over all given keys and values."""
    assert layer.query is not None
    key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1) for tensor in (key, value))
    weights = (torch.einsum("qhd,thd->hqt", query, key) * layer.query.scale).softmax(-1)
    return torch.einsum("hqt,thd->qhd", weights, value)


class CompressiveMemoryBackend(AttentionBackend):
    """Computes a compressive memory query by query in plain torch."""

    capabilities = Capabilities(devices={"cpu"}, dtypes={"float32", "float64"}, masks=(), kinds={"compressive_memory"})

    def attend(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, *, more: Any = None, **_: Any
    ) -> torch.Tensor:
        """Store the means of the groups that the step completes, then attend."""
        spec: Any = layer.spec
        tokens, memory, output = EntryStep(kv_cache, metadata), more.entries["memory"], torch.zeros_like(query)
        for new in memory.requests:
            num_complete = new.first // spec.group
            # The means of the groups that this step completes; the tokens of the first of them are still resident.
            rest = tokens.read(new.request, num_complete * spec.group)
            memory.store(new.request, num_complete, **{name: means_of(rest[name], spec.group) for name in "kv"})
            means = memory.read(new.request)
            for row, n in enumerate(range(new.first, new.stop), new.rows.start):
                oldest = spec.first_recent(n)
                recent = tokens.read(new.request, oldest, n + 1)
                keys, values = (torch.cat([means[name][: oldest // spec.group], recent[name]]) for name in "kv")
                output[row : row + 1] = attend(layer, query[row : row + 1], keys, values)
        return output


@hookimpl
def kvframe_register_specs(register: Any) -> None:
    """Register the type."""
    register("compressive_memory", CompressiveMemorySpec)


@hookimpl
def kvframe_register_backends(register: Any) -> None:
    """Register its backend."""
    register("compressive_memory", CompressiveMemoryBackend)


if __name__ == "__main__":
    run(sys.modules[__name__], CompressiveMemorySpec, {"group": 16, "recent": 24})
