"""Torch's own paged attention on a GPU: ``torch.nn.attention.varlen``, FlashAttention-2 as it ships with torch."""

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
except ImportError:  # torch may be built without it
    varlen = None  # type: ignore[assignment]

MIN_COMPUTE_CAPABILITY = (8, 0)


@attrs.frozen(eq=False)
class VarlenMetadata:
    """A step as the function takes it.

    Attributes:
        common: The batch.
        max_query_len: What it is told of the most new tokens of one request. It takes 1 as a word for row ``r`` being
            the one query of request ``r``, so it is told 2 where that is not so.
    """

    common: CommonAttentionMetadata
    max_query_len: int


class VarlenMetadataBuilder(AttentionMetadataBuilder):
    """Finds out whether each row of a step of decodes is its request's."""

    capture = GraphCapture.UNIFORM
    on_host = frozenset()
    needs_exact_lens = False
    reuse_key = ("varlen",)

    def build(self, metadata: CommonAttentionMetadata) -> VarlenMetadata:
        """Return the step."""
        return VarlenMetadata(
            metadata, metadata.max_query_len if _in_rows(metadata) else max(2, metadata.max_query_len)
        )


def _in_rows(metadata: CommonAttentionMetadata) -> bool:
    """Return whether there are as many rows as requests, and each with a query has it in its own row."""
    num_tokens = metadata.num_actual_tokens
    rows = metadata.query_start_loc_cpu.numpy()[:num_tokens]
    return metadata.slot_mapping.shape[0] == metadata.num_reqs and bool((rows == np.arange(num_tokens)).all())


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
        preference=5,
    )

    @classmethod
    def unusable_reason(cls) -> str | None:
        """Return why this torch or this machine cannot run it."""
        if not _takes_block_tables():
            return f"torch {torch.__version__} has no torch.nn.attention.varlen that takes a block table"
        if not torch.cuda.is_available():
            return "needs a CUDA device; torch sees none"
        if (found := torch.cuda.get_device_capability()) < MIN_COMPUTE_CAPABILITY:
            return f"needs compute capability 8.0 or more, and the device has {found[0]}.{found[1]}"
        return None

    def make_builder(self) -> VarlenMetadataBuilder:
        """Return the step's builder."""
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
        """Attend to the pages where they lie."""
        return self._attend(layer, query, kv_cache, metadata, sinks, with_lse=sinks is not None)[0]

    def forward_with_lse(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, sinks: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to the pages where they lie, with the function's log-sum-exp."""
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
        """Return the output, and the logarithm of the denominator without sinks, ``[num_tokens, num_heads]``."""
        assert isinstance(metadata, VarlenMetadata)
        assert layer.query is not None
        assert layer.spec is not None
        common, keys = metadata.common, kv_cache["k"]
        mask = layer.spec.mask
        assert mask is not None
        window = (-1, -1)
        if common.causal and mask.causal and (metadata.max_query_len > 1 or mask.window is not None):
            window = (-1 if mask.window is None else mask.window - 1, 0)
        result = varlen.varlen_attn(
            query.to(keys.dtype),
            keys,
            kv_cache["v"],
            common.query_start_loc,
            None,
            metadata.max_query_len,
            common.max_seq_len,
            return_aux=varlen.AuxRequest(lse=True) if with_lse else None,
            scale=layer.query.scale,
            window_size=window,
            enable_gqa=query.shape[1] > keys.shape[2],
            seqused_k=common.seq_lens,
            block_table=common.block_table,
        )
        if isinstance(result, torch.Tensor):
            return result.to(query.dtype), None
        output, normaliser = result
        lse = normaliser.float().T
        if sinks is None:
            return output.to(query.dtype), lse
        # One more logit in the denominator scales every weight by the softmax's share against it.
        share = torch.sigmoid(lse - sinks.float())
        return (output * share[..., None]).to(query.dtype), lse


@cache
def _takes_block_tables() -> bool:
    return varlen is not None and "block_table" in inspect.signature(varlen.varlen_attn).parameters
