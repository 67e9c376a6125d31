"""A correct backend made of small methods, so that a mutant overrides one of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from kvframe_testing.reference import alibi_bias, relative_bias

from kvframe.contract.backend import AttentionBackend, AttentionMetadataBuilder, KVCache
from kvframe.contract.capabilities import Capabilities
from kvframe.contract.formats import PLAIN
from kvframe.contract.metadata import SEQ_STARTS, CommonAttentionMetadata
from kvframe.contract.specs import RELATIVE_BIAS, LayerSpec


@attrs.frozen(eq=False)
class Built:
    """A step's metadata for the plain backend.

    Attributes:
        common: The step's metadata.
        block_table: ``[num_reqs, max_blocks], int32, device``.
    """

    common: CommonAttentionMetadata
    block_table: torch.Tensor


class PlainBuilder(AttentionMetadataBuilder):
    """Keeps the block table in a field of its own, so that it can be refreshed."""

    table_fields = frozenset({"block_table"})

    def build(self, metadata: CommonAttentionMetadata) -> Built:
        return Built(metadata, metadata.block_table)

    def refreshed_fields(self, built: Built, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        return {"block_table": metadata.block_table}


class PlainBackend(AttentionBackend):
    """Attention by its definition, one request after the other, over the visible tokens."""

    capabilities = Capabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({"float32"}),
        masks=frozenset(
            {
                *("causal", "bidirectional", "bidirectional_window", "window", "sink_tokens", "chunk"),
                *("live_range", "sparse"),
            }
        ),
        extensions=frozenset({SEQ_STARTS}),
        formats=frozenset({PLAIN.name, "fp8_token_head"}),
        soft_cap=True,
        sinks=True,
        relative_bias=True,
        alibi=True,
        separate_value_size=True,
    )

    def make_builder(self) -> AttentionMetadataBuilder:
        return PlainBuilder()

    def attend(
        self,
        layer: LayerSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        metadata: Any,
        *,
        sinks: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        built = self.step_of(metadata)
        assert layer.spec is not None
        state = layer.spec.in_format(PLAIN).state_tensors()
        output = query.new_zeros(*query.shape[:2], state["v"].shape[-1])
        starts, seq_lens = self.lengths(built.common)
        for request, (start, stop) in enumerate(itertools.pairwise(starts)):
            if start < stop:
                arguments = kv_cache, built, request, seq_lens[request], sinks
                output[start:stop] = self.attend_request(layer, query[start:stop], *arguments)
        return output

    def lengths(self, common: CommonAttentionMetadata) -> tuple[list[int], list[int]]:
        """Return where the requests' queries start, and their lengths."""
        return common.query_start_loc.tolist(), common.seq_lens.tolist()

    def step_of(self, metadata: Any) -> Built:
        assert isinstance(metadata, Built)
        return metadata

    def attend_request(
        self,
        layer: LayerSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        built: Built,
        request: int,
        seq_len: int,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the attention of one request's queries."""
        logits, visible, value = self.logits(layer, query, kv_cache, built, request, seq_len, sinks)
        weights = logits.softmax(-1)[..., : visible.shape[1]].masked_fill(~visible, 0)
        return torch.einsum("hqt,thd->qhd", weights, value[:, self.kv_heads(query.shape[1], value.shape[1])])

    def logits(
        self,
        layer: LayerSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        built: Built,
        request: int,
        seq_len: int,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the logits of the softmax, the sinks last; the keys that queries see, and their values."""
        visible = self.visible(layer, built.common, request, seq_len - len(query), seq_len)
        tokens = visible.any(0).nonzero().flatten()
        key, value = self.read(layer, kv_cache, built, request, tokens)
        scores = self.scores(layer, query, key)
        bias = self.bias(layer, seq_len - len(query), seq_len)
        if bias is not None:
            scores = scores + bias[:, :, tokens]
        scores = scores.masked_fill(~visible[:, tokens], float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(query), 1)], dim=-1)
        return scores, visible[:, tokens], value

    def visible(
        self, layer: LayerSpec, common: CommonAttentionMetadata, request: int, first: int, seq_len: int
    ) -> torch.Tensor:
        """Return which tokens each query sees, ``[num_queries, seq_len], bool``."""
        assert layer.spec is not None
        if common.causal and (layer.spec.mask is None or not layer.spec.mask.sees_all):
            mask = torch.zeros(seq_len - first, seq_len, dtype=torch.bool)
            for row, position in enumerate(range(first, seq_len)):
                for start, stop in self.ranges(layer, position):
                    mask[row, start:stop] = True
            if layer.spec.is_sparse:
                mask &= self.shown(layer, torch.arange(first, seq_len)[:, None], torch.arange(seq_len))
        else:
            mask = torch.ones(seq_len - first, seq_len, dtype=torch.bool)
        if SEQ_STARTS in common.extensions:
            mask[:, : int(common.extensions[SEQ_STARTS].values[request])] = False
        return mask

    def ranges(self, layer: LayerSpec, position: int) -> list[tuple[int, int]]:
        """Return the tokens that a query sees by the layer's mask."""
        assert layer.spec is not None
        num_later = 0 if layer.spec.mask is None else layer.spec.mask.lookahead or 0
        return [*layer.spec.live_ranges(position), (position, position + 1 + num_later)]

    def shown(self, layer: LayerSpec, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return the live tokens that queries of a sparse type see."""
        assert layer.spec is not None
        assert layer.spec.mask_function is not None
        mask: torch.Tensor = layer.spec.mask_function(query, key)
        return mask

    def read(
        self, layer: LayerSpec, kv_cache: KVCache, built: Built, request: int, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of a request's tokens."""
        assert layer.spec is not None
        size = built.common.block_size
        blocks, index = torch.unique(tokens // size, return_inverse=True)
        ids = built.block_table[request, blocks]
        shapes = {name: tensor.shape for name, tensor in layer.spec.in_format(PLAIN).state_tensors().items()}
        pages = {name: torch.empty(len(ids), *shape) for name, shape in shapes.items()}
        layer.spec.kv_format.read(kv_cache, ids, pages)
        return pages["k"][index, tokens % size], pages["v"][index, tokens % size]

    def kv_heads(self, num_heads: int, num_kv_heads: int) -> torch.Tensor:
        """Return the KV head of each query head."""
        return torch.arange(num_heads) // (num_heads // num_kv_heads)

    def scores(self, layer: LayerSpec, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return the scores before bias and mask, ``[num_heads, num_queries, num_tokens]``."""
        assert layer.query is not None
        scores = torch.einsum("qhd,thd->hqt", query, key[:, self.kv_heads(query.shape[1], key.shape[1])])
        scores = scores * layer.query.scale
        cap = layer.query.soft_cap
        return scores if cap is None else cap * torch.tanh(scores / cap)

    def bias(self, layer: LayerSpec, first: int, seq_len: int) -> torch.Tensor | None:
        """Return the bias of the scores, ``[num_heads, num_queries, seq_len]``; None if there is none."""
        assert layer.query is not None
        if layer.query.alibi_slopes is not None:
            return alibi_bias(layer.query.alibi_slopes, first, seq_len).float()
        if layer.query.relative_bias is None:
            return None
        table = self.parameters[layer.name][RELATIVE_BIAS]
        return relative_bias(layer.query.relative_bias, table, first, seq_len)
