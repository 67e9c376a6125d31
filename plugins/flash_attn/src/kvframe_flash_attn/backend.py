"""FlashAttention-2 (arXiv 2307.08691): https://github.com/Dao-AILab/flash-attention, package ``flash-attn``."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import attrs
import flash_attn
import numpy as np
import torch

from kvframe.contract import (
    RANGE_ENDS,
    Capabilities,
    CommonAttentionMetadata,
    GraphCapture,
    KVCache,
    LayerSpec,
)
from kvframe_flash_attn.shared import (
    DTYPES,
    HEAD_SIZES,
    MASKS,
    FlashBackend,
    FlashMetadataBuilder,
    sees,
    unusable_reason,
)


@attrs.frozen(eq=False)
class FlashAttnMetadata:
    """A step in the form that the library takes.

    Attributes:
        common: The batch.
        num_queries: Queries of each request if all requests have equally many, in order; otherwise 0.
        key_start_loc: ``[num_reqs + 1], int32, device``: the starts that the requests' keys would have in a packed
            tensor. The function for requests of any length takes only the numbers of keys from it; their place in pages
            is in the block table.
        in_ranges: Whether it is the part of a step whose queries are in ranges of prompts.
    """

    common: CommonAttentionMetadata
    num_queries: int
    key_start_loc: torch.Tensor | None
    in_ranges: bool = False


class FlashAttnMetadataBuilder(FlashMetadataBuilder):
    """Decides which of the library's two functions computes a step."""

    capture = GraphCapture.UNIFORM
    needs_exact_lens = False

    @property
    def reuse_key(self) -> Hashable:
        """Whether the layers are causal."""
        return ("flash_attn", self._mask.causal)

    def call(self, metadata: CommonAttentionMetadata) -> FlashAttnMetadata:
        """Return the step."""
        num_queries = _num_queries(metadata)
        return FlashAttnMetadata(metadata, num_queries, None) if num_queries else self.call_of_part(metadata)

    def call_of_part(self, part: CommonAttentionMetadata, *, in_ranges: bool = False) -> FlashAttnMetadata:
        """Return requests of any length."""
        key_start_loc = torch.nn.functional.pad(part.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        return FlashAttnMetadata(part, 0, key_start_loc, in_ranges)


def _num_queries(metadata: CommonAttentionMetadata) -> int:
    """Return the number of queries of each request if it is equal for all and every row has a query; otherwise 0.

    Padded requests count like others: their rows are padded tokens.
    """
    most, num_tokens = metadata.max_query_len, metadata.slot_mapping.shape[0]
    if not most or num_tokens < metadata.num_reqs * most or metadata.num_actual_tokens % most:
        return 0
    num_reqs = metadata.num_actual_tokens // most
    starts = metadata.query_start_loc_cpu.numpy()[: num_reqs + 1]
    return most if bool((starts == np.arange(num_reqs + 1) * most).all()) else 0


class FlashAttnBackend(FlashBackend):
    """Serves causal, bidirectional and windowed attention, ranges of prompts, soft caps and learned sinks.

    Pages hold a multiple of 256 tokens.
    """

    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=DTYPES,
        masks=MASKS,
        extensions=frozenset({RANGE_ENDS}),
        soft_cap=True,
        sinks=True,
        head_sizes=HEAD_SIZES,
        block_size_multiple=256,
        takes_copies=True,
        reads_dead_tokens=True,
        returns_lse=True,
        capture=GraphCapture.UNIFORM,
        preference=20,
    )

    @classmethod
    def unusable_reason(cls) -> str | None:
        """Return why the device cannot be used; None if it can."""
        return unusable_reason((8, 0))

    def make_builder(self) -> FlashAttnMetadataBuilder:
        """Return the step's builder."""
        return FlashAttnMetadataBuilder(self.layers[0])

    def call(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, *, with_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Call the function that suits the lengths of the step's requests."""
        assert isinstance(metadata, FlashAttnMetadata)
        assert layer.query is not None
        causal, window = sees(layer, metadata.common, in_ranges=metadata.in_ranges)
        options = {
            "block_table": metadata.common.block_table,
            "softmax_scale": layer.query.scale,
            "causal": causal,
            "window_size": window,
            "softcap": layer.query.soft_cap or 0.0,
        }
        call = self._uniform if metadata.num_queries else self._varied
        return call(query, kv_cache, metadata, options, with_lse)

    @staticmethod
    def _uniform(
        query: torch.Tensor, kv_cache: KVCache, metadata: FlashAttnMetadata, options: dict[str, Any], with_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return attention of requests with equally many queries, by the function that splits long requests."""
        common, num_queries = metadata.common, metadata.num_queries
        num_rows = common.num_reqs * num_queries
        result = flash_attn.flash_attn_with_kvcache(
            query[:num_rows].view(common.num_reqs, num_queries, *query.shape[1:]),
            kv_cache["k"],
            kv_cache["v"],
            cache_seqlens=common.seq_lens,
            return_softmax_lse=with_lse,
            **options,
        )
        if not with_lse:
            return result.view(num_rows, *query.shape[1:]), None
        output, lse = result
        return output.view(num_rows, *query.shape[1:]), lse.transpose(0, 1).reshape(query.shape[1], num_rows)

    @staticmethod
    def _varied(
        query: torch.Tensor, kv_cache: KVCache, metadata: FlashAttnMetadata, options: dict[str, Any], with_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return attention of requests of any length."""
        common = metadata.common
        result = flash_attn.flash_attn_varlen_func(
            query,
            kv_cache["k"],
            kv_cache["v"],
            cu_seqlens_q=common.query_start_loc,
            cu_seqlens_k=metadata.key_start_loc,
            # With 1, the library assumes one query per request, which is the case of the other function.
            max_seqlen_q=max(2, common.max_query_len),
            max_seqlen_k=common.max_seq_len,
            return_attn_probs=with_lse,
            **options,
        )
        if not with_lse:
            return result, None
        output, lse, _ = result
        return output, lse
