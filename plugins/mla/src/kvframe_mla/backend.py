"""Latent attention in plain torch: absorbed for decodes, with expanded keys and values for prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from kvframe.contract import (
    RANGE_ENDS,
    SEQ_STARTS,
    AttentionBackend,
    AttentionMetadataBuilder,
    Capabilities,
    GraphCapture,
    KVCache,
    LayerSpec,
    MoreInputs,
    Slots,
    find_chosen,
    lse_dtype,
)
from kvframe_mla.builder import DenseBatch, MLAMetadataBuilder
from kvframe_mla.chosen import attend_chosen
from kvframe_mla.cost import Cost
from kvframe_mla.dense_batches import ABSORBED, SQUARE
from kvframe_mla.spec import KV_UP

MAX_EXPANDED = 1 << 25
"""The most elements of expanded keys and values at once, unless a single head has more."""

MAX_MASK = 1 << 24
"""The most elements of a mask, or of scores for the log-sum-exp, at once, unless a single query has more."""


class MLABackend(AttentionBackend):
    """Serves layers that keep latents, on any device that torch knows.

    Each request is computed in the form that costs less (``kvframe_mla.cost``), together with the others of that form.
    """

    capabilities = Capabilities(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({"float64", "float32", "float16", "bfloat16"}),
        masks=frozenset({"causal", "ranges"}),
        extensions=frozenset({SEQ_STARTS, RANGE_ENDS}),
        state=frozenset({"latent"}),
        sinks=True,
        separate_value_size=True,
        returns_lse=True,
        choices=frozenset({"tokens", "blocks"}),
        capture=GraphCapture.ALWAYS,
    )
    conformance_form = "kvframe_mla.testing:Latents"

    def __init__(self, layers: Sequence[LayerSpec], device: torch.device) -> None:
        """Keep the group's layers."""
        super().__init__(layers, device)
        spec: Any = layers[0].spec
        assert layers[0].query is not None
        self._scale, self._num_heads = layers[0].query.scale, layers[0].query.num_heads
        self._chooses = layers[0].query.choice is not None
        self._latent_size: int = spec.latent_size
        self._rope_size: int = spec.rope_size
        self._head_size_v: int = spec.head_size_v
        self._nope_size = layers[0].query.head_size - spec.rope_size

    def make_builder(self) -> AttentionMetadataBuilder:
        """Return the builder of the step's dense batches; for chosen tokens, one that keeps the step."""
        if self._chooses:
            return super().make_builder()
        cost = Cost.of(self._latent_size, self._nope_size, self._head_size_v)
        return MLAMetadataBuilder(cost, self._num_heads)

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, kv_cache: KVCache, slots: Slots) -> None:
        """Store new tokens' latents and rotated parts.

        Args:
            key: ``[num_tokens, 1, latent_size], device``: the latents.
            value: ``[num_tokens, 1, rope_size], device``: the rotated parts.
            kv_cache: The layer's state tensors; written to.
            slots: Where each token is stored, ``[num_tokens]``; one with a negative slot is not stored.
        """
        latent = kv_cache["latent"]
        latent.index_put_(slots.indices, torch.cat([key, value], dim=-1)[:, 0].to(latent.dtype))

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
        """Gather each dense batch's latents, and compute attention in the dense batch's form, or over chosen tokens."""
        if more is not None:
            return self._attend_chosen(layer, query, kv_cache, metadata, sinks, out, lse, more)
        log_sums = lse
        if sinks is not None and lse is None:
            log_sums = query.new_empty(query.shape[:2], dtype=lse_dtype(query.dtype))
        if log_sums is not None:
            log_sums.fill_(-math.inf)
        kv_up = self.parameters[layer.name][KV_UP].to(query.dtype)
        shape = query.shape[0], self._num_heads, self._head_size_v
        output = query.new_zeros(shape) if out is None else out.zero_()
        for dense in metadata:
            tokens = _gather(dense, kv_cache["latent"], query.dtype)
            rows = query.index_select(0, dense.query_rows)
            attend = self._absorbed if dense.form == ABSORBED else self._expanded
            result, log_sums_of_dense = attend(dense, rows, tokens, kv_up, log_sums is not None)
            _store(dense, result, output)
            if log_sums is not None and log_sums_of_dense is not None:
                _store(dense, log_sums_of_dense, log_sums)
        if sinks is not None and log_sums is not None:
            # A sink is one more term of each softmax's denominator.
            logits = sinks.to(log_sums.dtype)
            output.mul_(torch.sigmoid(log_sums - logits)[..., None])
            torch.logaddexp(log_sums, logits, out=log_sums)
        return output

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
        """Compute attention over the chosen tokens, in the space of latents."""
        assert more.chosen is not None
        assert layer.spec is not None
        assert layer.spec.mask_function is not None
        places = find_chosen(more.chosen, metadata, layer.spec.mask_function)
        key_up, value_up = self._ups(layer, query.dtype)
        absorbed = self._absorb(query, key_up) * self._scale
        latents = attend_chosen(absorbed, kv_cache["latent"], places, self._latent_size, sinks, lse)
        output = query.new_empty(*query.shape[:2], self._head_size_v) if out is None else out
        torch.bmm(latents.transpose(0, 1), value_up.transpose(1, 2), out=output.transpose(0, 1))
        return output

    def _ups(self, layer: LayerSpec, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the up-projections of keys and of values, ``[num_heads, size, latent_size]``."""
        kv_up = self.parameters[layer.name][KV_UP].to(dtype)
        key_up, value_up = kv_up.split_with_sizes([self._nope_size, self._head_size_v], dim=1)
        return key_up, value_up

    def _absorb(self, query: torch.Tensor, key_up: torch.Tensor) -> torch.Tensor:
        """Return queries in the space of latents, ``[num_tokens, num_heads, latent_size + rope_size]``."""
        nope, rope = query.split_with_sizes([self._nope_size, self._rope_size], dim=-1)
        return torch.cat([torch.bmm(nope.transpose(0, 1), key_up).transpose(0, 1), rope], dim=-1)

    def _absorbed(
        self, dense: DenseBatch, rows: torch.Tensor, tokens: torch.Tensor, kv_up: torch.Tensor, with_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute attention in the space of latents.

        Args:
            dense: The tiles.
            rows: ``[num_tiles * num_queries, num_heads, head_size], device``: their queries.
            tokens: ``[num_tiles, num_tokens, latent_size + rope_size], device``.
            kv_up: The layer's parameter.
            with_lse: Whether the log-sum-exp is wanted.

        Returns:
            The output, ``[num_tiles * num_queries, num_heads, head_size_v]``; and the log-sum-exp, ``[num_tiles *
            num_queries, num_heads]``, or None.
        """
        key_up, value_up = kv_up.split_with_sizes([self._nope_size, self._head_size_v], dim=1)
        # All heads read the same latents, so they are folded into the queries of one head.
        folded = self._absorb(rows, key_up).view(dense.num_tiles, -1, tokens.shape[-1]) * self._scale
        scores = torch.bmm(folded, tokens.transpose(1, 2))
        if scores.dtype in (torch.float16, torch.bfloat16):
            scores = scores.float()
        unseen = ~_seen(dense, dense.last_seen)
        scores.view(dense.num_tiles, dense.num_queries, -1, dense.num_tokens).masked_fill_(
            unseen[:, :, None], float("-inf")
        )
        weights = torch.softmax(scores, dim=-1).to(rows.dtype)
        latents = torch.bmm(weights, tokens[..., : self._latent_size])
        latents = latents.view(-1, self._num_heads, self._latent_size)
        output = torch.bmm(latents.transpose(0, 1), value_up.transpose(1, 2)).transpose(0, 1)
        return output, scores.logsumexp(-1).view(-1, self._num_heads) if with_lse else None

    def _expanded(
        self, dense: DenseBatch, rows: torch.Tensor, tokens: torch.Tensor, kv_up: torch.Tensor, with_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute attention with keys and values; arguments and results as for ``_absorbed``.

        Heads are expanded a few at a time, so that a long context's keys and values are never in memory for all heads.
        """
        query = rows.view(dense.num_tiles, dense.num_queries, self._num_heads, -1).transpose(1, 2)
        size = max(query.shape[-1], self._head_size_v)
        heads_at_once = max(1, MAX_EXPANDED // (2 * size * dense.num_tiles * dense.num_tokens))
        parts, log_sums = [], []
        for first in range(0, self._num_heads, heads_at_once):
            part = slice(first, first + heads_at_once)
            key, value = self._expand(tokens, kv_up[part], size)
            wanted = pad(query[:, part], (0, size - query.shape[-1]))
            parts.append(self._attend(dense, wanted, key, value)[..., : self._head_size_v])
            if with_lse:
                log_sums.append(self._lse(dense, wanted, key))
        result = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        output = result.transpose(1, 2).reshape(len(rows), self._num_heads, self._head_size_v)
        return output, torch.cat(log_sums, dim=1).transpose(1, 2).reshape(len(rows), -1) if with_lse else None

    def _expand(self, tokens: torch.Tensor, kv_up: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return some heads' keys and values, both ``[num_tiles, num_heads, num_tokens, size]``.

        The shorter of the two is padded with zeros, because torch's fused kernels take one size for both.
        """
        latents, rope = tokens.split_with_sizes([self._latent_size, self._rope_size], dim=-1)
        num_tiles, num_tokens, _ = tokens.shape
        both = (latents @ kv_up.flatten(0, 1).T).view(num_tiles, num_tokens, len(kv_up), -1).transpose(1, 2)
        nope, value = both.split_with_sizes([self._nope_size, self._head_size_v], dim=-1)
        key = torch.cat([nope, rope[:, None].expand(-1, len(kv_up), -1, -1)], dim=-1)
        return pad(key, (0, size - key.shape[-1])), pad(value, (0, size - value.shape[-1]))

    def _attend(self, dense: DenseBatch, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if dense.form == SQUARE:
            return scaled_dot_product_attention(query, key, value, is_causal=True, scale=self._scale)
        queries_at_once = max(1, MAX_MASK // (dense.num_tiles * dense.num_tokens))
        parts = [
            scaled_dot_product_attention(some, key, value, attn_mask=_seen(dense, seen)[:, None], scale=self._scale)
            for some, seen in zip(
                query.split(queries_at_once, dim=2), dense.last_seen.split(queries_at_once, dim=1), strict=True
            )
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def _lse(self, dense: DenseBatch, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return the log-sum-exp of some heads' queries, ``[num_tiles, num_heads, num_queries]``."""
        dtype = lse_dtype(query.dtype)
        keys = key.to(dtype).transpose(2, 3)
        queries_at_once = max(1, MAX_MASK // (dense.num_tiles * dense.num_tokens * query.shape[1]))
        parts = []
        for some, last_seen in zip(
            query.split(queries_at_once, dim=2), dense.last_seen.split(queries_at_once, dim=1), strict=True
        ):
            scores = (some.to(dtype) @ keys).mul_(self._scale)
            scores.masked_fill_(~_seen(dense, last_seen)[:, None], -math.inf)
            parts.append(scores.logsumexp(-1))
        return torch.cat(parts, dim=2)


def _gather(dense: DenseBatch, latent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the tiles' tokens, ``[num_tiles, num_tokens, latent_size + rope_size], device``."""
    tokens = latent.index_select(0, dense.pages).flatten(0, 1)
    if dense.hidden.dtype == torch.bool:
        tokens.masked_fill_(dense.hidden[:, None], 0)
    else:
        tokens.index_fill_(0, dense.hidden, 0)
    return tokens.to(dtype).view(dense.num_tiles, dense.num_tokens, -1)


def _store(dense: DenseBatch, result: torch.Tensor, output: torch.Tensor) -> None:
    """Write ``[num_tiles * num_queries, …]`` of a dense batch to its rows of ``[num_tokens, …]``."""
    result = result if dense.outputs is None else result.index_select(0, dense.outputs)
    output.index_copy_(0, dense.output_rows, result)


def _seen(dense: DenseBatch, last_seen: torch.Tensor) -> torch.Tensor:
    """Return which gathered tokens queries see, ``[num_tiles, num_queries, num_tokens], bool, device``."""
    token = torch.arange(dense.num_tokens, device=last_seen.device)
    seen = token <= last_seen[:, :, None]
    return seen if dense.low is None else seen & (token >= dense.low[:, :, None])
