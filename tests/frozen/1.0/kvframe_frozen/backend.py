"""A backend that computes one query after another: replace the loop by a kernel."""

from __future__ import annotations

import torch

from kvframe.contract import AttentionBackend, Capabilities, CommonAttentionMetadata, KVCache, LayerSpec, MoreInputs


class FrozenBackend(AttentionBackend):
    """Attention of one query after another, for any type of attention with keys and values."""

    # It is only given layers that this covers; the kit then tests all of it.
    capabilities = Capabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({"float32"}),
        masks=frozenset({"live_range"}),
        preference=-1,  # "auto" takes it only if no other backend serves a layer
    )

    def attend(
        self,
        layer: LayerSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        metadata: CommonAttentionMetadata,
        *,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        more: MoreInputs | None = None,
    ) -> torch.Tensor:
        """Read each query's live tokens from its pages; the step's own keys and values are there already."""
        output = torch.zeros_like(query) if out is None else out.zero_()
        starts = metadata.query_start_loc.tolist()
        for request, seq_len in enumerate(metadata.seq_lens.tolist()):
            for row in range(starts[request], starts[request + 1]):
                position = seq_len - starts[request + 1] + row
                tokens = self._tokens_seen(layer, metadata, position, seq_len)
                pages = metadata.block_table[request, tokens // metadata.block_size]
                places = pages, tokens % metadata.block_size
                output[row] = self._attend(layer, query[row], kv_cache["k"][places], kv_cache["v"][places])
        return output

    def _tokens_seen(
        self, layer: LayerSpec, metadata: CommonAttentionMetadata, position: int, seq_len: int
    ) -> torch.Tensor:
        """Return the tokens that a query sees: the live ones and its own, or all if there is no order."""
        spec = layer.spec
        assert spec is not None
        if not metadata.causal or (spec.mask is not None and not spec.mask.causal):
            return torch.arange(seq_len)
        ranges = (*spec.live_ranges(position), (position, position + 1))
        return torch.tensor([token for start, stop in ranges for token in range(start, stop)])

    def _attend(self, layer: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return softmax attention of one query: ``[num_heads, head_size]``."""
        assert layer.query is not None
        group_size = query.shape[0] // key.shape[1]  # query heads of a KV head
        key, value = (tensor.repeat_interleave(group_size, dim=1) for tensor in (key, value))
        scores = torch.einsum("hd,thd->ht", query, key) * layer.query.scale
        return torch.einsum("ht,thd->hd", scores.softmax(-1), value)
