"""FlashAttention-3 (arXiv 2407.08608): ``hopper`` of https://github.com/Dao-AILab/flash-attention, for Hopper GPUs."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import attrs
import flash_attn_interface
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
class FlashAttn3Metadata:
    """A step in the form that the library takes.

    Attributes:
        common: The batch, with the requests shortened to the pages that a window reaches.
        in_ranges: Whether it is the part of a step whose queries are in ranges of prompts.
    """

    common: CommonAttentionMetadata
    in_ranges: bool = False


class FlashAttn3MetadataBuilder(FlashMetadataBuilder):
    """Shortens requests to the pages that their first query's window reaches.

    The kernels read tiles of more tokens than a page. Without this, they would read the null page before those pages,
    and multiply its content by zero, which for NaN is NaN.
    """

    capture = GraphCapture.ALWAYS

    @property
    def reuse_key(self) -> Hashable:
        """The mask, as far as it hides tokens."""
        return ("flash_attn_3", self._mask.causal, self._mask.window, self._mask.lookahead)

    def call(self, metadata: CommonAttentionMetadata) -> FlashAttn3Metadata:
        """Return the step."""
        return self.call_of_part(metadata)

    def call_of_part(self, part: CommonAttentionMetadata, *, in_ranges: bool = False) -> FlashAttn3Metadata:
        """Return requests of any length."""
        window = self._mask.window
        if window is None or not part.causal:
            return FlashAttn3Metadata(part, in_ranges)
        block_size, table = part.block_size, part.block_table
        first_query = part.seq_lens - part.query_start_loc.diff()
        first_block = (first_query - (window - 1)).clamp(min=0) // block_size
        columns = torch.arange(table.shape[1], device=table.device) + first_block[:, None]
        shortened = attrs.evolve(
            part,
            seq_lens=(part.seq_lens - first_block * block_size).to(torch.int32),
            block_table=table.gather(1, columns.clamp(max=table.shape[1] - 1)),
        )
        return FlashAttn3Metadata(shortened, in_ranges)


class FlashAttn3Backend(FlashBackend):
    """Serves causal, bidirectional and windowed attention, ranges, soft caps, learned sinks; pages of any size."""

    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=DTYPES,
        masks=MASKS,
        extensions=frozenset({RANGE_ENDS}),
        soft_cap=True,
        sinks=True,
        head_sizes=HEAD_SIZES,
        takes_copies=True,
        reads_dead_tokens=True,
        returns_lse=True,
        capture=GraphCapture.ALWAYS,
        preference=21,
    )

    @classmethod
    def unusable_reason(cls) -> str | None:
        """Return why the device cannot be used; None if it can."""
        return unusable_reason((9, 0))

    def make_builder(self) -> FlashAttn3MetadataBuilder:
        """Return the step's builder."""
        return FlashAttn3MetadataBuilder(self.layers[0])

    def call(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, *, with_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Call the library's one function."""
        assert isinstance(metadata, FlashAttn3Metadata)
        assert layer.query is not None
        common = metadata.common
        causal, window = sees(layer, common, in_ranges=metadata.in_ranges)
        result = flash_attn_interface.flash_attn_with_kvcache(
            query,
            kv_cache["k"],
            kv_cache["v"],
            cache_seqlens=common.seq_lens,
            page_table=common.block_table,
            cu_seqlens_q=common.query_start_loc,
            max_seqlen_q=common.max_query_len,
            softmax_scale=layer.query.scale,
            causal=causal,
            window_size=window,
            softcap=layer.query.soft_cap or 0.0,
            return_softmax_lse=with_lse,
        )
        output, normaliser, *_ = result if with_lse else (result, None)
        return output, normaliser
