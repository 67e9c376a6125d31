"""The reference backend: attention written straight from the spec's live ranges, one query at a time.

It is slow on purpose. Every other backend is measured against it, so it knows no mask, only
``KVCacheSpec.live_ranges``, for the length of the request's prompt if that matters, the mask function of a sparse type,
whether a batch or a spec is causal at all, and what a window in both directions shows. It reads no token that no query
attends to.
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch

from kvframe.contract.backend import AttentionBackend, AttentionMetadataBuilder, KVCache, MoreInputs
from kvframe.contract.capabilities import Capabilities
from kvframe.contract.merging import lse_dtype
from kvframe.contract.metadata import (
    NO_EXTENSIONS,
    RANGE_ENDS,
    SEQ_STARTS,
    CommonAttentionMetadata,
)
from kvframe.contract.relative_bias import bias_columns
from kvframe.contract.specs import KVCacheSpec, LayerSpec

LOW_PRECISION = (torch.float16, torch.bfloat16)


def attended_tokens(spec: KVCacheSpec, position: int, seq_len: int, causal: bool, seq_start: int = 0) -> list[int]:
    """Return the positions that the query at ``position`` attends to: the live tokens and its own.

    For a sparse type, only the positions that its mask function shows are returned.

    Args:
        spec: The layer's cache spec; one with a bidirectional mask without a window sees every token of the request.
        position: The position of the query.
        seq_len: Tokens of its request after the step.
        causal: Whether the batch is causal; if not, a query sees every token of its request.
        seq_start: Tokens before this one are hidden, with any mask.
    """
    mask = spec.mask
    if not causal or (mask is not None and mask.sees_all):
        return list(range(seq_start, seq_len))
    if mask is not None and mask.window is not None and mask.lookahead is not None:
        return list(range(max(seq_start, position + 1 - mask.window), min(seq_len, position + 1 + mask.lookahead)))
    tokens = [token for start, stop in spec.live_ranges(position) for token in range(start, stop)] + [position]
    if spec.is_sparse:
        assert spec.mask_function is not None
        tokens = [token for token in tokens if spec.mask_function(position, token)]
    return [token for token in tokens if token >= seq_start]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: LayerSpec,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one query's attention over the tokens it attends to, and its log-sum-exp: zeros and -inf for none.

    A learned sink is one more logit in the softmax, without a value, so it takes a share of the weight and
    adds nothing to the output (GPT-OSS, arXiv 2508.10925).

    Args:
        query: ``[num_heads, head_size]``.
        key: ``[num_tokens, num_kv_heads, head_size]``.
        value: ``[num_tokens, num_kv_heads, head_size_v]``.
        layer: For the scale and the soft cap.
        sinks: ``[num_heads]`` or None.
        bias: ``[num_heads, num_tokens]``, added to the scores; None for none.

    Returns:
        ``[num_heads, head_size_v]``, in the query's dtype, and ``[num_heads]``.
    """
    assert layer.query is not None
    group_size = query.shape[0] // key.shape[1]
    key = key.repeat_interleave(group_size, dim=1)
    value = value.repeat_interleave(group_size, dim=1)
    scores = torch.einsum("hd,thd->ht", query, key) * layer.query.scale
    if layer.query.soft_cap is not None:
        scores = layer.query.soft_cap * torch.tanh(scores / layer.query.soft_cap)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None]], dim=1)
    weights = torch.softmax(scores, dim=-1)[:, : key.shape[0]]
    return torch.einsum("ht,thd->hd", weights, value), torch.logsumexp(scores, dim=-1)


