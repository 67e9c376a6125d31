"""What both backends have in common: all of a layer's attention but the library's own call."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import attrs
import torch

from kvframe.contract import (
    RANGE_ENDS,
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    KVCache,
    LayerSpec,
    RangeRuns,
)

DTYPES = frozenset({"float16", "bfloat16"})

HEAD_SIZES = frozenset(range(8, 257, 8))


MASKS = frozenset({"causal", "bidirectional", "bidirectional_window", "window", "ranges"})


@attrs.frozen(eq=False)
class RangedMetadata:
    """A step with ranges of a prompt that see each other both ways, as two calls of the library.

    Attributes:
        causal: The call for the queries in no range.
        ranged: The call for the others.
    """

    causal: Any
    ranged: Any


class FlashMetadataBuilder(AttentionMetadataBuilder):
    """Makes the call, or the two calls, of the library that compute a step."""

    on_host = frozenset()

    def __init__(self, layer: LayerSpec) -> None:
        """Keep the properties of the group's layers, from any of them."""
        assert layer.spec is not None
        assert layer.spec.mask is not None
        self._mask = layer.spec.mask

    def build(self, metadata: CommonAttentionMetadata) -> Any:
        """Return the step's call; if it has ranges, its runs."""
        if RANGE_ENDS in metadata.extensions and metadata.causal and self._mask.causal:
            return RangeRuns.of(metadata)
        return self.call(metadata)

    def finish(self, built: Any) -> Any:
        """Return the step's call; if it has ranges, both calls."""
        if not isinstance(built, RangeRuns):
            return built
        causal, ranged = built.parts()
        return RangedMetadata(self.call_of_part(causal), self.call_of_part(ranged, in_ranges=True))

    @abstractmethod
    def call(self, metadata: CommonAttentionMetadata) -> Any:
        """Return a step's call. Its host copies may be read."""

    @abstractmethod
    def call_of_part(self, part: CommonAttentionMetadata, *, in_ranges: bool = False) -> Any:
        """Return the call of a part of a step, whose host copies do not describe it.

        Args:
            part: A result of ``RangeRuns.parts``.
            in_ranges: Whether its queries see all tokens after them.
        """


class FlashBackend(AttentionBackend):
    """Adds to what a library computes: ranges, learned sinks, the log-sum-exp, padding, the host's dtype and memory."""

    @abstractmethod
    def call(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, *, with_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Call the library once.

        Args:
            layer: As for ``attend``.
            query: ``[num_tokens, num_heads, head_size], device``, in the dtype of the pages.
            kv_cache: As for ``attend``.
            metadata: The call, as the builder made it.
            with_lse: Whether the logarithm of the denominator is wanted.

        Returns:
            Attention without sinks, ``[num_rows, num_heads, head_size]``, of the first tokens, and of all but padding
            at least; and ``[num_heads, num_rows], float32``, or None.
        """

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
        """Compute attention over the pages in place, with the library's log-sum-exp."""
        rows, with_lse = query.to(kv_cache["k"].dtype), lse is not None or sinks is not None
        output, normaliser = self._call_all(layer, rows, kv_cache, metadata, with_lse=with_lse)
        if lse is not None:
            assert normaliser is not None
            lse[len(output) :] = -math.inf
            lse[: len(output)] = log_sum_exp(normaliser, sinks)
        return placed(with_sinks(output, normaliser, sinks), query, out)

    def _call_all(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, *, with_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Call the library once; for a step with ranges, once for each of its parts."""
        if not isinstance(metadata, RangedMetadata):
            return self.call(layer, query, kv_cache, metadata, with_lse=with_lse)
        output, normaliser = self.call(layer, query, kv_cache, metadata.causal, with_lse=with_lse)
        of_ranges, normaliser_of_ranges = self.call(layer, query, kv_cache, metadata.ranged, with_lse=with_lse)
        if normaliser is not None and normaliser_of_ranges is not None:
            normaliser = torch.maximum(without_infinity(normaliser), without_infinity(normaliser_of_ranges))
        # A query has keys in one of the two calls, and the other one gives it zeros.
        return output + of_ranges, normaliser


def unusable_reason(least: tuple[int, int]) -> str | None:
    """Return in one sentence why the device cannot be used; None if it can.

    Args:
        least: The compute capability that the library's kernels require.
    """
    if not torch.cuda.is_available():
        return "needs a CUDA device; torch sees none"
    found = torch.cuda.get_device_capability()
    if found < least:
        return f"needs compute capability {least[0]}.{least[1]} or more, and the device has {found[0]}.{found[1]}"
    return None


def sees(layer: LayerSpec, metadata: CommonAttentionMetadata, *, in_ranges: bool) -> tuple[bool, tuple[int, int]]:
    """Return whether keys after a query are hidden, and how many keys it sees before and after it; -1 for all.

    Args:
        layer: The layer.
        metadata: The batch.
        in_ranges: Whether the batch is the part of a step that is in ranges.
    """
    assert layer.spec is not None
    mask = layer.spec.mask
    assert mask is not None
    if not metadata.causal or mask.sees_all:
        return False, (-1, -1)
    if mask.window is not None and mask.lookahead is not None:
        return False, (mask.window - 1, mask.lookahead)
    if mask.window is None:
        return not in_ranges, (-1, -1)
    return not in_ranges, (mask.window - 1, -1 if in_ranges else 0)


def with_sinks(output: torch.Tensor, normaliser: torch.Tensor | None, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return attention with one more logit per head in the denominator (GPT-OSS, arXiv 2508.10925).

    The logit scales every output by the same factor, which follows from the denominator, so it can be applied
    afterwards.

    Args:
        output: ``[num_tokens, num_heads, head_size], device``: attention without it.
        normaliser: ``[num_heads, num_tokens], float32, device``: the logarithm of the denominator; not read without
            sinks.
        sinks: ``[num_heads], device``: the logits; None for none.

    Returns:
        ``output`` itself without sinks; otherwise as ``output``, in float32.
    """
    if sinks is None:
        return output
    assert normaliser is not None
    share = torch.sigmoid(normaliser.float() - sinks.float()[:, None]).T
    return output * share[..., None]


def log_sum_exp(normaliser: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the log-sum-exp as ``AttentionBackend.attend`` writes it.

    Args:
        normaliser: ``[num_heads, num_tokens], float32, device``: the logarithm of the denominator. FlashAttention-2
            gives a query without keys an infinite one.
        sinks: ``[num_heads], device``: logits that are added to the denominator; None for none.

    Returns:
        ``[num_tokens, num_heads], float32, device``.
    """
    lse = without_infinity(normaliser.float().T)
    return lse if sinks is None else torch.logaddexp(lse, sinks.float())


def without_infinity(normaliser: torch.Tensor) -> torch.Tensor:
    """Return logarithms of denominators, any shape, with -inf for a query without keys."""
    return normaliser.masked_fill(normaliser == math.inf, -math.inf)


def placed(output: torch.Tensor, query: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Return the output of a library in the query's dtype, with zeros for padding after it.

    The libraries' public functions take no memory to write to. If nothing is left to do, their tensor is returned, and
    the host copies it. Otherwise the last operation writes to ``out``.

    Args:
        output: ``[num_rows, num_heads, head_size], device``.
        query: ``[num_tokens, num_heads, head_size], device``.
        out: ``[num_tokens, num_heads, head_size], device``: where the host wants the result; None for a new tensor.
    """
    if len(output) == len(query) and output.dtype == query.dtype:
        return output
    result = query.new_empty(len(query), *output.shape[1:]) if out is None else out
    result[: len(output)] = output
    result[len(output) :] = 0
    return result
