"""Shrinking after the prompt: each head keeps the tokens that the last queries of the prompt read most.

The prompt is read as a whole. Then each KV head keeps the last tokens, and of the others those with the largest pooled
scores, as SnapKV does (arXiv 2404.14469). The type runs on any backend of full attention: the host stores the last
queries in an entry, asks for the choice, moves what is kept together, and frees the rest.

    python examples/by_content/snap_kv.py
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from compare import HEADS, run
from kvframe_entries import UnfinishedGroupSpec

from kvframe.contract import (
    AttentionMask,
    AttentionSpec,
    KVCacheSpec,
    LayerSpec,
    SpecError,
    TokenRange,
    hookimpl,
    positive_int,
)

POOLED = 5
"""Neighbouring tokens over which scores are pooled."""


@attrs.frozen(kw_only=True)
class SnapKVSpec(AttentionSpec):
    """Keys and values of all tokens until the prompt is computed, then of ``budget`` tokens of it.

    Attributes:
        num_heads: Query heads.
        budget: How many tokens of a prompt each KV head keeps.
        last: How many queries at the prompt's end choose them; their own tokens are kept.
    """

    kind = "snap_kv"
    num_heads: int = positive_int
    budget: int = positive_int
    last: int = positive_int

    def __attrs_post_init__(self) -> None:
        """Refuse a budget that the last tokens exceed."""
        if self.last > self.budget:
            raise SpecError(f"SnapKVSpec.budget must be at least last, {self.last}, not {self.budget}")

    @property
    def mask(self) -> AttentionMask:
        """Every earlier token is seen."""
        return AttentionMask()

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        """Return all tokens: any of them may be kept."""
        return ((0, n),) if n else ()

    @property
    def entries(self) -> Mapping[str, KVCacheSpec]:
        """The queries of the last tokens."""
        tensors = {"query": (self.num_heads, self.head_size)}
        sizes = {"block_size": self.block_size, "group": 1, "overlap": self.last}
        return {"query": UnfinishedGroupSpec(tensors=tensors, model_dtype=self.dtype, **sizes)}

    @property
    def prompt_budget(self) -> int:
        """How many tokens of a prompt stay."""
        return self.budget

    def choose_kept(
        self,
        layer: LayerSpec,
        num_kept: int,
        state: Mapping[str, torch.Tensor],
        entries: Mapping[str, Mapping[str, torch.Tensor]],
    ) -> torch.Tensor:
        """Return the last tokens, and those with the largest scores."""
        assert layer.query is not None
        query, key = entries["query"]["query"], state["k"]
        num_tokens, num_kv_heads, _ = key.shape
        grouped = query.unflatten(1, (num_kv_heads, -1))
        scores = torch.einsum("qhgd,thd->hgqt", grouped, key) * layer.query.scale
        later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(num_tokens - len(query) + 1)
        # The logarithm of what a token is read with: the weights of most tokens are too small for numbers.
        read = scores.masked_fill(later, -torch.inf).log_softmax(-1).logsumexp((1, 2))
        pooled = torch.nn.functional.avg_pool1d(read[:, None], POOLED, 1, POOLED // 2)[:, 0]
        pooled[:, num_tokens - self.last :] = torch.inf
        return pooled.topk(num_kept, dim=-1).indices


def define(
    spec: SnapKVSpec,
    layer: LayerSpec,
    num_prompt_tokens: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """Return attention of a whole request by its definition, with a mask of the kept tokens for each head."""
    num_tokens, num_kv_heads, _ = key.shape
    sees = torch.ones(num_kv_heads, num_tokens, num_tokens, dtype=torch.bool).tril()
    if spec.budget < num_prompt_tokens:
        prompt = {"query": query[num_prompt_tokens - spec.last : num_prompt_tokens]}
        kept_tokens = spec.choose_kept(layer, spec.budget, {"k": key[:num_prompt_tokens]}, {"query": prompt})
        sees[:, num_prompt_tokens:, :num_prompt_tokens] = False
        for head, tokens in enumerate(kept_tokens):
            sees[head, num_prompt_tokens:, tokens] = True
    groups = query.shape[1] // num_kv_heads
    rows, keys, values = (tensor.transpose(0, 1) for tensor in (query, key, value))
    keys, values, sees = (tensor.repeat_interleave(groups, dim=0) for tensor in (keys, values, sees))
    return torch.nn.functional.scaled_dot_product_attention(rows, keys, values, sees).transpose(0, 1)


@hookimpl
def kvframe_register_specs(register: Any) -> None:
    """Register the type; full attention's backends serve it."""
    register("snap_kv", SnapKVSpec)


if __name__ == "__main__":
    run(sys.modules[__name__], SnapKVSpec, {"num_heads": HEADS, "budget": 24, "last": 8}, define)
