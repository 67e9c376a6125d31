"""DuoAttention (arXiv 2410.10819): some KV heads of a layer read all tokens, the others the first ones and a window.

The heads that read all tokens are the layer's main state. The other heads are an entry with a live range of its own, so
their old blocks are freed while those of the first heads stay.

    python examples/by_content/duo_attention.py
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from compare import run
from kvframe_sliding_window import SlidingWindowSpec

from kvframe.contract import (
    AttentionBackend,
    AttentionSpec,
    Capabilities,
    EntryStep,
    KVCache,
    KVCacheSpec,
    LayerSpec,
    Slots,
    StateTensor,
    TokenRange,
    hookimpl,
    positive_int,
)


@attrs.frozen(kw_only=True)
class DuoSpec(AttentionSpec):
    """Keys and values of all tokens for the first KV heads, and of few tokens for the others.

    Attributes:
        num_full: KV heads that read all tokens, the first ones; fewer than there are.
        window: Tokens up to its own that a query of the other heads reads.
        num_first: Tokens at the start that it reads beside them.
    """

    kind = "duo_attention"
    num_full: int = positive_int
    window: int = positive_int
    num_first: int = positive_int

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        """Return all past tokens: those of the main state."""
        return ((0, n),) if n else ()

    def state_tensors(self) -> Mapping[str, StateTensor]:
        """Return the keys and values of the heads that read all tokens."""
        return dict.fromkeys("kv", StateTensor((self.block_size, self.num_full, self.head_size), self.dtype))

    @property
    def entries(self) -> Mapping[str, KVCacheSpec]:
        """The keys and values of the other heads, in a window with the first tokens."""
        sizes: dict[str, Any] = {"block_size": self.block_size, "head_size": self.head_size, "dtype": self.dtype}
        sizes |= {"window": self.window, "num_sink_tokens": self.num_first}
        return {"near": SlidingWindowSpec(num_kv_heads=self.num_kv_heads - self.num_full, **sizes)}

    def near(self, position: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """Return what queries of the other heads read."""
        return (token <= position) & ((token > position - self.window) | (token < self.num_first))

    def dense_attention(
        self, layer: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, inputs: KVCache
    ) -> torch.Tensor:
        """Return attention of a whole request by definition."""
        position, token, num = torch.arange(len(query))[:, None], torch.arange(len(query)), self.num_full
        split = query.shape[1] // self.num_kv_heads * num
        full = attend(layer, query[:, :split], key[:, :num], value[:, :num], token <= position)
        near = attend(layer, query[:, split:], key[:, num:], value[:, num:], self.near(position, token))
        return torch.cat([full, near], dim=1)


def attend(
    layer: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return attention of some heads under a mask, ``[num_queries, num_tokens]``."""
    assert layer.query is not None
    key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1) for tensor in (key, value))
    scores = torch.einsum("qhd,thd->hqt", query, key) * layer.query.scale
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("hqt,thd->qhd", weights, value)


class DuoBackend(AttentionBackend):
    """Computes both kinds of heads in plain torch."""

    capabilities = Capabilities(devices={"cpu"}, dtypes={"float32", "float64"}, masks=(), kinds={"duo_attention"})

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, kv_cache: KVCache, slots: Slots) -> None:
        """Store the heads that read all tokens."""
        num_full = kv_cache["k"].shape[2]
        super().write_kv(key[:, :num_full], value[:, :num_full], kv_cache, slots)

    def attend(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, *, more: Any = None, **_: Any
    ) -> torch.Tensor:
        """Store the other heads, then attend with both."""
        spec: Any = layer.spec
        full, near, outputs = EntryStep(kv_cache, metadata), more.entries["near"], torch.zeros_like(query)
        near.write(k=more.key[:, spec.num_full :], v=more.value[:, spec.num_full :])
        split = query.shape[1] // spec.num_kv_heads * spec.num_full
        for new in near.requests:
            rows, position = new.rows, torch.arange(new.first, new.stop)[:, None]
            token, own = torch.arange(new.stop), full.read(new.request)
            outputs[rows, :split] = attend(layer, query[rows, :split], own["k"], own["v"], token <= position)
            num_first = min(spec.num_first, new.stop)
            first = max(num_first, new.first + 1 - spec.window)  # of the tokens that are live for the other heads
            token = torch.cat([torch.arange(num_first), torch.arange(first, new.stop)])
            parts = near.read(new.request, 0, num_first), near.read(new.request, first)
            own = {name: torch.cat([part[name] for part in parts]) for name in "kv"}
            outputs[rows, split:] = attend(layer, query[rows, split:], own["k"], own["v"], spec.near(position, token))
        return outputs


@hookimpl
def kvframe_register_specs(register: Any) -> None:
    """Register the type."""
    register("duo_attention", DuoSpec)


@hookimpl
def kvframe_register_backends(register: Any) -> None:
    """Register its backend."""
    register("duo_attention", DuoBackend)


if __name__ == "__main__":
    run(sys.modules[__name__], DuoSpec, {"num_full": 1, "window": 12, "num_first": 4})
