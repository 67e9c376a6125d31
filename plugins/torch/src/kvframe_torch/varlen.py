"""The backend ``torch_varlen``: ``torch.nn.attention.varlen``, the paged FlashAttention-2 that ships with torch."""

from __future__ import annotations

import inspect
import math
from functools import cache, partial
from typing import Any

import attrs
import numpy as np
import torch

from kvframe.contract.backend import AttentionBackend, AttentionMetadataBuilder, KVCache
from kvframe.contract.capabilities import Capabilities
from kvframe.contract.capture import GraphCapture
from kvframe.contract.metadata import RANGE_ENDS, CommonAttentionMetadata
from kvframe.contract.ranges import RangeRuns
from kvframe.contract.specs import LayerSpec

try:
    from torch.nn.attention import varlen
except ImportError:  # Older versions of torch lack it.
    varlen = None  # type: ignore[assignment]

MIN_COMPUTE_CAPABILITY = (8, 0)


@attrs.frozen(eq=False)
class RangedStep:
    """A step with ranges of prompts.

    Attributes:
        step: The step, for layers that see all tokens anyway.
        causal: Its runs in no range; a call of ``varlen_attn`` has one window for all queries.
        ranged: Its runs in one range each.
    """

    step: CommonAttentionMetadata
    causal: CommonAttentionMetadata
    ranged: CommonAttentionMetadata


class VarlenMetadataBuilder(AttentionMetadataBuilder):
    """Finds out whether row ``r`` of a step of decodes is the query of request ``r``, and the runs of ranges."""

    capture = GraphCapture.UNIFORM
    on_host = frozenset()
    needs_exact_lens = False
    reuse_key = ("varlen",)

    def build(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata | RangeRuns:
        """Return the step, with the most new tokens of a request as ``varlen_attn`` is told.

        The function reads 1 as a promise that row ``r`` is the query of request ``r``. If that is not so, it is told 2.
        """
        if RANGE_ENDS in metadata.extensions and metadata.causal:
            return RangeRuns.of(metadata)
        num_tokens = metadata.num_actual_tokens
        rows = metadata.query_start_loc_cpu.numpy()[:num_tokens]
        is_in_rows = metadata.slot_mapping.shape[0] == metadata.num_reqs and (rows == np.arange(num_tokens)).all()
        return metadata if is_in_rows else attrs.evolve(metadata, max_query_len=max(2, metadata.max_query_len))

    def finish(self, built: CommonAttentionMetadata | RangeRuns) -> CommonAttentionMetadata | RangedStep:
        """Return the step; one with ranges as its two parts."""
        return RangedStep(built.step, *built.parts()) if isinstance(built, RangeRuns) else built


class TorchVarlenBackend(AttentionBackend):
    """Serves causal, bidirectional and windowed attention with learned sinks, on pages of a multiple of 256 tokens."""

    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"float16", "bfloat16"}),
        masks=frozenset({"causal", "bidirectional", "bidirectional_window", "window", "ranges"}),
        extensions=frozenset({RANGE_ENDS}),
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

    def attend(
        self,
        layer: LayerSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        metadata: Any,
        *,
        sinks: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Attend to the pages in place; the log-sum-exp is the function's own."""
        assert layer.spec is not None
        mask = layer.spec.mask
        assert mask is not None
        left = -1 if mask.window is None else mask.window - 1
        right = mask.lookahead or 0
        call = partial(_call, layer, query, kv_cache, with_lse=lse is not None or sinks is not None)
        if isinstance(metadata, RangedStep) and mask.causal:
            output, log_sums = call(metadata.causal, window=(left, 0))
            of_ranges, log_sums_of_ranges = call(metadata.ranged, window=(left, -1))
            # Each query has keys in one of the two parts, and the other one gives it zeros.
            output = output + of_ranges
            if log_sums is not None and log_sums_of_ranges is not None:
                log_sums = torch.maximum(_without_infinity(log_sums), _without_infinity(log_sums_of_ranges))
        else:
            step = metadata.step if isinstance(metadata, RangedStep) else metadata
            assert isinstance(step, CommonAttentionMetadata)
            is_local = step.causal and not mask.sees_all and (step.max_query_len > 1 or mask.window is not None)
            output, log_sums = call(step, window=(left, right) if is_local else (-1, -1))
        if log_sums is None:
            return output.to(query.dtype)
        if lse is not None:
            lse.copy_(_without_infinity(log_sums))
        if sinks is None:
            return output.to(query.dtype)
        if lse is not None:
            torch.logaddexp(lse, sinks.float(), out=lse)
        # A sink is one more logit in the denominator, so it scales every weight by the same factor.
        share = torch.sigmoid(log_sums - sinks.float())
        return (output * share[..., None]).to(query.dtype)


def _without_infinity(log_sums: torch.Tensor) -> torch.Tensor:
    """Return logarithms of denominators with -inf for a query without keys; FlashAttention-2 gives it +inf."""
    return log_sums.masked_fill(log_sums == math.inf, -math.inf)


def _call(
    layer: LayerSpec,
    query: torch.Tensor,
    kv_cache: KVCache,
    metadata: CommonAttentionMetadata,
    *,
    window: tuple[int, int],
    with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call torch's function; return the output and the log-sum-exp, ``[num_tokens, num_heads]``, if it is wanted."""
    assert layer.query is not None
    keys = kv_cache["k"]
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
        return result, None
    output, normaliser = result
    return output, normaliser.float().T


@cache
def _takes_block_tables() -> bool:
    return varlen is not None and "block_table" in inspect.signature(varlen.varlen_attn).parameters
