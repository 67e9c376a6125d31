"""Paged attention in Triton: one kernel for prefill, extend and decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from kvframe_kernels.triton.attention import FORMATS, LOG2_E, PagedAttention
from kvframe_kernels.triton.attention_plan import UNBOUNDED
from kvframe_kernels.triton.pages import copy_pages
from kvframe_kernels.triton.write import write_kv

from kvframe.contract import (
    PLAIN,
    RANGE_ENDS,
    SEQ_STARTS,
    AttentionBackend,
    AttentionMetadataBuilder,
    Capabilities,
    GraphCapture,
    KVCache,
    LayerSpec,
    MoreInputs,
    PageCopier,
    Slots,
)
from kvframe_triton.builder import TritonMetadata, TritonMetadataBuilder
from kvframe_triton.chosen import ChosenMetadata, ChosenMetadataBuilder

DEFAULT_NUM_CORES = 132
"""Multiprocessors of a Hopper GPU, for plans without a device."""


class TritonBackend(AttentionBackend):
    """Serves every mask that kernels have a name for, on keys and values of every known format."""

    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"float32", "float16", "bfloat16"}),
        masks=frozenset(
            {"causal", "bidirectional", "bidirectional_window", "window", "sink_tokens", "chunk", "ranges"}
        ),
        extensions=frozenset({SEQ_STARTS, RANGE_ENDS}),
        formats=frozenset(FORMATS),
        takes_copies=True,
        soft_cap=True,
        sinks=True,
        relative_bias=True,
        alibi=True,
        separate_value_size=True,
        returns_lse=True,
        choices=frozenset({"tokens", "blocks"}),
        capture=GraphCapture.ALWAYS,
        preference=10,
    )

    @classmethod
    def unusable_reason(cls) -> str | None:
        """Return that there is no CUDA device; None if there is one."""
        return None if torch.cuda.is_available() else "needs a CUDA device; torch sees none"

    @classmethod
    def page_copier(cls) -> PageCopier:
        """Return the kernel that copies pages."""
        return copy_pages

    def __init__(self, layers: Sequence[LayerSpec], device: torch.device) -> None:
        super().__init__(layers, device)
        spec, query = layers[0].spec, layers[0].query
        assert spec is not None
        assert query is not None
        mask, kv_format = spec.mask, spec.kv_format
        assert mask is not None
        state = spec.in_format(PLAIN).state_tensors()
        self._dtype: torch.dtype = getattr(torch, state["k"].dtype)
        self._attention = PagedAttention(
            num_heads=query.num_heads,
            num_kv_heads=state["k"].shape[1],
            head_size=query.head_size,
            head_size_v=state["v"].shape[2],
            block_size=spec.block_size,
            scale=query.scale,
            causal=not mask.sees_all,
            window=min(mask.window or 0, UNBOUNDED),
            num_sink_tokens=min(mask.num_sink_tokens, UNBOUNDED),
            chunk=min(mask.chunk or 0, UNBOUNDED),
            soft_cap=query.soft_cap,
            max_distance=0 if query.relative_bias is None else query.relative_bias.max_distance,
            has_slopes=query.alibi_slopes is not None,
            format=kv_format.name,
            k_scale=getattr(kv_format, "k_scale", 1.0),
            v_scale=getattr(kv_format, "v_scale", 1.0),
            num_choosers=0 if query.choice is None else query.choice.num_choosers,
            num_cores=num_cores(device),
        )
        self._lookahead = mask.lookahead
        self._choice = query.choice
        self._slopes: torch.Tensor | None = None
        if query.alibi_slopes is not None:
            self._slopes = torch.tensor(query.alibi_slopes, dtype=torch.float32, device=device) * LOG2_E

    def bind(self, layer: LayerSpec, parameters: Mapping[str, torch.Tensor]) -> None:
        """Keep the layer's tensors, and the logarithms of its bias to base 2, in which the kernels compute."""
        super().bind(layer, parameters)
        if layer.name in self.bias_tables:
            self.bias_tables[layer.name] = self.bias_tables[layer.name] * LOG2_E

    def make_builder(self) -> AttentionMetadataBuilder:
        """Return the builder of the step's work items."""
        if self._choice is not None:
            return ChosenMetadataBuilder(self._attention, self._dtype, self._choice)
        return TritonMetadataBuilder(self._attention, self._dtype, self._lookahead)

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, kv_cache: KVCache, slots: Slots) -> None:
        """Store keys and values in the layers' format, in one launch."""
        attention = self._attention
        write_kv(key, value, kv_cache, slots.indices, attention.format, attention.k_scale, attention.v_scale)

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
        """Launch the kernels of the step; over chosen tokens, which they read in the pages too."""
        query = query if query.stride(-1) == 1 else query.contiguous()
        output = out
        if output is None:
            output = query.new_empty(query.shape[0], query.shape[1], self._attention.head_size_v)
        step = metadata.numbers, metadata.programs, output
        if more is not None:
            assert isinstance(metadata, ChosenMetadata)
            assert more.chosen is not None
            slots = metadata.slots(layer, more.chosen)
            launches = self._attention.launches(query, kv_cache, slots, *step, causal=False, sinks=sinks, lse=lse)
        else:
            assert isinstance(metadata, TritonMetadata)
            launches = self._attention.launches(
                query,
                kv_cache,
                metadata.block_table,
                *step,
                causal=metadata.causal,
                has_starts=metadata.has_starts,
                sinks=sinks,
                bias=self.bias_tables.get(layer.name, self._slopes),
                lse=lse,
                range_ends=metadata.range_ends,
            )
        for launch in launches:
            launch.run()
        return output


def num_cores(device: torch.device) -> int:
    """Return the number of a device's multiprocessors, for which work is divided."""
    if device.type != "cuda":
        return DEFAULT_NUM_CORES
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
