"""Attention on a CPU by compiled kernels, which read keys and values in their pages."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import attrs
import torch
from kvframe_kernels.cpu.attention import Batch, Scales, Scoring, paged_attention
from kvframe_kernels.cpu.build import BuildError, load_library
from kvframe_kernels.cpu.write import write_kv

from kvframe.contract import (
    RANGE_ENDS,
    SEQ_STARTS,
    AttentionBackend,
    AttentionMask,
    AttentionMetadataBuilder,
    Capabilities,
    CommonAttentionMetadata,
    GraphCapture,
    KVCache,
    LayerSpec,
    MoreInputs,
    Slots,
    find_chosen,
    lookahead_ends,
)
from kvframe_cpu.chosen import as_pages


class CpuMetadataBuilder(AttentionMetadataBuilder):
    """Passes the batch to the kernels, which divide a step into work items themselves, in a few microseconds."""

    capture = GraphCapture.ALWAYS
    table_fields = frozenset({"block_table"})

    def __init__(self, mask: AttentionMask) -> None:
        """Keep the layers' mask."""
        self._sees_all = mask.sees_all
        self._lookahead = mask.lookahead

    @property
    def reuse_key(self) -> Hashable:
        """What the builder uses of the layers' mask."""
        return self._sees_all, self._lookahead

    def build(self, metadata: CommonAttentionMetadata) -> Batch:
        """Return the step's requests."""
        found = {name: extension.values for name, extension in metadata.extensions.items()}
        range_ends = found.get(RANGE_ENDS)
        if self._lookahead is not None:
            range_ends = torch.from_numpy(lookahead_ends(metadata, self._lookahead))
        return Batch(
            query_start_loc=metadata.query_start_loc,
            seq_lens=metadata.seq_lens,
            block_table=metadata.block_table,
            seq_starts=found.get(SEQ_STARTS),
            causal=metadata.causal and not self._sees_all,
            range_ends=range_ends,
        )

    def refreshed_fields(self, built: Any, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        """Return the block table."""
        return {"block_table": metadata.block_table}


class CpuBackend(AttentionBackend):
    """Serves causal, bidirectional, windowed and chunked attention, with soft caps, sinks, learned sinks and biases."""

    capabilities = Capabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({"float32", "float16", "bfloat16"}),
        masks=frozenset(
            {"causal", "bidirectional", "bidirectional_window", "window", "sink_tokens", "chunk", "ranges"}
        ),
        extensions=frozenset({SEQ_STARTS, RANGE_ENDS}),
        formats=frozenset({"plain", "fp8_tensor", "fp8_token_head", "int8_token_head", "int4_token_head"}),
        soft_cap=True,
        sinks=True,
        relative_bias=True,
        alibi=True,
        separate_value_size=True,
        takes_copies=True,
        returns_lse=True,
        choices=frozenset({"tokens", "blocks"}),
        capture=GraphCapture.ALWAYS,
        preference=10,
    )

    @classmethod
    def unusable_reason(cls) -> str | None:
        """Return why the kernels cannot be built on this machine; build them if they are not built yet."""
        try:
            load_library()
        except BuildError as error:
            return str(error)
        return None

    def __init__(self, layers: Sequence[LayerSpec], device: torch.device) -> None:
        """Keep the group's layers."""
        super().__init__(layers, device)
        query, spec = layers[0].query, layers[0].spec
        assert query is not None
        assert spec is not None
        assert spec.mask is not None
        self._mask = spec.mask
        self._format = spec.kv_format.name
        self._slopes = None if query.alibi_slopes is None else torch.tensor(query.alibi_slopes, dtype=torch.float32)
        self._scoring = Scoring(
            scale=query.scale,
            soft_cap=query.soft_cap,
            window=spec.mask.window,
            num_sink_tokens=spec.mask.num_sink_tokens,
            chunk=spec.mask.chunk,
            # A format with one scale for all tokens has it as a parameter.
            key_factor=getattr(spec.kv_format, "k_scale", 1.0),
            value_factor=getattr(spec.kv_format, "v_scale", 1.0),
        )

    def make_builder(self) -> AttentionMetadataBuilder:
        """Return the builder; for chosen tokens, one that keeps the step."""
        if self.layers[0].query is not None and self.layers[0].query.choice is not None:
            return super().make_builder()
        return CpuMetadataBuilder(self._mask)

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, kv_cache: KVCache, slots: Slots) -> None:
        """Store keys and values in the layers' format, bit for bit as the format itself would."""
        scoring = self._scoring
        write_kv(key, value, kv_cache, slots.indices, self._format, scoring.key_factor, scoring.value_factor)

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
        more: MoreInputs | None = None,
    ) -> torch.Tensor:
        """Compute attention over the pages in place; over chosen tokens as over pages of one token."""
        if more is not None:
            return self._attend_chosen(layer, query, kv_cache, metadata, sinks, out, lse, more)
        assert isinstance(metadata, Batch)
        bias = self.bias_tables.get(layer.name)
        scales = _scales_of(kv_cache)
        return paged_attention(
            query, kv_cache["k"], kv_cache["v"], metadata, self._scoring, sinks, bias, scales, lse, out, self._slopes
        )

    def _attend_chosen(
        self,
        layer: LayerSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        metadata: Any,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        more: MoreInputs,
    ) -> torch.Tensor:
        assert more.chosen is not None
        assert layer.spec is not None
        assert layer.spec.mask_function is not None
        places = find_chosen(more.chosen, metadata, layer.spec.mask_function)
        pages, batch = as_pages(kv_cache, places)
        num_tokens, num_choosers, _ = places.seen.shape
        scoring = attrs.evolve(self._scoring, window=None, num_sink_tokens=0, chunk=None)
        num_heads = query.shape[1]
        # The heads of a chooser become the heads of its own requests.
        queries = query.reshape(num_tokens * num_choosers, num_heads // num_choosers, -1)
        log_sums = query.new_empty(query.shape[:2], dtype=torch.float32) if lse is None else lse
        output = paged_attention(
            queries,
            pages["k"],
            pages["v"],
            batch,
            scoring,
            scales=_scales_of(pages),
            lse=log_sums.view(queries.shape[:2]),
            out=None if out is None else out.view(*queries.shape[:2], -1),
        ).view(num_tokens, num_heads, -1)
        if sinks is not None:
            # A sink is one more term of each softmax's denominator.
            output.mul_(torch.sigmoid(log_sums - sinks)[..., None])
            torch.logaddexp(log_sums, sinks.to(log_sums.dtype), out=log_sums)
        return output if out is None else out


def _scales_of(kv_cache: KVCache) -> Scales:
    return Scales(
        key_scale=kv_cache.get("k_scale"),
        value_scale=kv_cache.get("v_scale"),
        key_min=kv_cache.get("k_min"),
        value_min=kv_cache.get("v_min"),
    )
