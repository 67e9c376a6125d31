"""The backend: it divides a step into work items for threads once, and each layer reads its pages in place."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import attrs
import torch
from kvframe_kernels.jit.attention import Batch, paged_attention
from kvframe_kernels.jit.plan import IntArray, Mask, plan

from kvframe.contract import (
    RANGE_ENDS,
    SEQ_STARTS,
    AttentionBackend,
    AttentionMetadataBuilder,
    Capabilities,
    CommonAttentionMetadata,
    KVCache,
    LayerSpec,
    lookahead_ends,
)


class NumbaMetadataBuilder(AttentionMetadataBuilder):
    """Divides a step into work items."""

    table_fields = frozenset({"block_table"})

    def __init__(self, layer: LayerSpec) -> None:
        """Keep the properties of the group's layers."""
        assert layer.spec is not None
        assert layer.query is not None
        mask = layer.spec.mask
        assert mask is not None
        self._mask = Mask(
            causal=not mask.sees_all,
            window=mask.window or 0,
            num_sink_tokens=mask.num_sink_tokens,
            chunk=mask.chunk or 0,
        )
        self._lookahead = mask.lookahead
        self._num_heads = layer.query.num_heads
        self._num_kv_heads = layer.spec.state_tensors()["k"].shape[1]

    @property
    def reuse_key(self) -> Hashable:
        """The properties of the mask and of the layers' heads that the division depends on."""
        return self._mask, self._lookahead, self._num_heads, self._num_kv_heads

    def build(self, metadata: CommonAttentionMetadata) -> Batch:
        """Return the step's work items."""
        mask = attrs.evolve(self._mask, causal=self._mask.causal and metadata.causal)
        range_ends = _host_values(metadata, RANGE_ENDS)
        ends = None if range_ends is None else metadata.extensions[RANGE_ENDS].values
        if self._lookahead is not None:
            range_ends = lookahead_ends(metadata, self._lookahead)
            ends = torch.from_numpy(range_ends)
        work = plan(
            metadata.query_start_loc_cpu.numpy(),
            metadata.seq_lens_cpu.numpy(),
            _host_values(metadata, SEQ_STARTS),
            metadata.slot_mapping.shape[0],
            mask,
            self._num_heads,
            self._num_kv_heads,
            torch.get_num_threads(),
            range_ends,
        )
        return Batch(work=work, block_table=metadata.block_table, mask=mask, range_ends=ends)

    def refreshed_fields(self, built: Any, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        """Return the block table."""
        return {"block_table": metadata.block_table}


def _host_values(metadata: CommonAttentionMetadata, name: str) -> IntArray | None:
    """Return the values of an extension; None if the step does not have it."""
    if name not in metadata.extensions:
        return None
    values_cpu = metadata.extensions[name].values_cpu
    assert values_cpu is not None
    found: IntArray = values_cpu.numpy()
    return found


class NumbaBackend(AttentionBackend):
    """Serves every mask that kernels know, with soft caps, sinks, learned sink logits and biases."""

    capabilities = Capabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({"float32", "float16", "bfloat16"}),
        masks=frozenset(
            {"causal", "bidirectional", "bidirectional_window", "window", "sink_tokens", "chunk", "ranges"}
        ),
        extensions=frozenset({SEQ_STARTS, RANGE_ENDS}),
        soft_cap=True,
        sinks=True,
        relative_bias=True,
        alibi=True,
        separate_value_size=True,
        takes_copies=True,
        returns_lse=True,
        preference=5,
    )

    def __init__(self, layers: Sequence[LayerSpec], device: torch.device) -> None:
        super().__init__(layers, device)
        slopes = None if layers[0].query is None else layers[0].query.alibi_slopes
        self._slopes = None if slopes is None else torch.tensor(slopes, dtype=torch.float32)[:, None]

    def make_builder(self) -> NumbaMetadataBuilder:
        """Return the builder of the step's work."""
        return NumbaMetadataBuilder(self.layers[0])

    def attend(
        self,
        layer: LayerSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        metadata: Any,
        *,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Compute attention over the pages in place."""
        assert isinstance(metadata, Batch)
        assert layer.query is not None
        return paged_attention(
            query,
            kv_cache["k"],
            kv_cache["v"],
            metadata,
            scale=layer.query.scale,
            soft_cap=layer.query.soft_cap,
            sinks=sinks,
            bias=self.bias_tables.get(layer.name, self._slopes),
            lse=lse,
            out=out,
        )
