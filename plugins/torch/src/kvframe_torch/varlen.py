"""The backend ``torch_varlen``: ``torch.nn.attention.varlen``, the paged FlashAttention-2 that ships with torch."""

from __future__ import annotations

import inspect
import math
from functools import cache
from typing import Any

import attrs
import numpy as np
import torch

from kvframe.contract.backend import AttentionBackend, AttentionMetadataBuilder, KVCache
from kvframe.contract.capabilities import Capabilities
from kvframe.contract.capture import GraphCapture
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.specs import LayerSpec

try:
    from torch.nn.attention import varlen
except ImportError:  # Older versions of torch lack it.
    varlen = None  # type: ignore[assignment]

MIN_COMPUTE_CAPABILITY = (8, 0)


class VarlenMetadataBuilder(AttentionMetadataBuilder):
    """Finds out whether row ``r`` of a step of decodes is the query of request ``r``."""

    capture = GraphCapture.UNIFORM
    on_host = frozenset()
    needs_exact_lens = False
    reuse_key = ("varlen",)

    def build(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Return the step, with the most new tokens of a request as ``varlen_attn`` is told.

        The function reads 1 as a promise that row ``r`` is the query of request ``r``. If that is not so, it is told 2.
        """
        num_tokens = metadata.num_actual_tokens
        rows = metadata.query_start_loc_cpu.numpy()[:num_tokens]
        is_in_rows = metadata.slot_mapping.shape[0] == metadata.num_reqs and (rows == np.arange(num_tokens)).all()
        return metadata if is_in_rows else attrs.evolve(metadata, max_query_len=max(2, metadata.max_query_len))


class TorchVarlenBackend(AttentionBackend):
    """Serves causal, bidirectional and windowed attention with learned sinks, on pages of a multiple of 256 tokens."""

    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"float16", "bfloat16"}),
        masks=frozenset({"causal", "bidirectional", "window"}),
        sinks=True,
        head_sizes=frozenset(range(8, 257, 8)),
        block_size_multiple=256,
        takes_copies=True,
        reads_dead_tokens=True,
        returns_lse=True,
        capture=GraphCapture.UNIFORM,
        preference=5,
    )

    @classmethod
    def unusable_reason(cls) -> str | None:
        """Return why this version of torch or this machine cannot run the backend; None if it can."""
        if not _takes_block_tables():
            return f"torch {torch.__version__} has no torch.nn.attention.varlen that takes a block table"
        if not torch.cuda.is_available():
            return "needs a CUDA device; torch sees none"
        if (found := torch.cuda.get_device_capability()) < MIN_COMPUTE_CAPABILITY:
            return f"needs compute capability 8.0 or more, and the device has {found[0]}.{found[1]}"
        return None

    def make_builder(self) -> VarlenMetadataBuilder:
        """Return the builder of a step's metadata."""
        return VarlenMetadataBuilder()

    def forward(
        self,
        layer: LayerSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        metadata: Any,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to the pages in place."""
        return self._attend(layer, query, kv_cache, metadata, sinks, with_lse=sinks is not None)[0]

    def forward_with_lse(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, sinks: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to the pages in place; the log-sum-exp is the function's own."""
        output, lse = self._attend(layer, query, kv_cache, metadata, sinks, with_lse=True)
        assert lse is not None
        # FlashAttention-2 gives a query without keys an infinite denominator.
        lse = lse.masked_fill(lse == math.inf, -math.inf)
        return output, lse if sinks is None else torch.logaddexp(lse, sinks.float())

    @staticmethod
    def _attend(
        layer: LayerSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        metadata: Any,
        sinks: torch.Tensor | None,
        with_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output, and the log-sum-exp without learned sinks, ``[num_tokens, num_heads]``."""
        assert isinstance(metadata, CommonAttentionMetadata)
        assert layer.query is not None
        assert layer.spec is not None
        keys, mask = kv_cache["k"], layer.spec.mask
        assert mask is not None
        window = (-1, -1)
        if metadata.causal and mask.causal and (metadata.max_query_len > 1 or mask.window is not None):
            window = (-1 if mask.window is None else mask.window - 1, 0)
        result = varlen.varlen_attn(
            query.to(keys.dtype),
            keys,
            kv_cache["v"],
            metadata.query_start_loc,
            None,
            metadata.max_query_len,
            metadata.max_seq_len,
            return_aux=varlen.AuxRequest(lse=True) if with_lse else None,
            scale=layer.query.scale,
            window_size=window,
            enable_gqa=query.shape[1] > keys.shape[2],
            seqused_k=metadata.seq_lens,
            block_table=metadata.block_table,
        )
        if isinstance(result, torch.Tensor):
            return result.to(query.dtype), None
        output, normaliser = result
        lse = normaliser.float().T
        if sinks is None:
            return output.to(query.dtype), lse
        # A sink is one more logit in the denominator, so it scales every weight by the same factor.
        share = torch.sigmoid(lse - sinks.float())
        return (output * share[..., None]).to(query.dtype), lse


@cache
def _takes_block_tables() -> bool:
    return varlen is not None and "block_table" in inspect.signature(varlen.varlen_attn).parameters