class ReferenceBuilder(AttentionMetadataBuilder):
    """Keeps the batch metadata, with copies of its own of what the layers read on the host."""

    on_host = frozenset()

    def build(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Return the step; a host may overwrite its own buffers before the layers run."""
        extensions = {
            name: attrs.evolve(
                extension, values_cpu=None if extension.values_cpu is None else extension.values_cpu.clone()
            )
            for name, extension in metadata.extensions.items()
        }
        return attrs.evolve(
            metadata,
            query_start_loc_cpu=metadata.query_start_loc_cpu.clone(),
            seq_lens_cpu=metadata.seq_lens_cpu.clone(),
            extensions=extensions or NO_EXTENSIONS,
        )


class TorchReferenceBackend(AttentionBackend):
    """Serves every attention layer whose state is ``k`` and ``v``, on any device, slowly and by definition."""

    capabilities = Capabilities(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({"float64", "float32", "float16", "bfloat16"}),
        masks=frozenset(
            {
                *("causal", "bidirectional", "bidirectional_window", "window", "sink_tokens", "chunk"),
                *("ranges", "live_range", "sparse"),
            }
        ),
        extensions=frozenset({SEQ_STARTS, RANGE_ENDS}),
        soft_cap=True,
        sinks=True,
        relative_bias=True,
        alibi=True,
        separate_value_size=True,
        takes_copies=True,
        returns_lse=True,
        choices=frozenset({"tokens", "blocks"}),
        preference=-10,
    )

    def make_builder(self) -> AttentionMetadataBuilder:
        """Return a builder that keeps the numbers of a step."""
        return ReferenceBuilder()

    def attend(
        self,
        layer: LayerSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        metadata: Any,
        *,
        sinks: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        more: MoreInputs | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Compute each query of each request on its own, in float32 at least, over those of its tokens it reads."""
        assert isinstance(metadata, CommonAttentionMetadata)
        assert layer.spec is not None
        compute_dtype = torch.float32 if query.dtype in LOW_PRECISION else query.dtype
        output = query.new_zeros(query.shape[0], query.shape[1], kv_cache["v"].shape[-1])
        log_sums = query.new_full(query.shape[:2], -math.inf, dtype=lse_dtype(query.dtype))
        starts = metadata.query_start_loc_cpu.tolist()
        seq_starts = [0] * metadata.num_reqs
        if SEQ_STARTS in metadata.extensions:
            values_cpu = metadata.extensions[SEQ_STARTS].values_cpu
            assert values_cpu is not None
            seq_starts = values_cpu.tolist()
        range_ends: list[int] | None = None
        if RANGE_ENDS in metadata.extensions and (layer.spec.mask is None or layer.spec.mask.causal):
            values_cpu = metadata.extensions[RANGE_ENDS].values_cpu
            assert values_cpu is not None
            range_ends = values_cpu.tolist()
        assert layer.query is not None
        table = None if layer.query.relative_bias is None else self.bias_tables[layer.name]
        slopes = None
        if layer.query.alibi_slopes is not None:
            slopes = torch.tensor(layer.query.alibi_slopes, dtype=compute_dtype, device=query.device)
        # For each query, the chosen positions of each chooser. Without choices, one chooser takes all that is seen.
        chosen_tokens = None if more is None else more.chosen
        choices = None if chosen_tokens is None else chosen_tokens.positions().tolist()
        num_choosers = 1 if chosen_tokens is None else chosen_tokens.indices.shape[1]
        for request in range(metadata.num_reqs):
            seq_len = int(metadata.seq_lens_cpu[request])
            num_new = starts[request + 1] - starts[request]
            for i in range(num_new):
                position = seq_len - num_new + i
                tokens = attended_tokens(layer.spec, position, seq_len, metadata.causal, seq_starts[request])
                if range_ends is not None and metadata.causal:
                    tokens += range(position + 1, range_ends[starts[request] + i])
                row = starts[request] + i
                for chooser in range(num_choosers):
                    read_tokens = tokens if choices is None else [t for t in tokens if t in set(choices[row][chooser])]
                    positions = torch.tensor(read_tokens, dtype=torch.int64, device=query.device)
                    blocks = metadata.block_table[request, positions // metadata.block_size].long()
                    offsets = positions % metadata.block_size
                    heads = _share(query.shape[1], num_choosers, chooser)
                    kv_heads = _share(kv_cache["k"].shape[2], num_choosers, chooser)
                    bias = None
                    if table is not None:
                        bias = table[heads, bias_columns(positions - position, table.shape[1] // 2)]
                    elif slopes is not None:
                        bias = -slopes[heads, None] * (positions - position).abs()
                    output[row, heads], log_sums[row, heads] = attend(
                        query[row, heads].to(compute_dtype),
                        kv_cache["k"][blocks, offsets, kv_heads].to(compute_dtype),
                        kv_cache["v"][blocks, offsets, kv_heads].to(compute_dtype),
                        layer,
                        None if sinks is None else sinks[heads],
                        bias,
                    )
        if lse is not None:
            lse.copy_(log_sums)
        return output


def _share(num_heads: int, num_choosers: int, chooser: int) -> slice:
    """Return the heads that read the choices of one chooser."""
    return slice(chooser * num_heads // num_choosers, (chooser + 1) * num_heads // num_choosers)
