"""Attention in floats with different orders of operations: all are right, and no two round alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import attrs
import torch
from kvframe_testing.reference import dense_attention

from kvframe.contract.specs import QuerySpec

LOG2_E = math.log2(math.e)


@attrs.frozen(kw_only=True, eq=False)
class Given:
    """The arguments of ``dense_attention``, by name."""

    layer: QuerySpec
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    visible: torch.Tensor
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def to(self, dtype: torch.dtype) -> Given:
        """Return the same numbers, rounded to a dtype."""
        return attrs.evolve(
            self,
            query=self.query.to(dtype),
            key=self.key.to(dtype),
            value=self.value.to(dtype),
            sinks=None if self.sinks is None else self.sinks.to(dtype),
            bias=None if self.bias is None else self.bias.to(dtype),
        )

    def of_tokens(self, tokens: torch.Tensor) -> Given:
        """Return the arguments for some of the tokens, in an order."""
        bias = None if self.bias is None else self.bias[:, :, tokens]
        return attrs.evolve(
            self, key=self.key[tokens], value=self.value[tokens], visible=self.visible[..., tokens], bias=bias
        )


def by_definition(given: Given) -> torch.Tensor:
    """The definition, with every operation rounded to the dtype."""
    return dense_attention(**attrs.asdict(given, recurse=False))


def permuted(given: Given) -> torch.Tensor:
    """The definition, with tokens and elements in another order."""
    generator = torch.Generator().manual_seed(len(given.key))
    given = given.of_tokens(torch.randperm(len(given.key), generator=generator))
    parts = torch.randperm(given.query.shape[2], generator=generator)
    return by_definition(attrs.evolve(given, query=given.query[:, :, parts], key=given.key[:, :, parts]))


def scaled_first(given: Given) -> torch.Tensor:
    """The definition, with the scale multiplied into the query, which is rounded once more."""
    layer = attrs.evolve(given.layer, scale=1.0)
    return by_definition(attrs.evolve(given, layer=layer, query=given.query * given.layer.scale))


def one_by_one(given: Given) -> torch.Tensor:
    """Every sum from the last term to the first."""
    wide = _wide(given)
    scores = wide.query.new_zeros(wide.query.shape[1], len(wide.query), len(wide.key))
    for part in reversed(range(wide.query.shape[2])):
        scores = scores + wide.query[:, :, part].T[:, :, None] * wide.key[:, :, part].T[:, None, :]
    scores = _finish(wide, scores)
    top = scores.new_full(scores.shape[:2], -math.inf)
    if wide.sinks is not None:
        top = wide.sinks[:, None].expand_as(top)
    if len(wide.key):
        top = torch.maximum(top, scores.amax(-1))
    top = top.nan_to_num(neginf=0.0)
    total = torch.zeros_like(top) if wide.sinks is None else torch.exp(wide.sinks[:, None] - top)
    output = scores.new_zeros(*scores.shape[:2], wide.value.shape[2])
    for token in reversed(range(len(wide.key))):
        weight = torch.exp(scores[:, :, token] - top)
        total = total + weight
        output = output + weight[:, :, None] * wide.value[token][:, None]
    return (output / total.masked_fill(total == 0, 1)[:, :, None]).transpose(0, 1).to(given.query.dtype)


def blocked(given: Given, *, size: int = 5, num_splits: int = 1) -> torch.Tensor:
    """Online softmax over blocks of tokens (FlashAttention, arXiv 2205.14135), in base 2.

    Weights are rounded to the dtype before they are multiplied by values. With several splits, parts of the tokens are
    computed separately and merged by the logarithms of their sums; the sinks are one more part.
    """
    wide = _wide(given)
    parts = []
    for tokens in torch.arange(len(wide.key)).tensor_split(num_splits):
        top = wide.query.new_full((wide.query.shape[1], len(wide.query), 1), -math.inf)
        total = torch.zeros_like(top)
        output = top.new_zeros(*top.shape[:2], wide.value.shape[2])
        for block in tokens.split(size) if len(tokens) else ():
            part = wide.of_tokens(block)
            scores = _finish(part, torch.einsum("qhd,thd->hqt", part.query, part.key)) * LOG2_E
            higher = torch.maximum(top, scores.amax(-1, keepdim=True))
            shift = higher.nan_to_num(neginf=0.0)
            weights, kept = torch.exp2(scores - shift), torch.exp2(top - shift)
            total = total * kept + weights.sum(-1, keepdim=True)
            rounded = weights.to(given.query.dtype).to(weights.dtype)
            output = output * kept + torch.einsum("hqt,thd->hqd", rounded, part.value)
            top = higher
        lse = (top + torch.log2(total)).masked_fill(total == 0, -math.inf)
        parts.append((output / total.masked_fill(total == 0, 1), lse))
    if wide.sinks is not None:
        parts.append((torch.zeros_like(parts[0][0]), (wide.sinks * LOG2_E)[:, None, None].expand_as(parts[0][1])))
    top = torch.cat([lse for _, lse in parts], dim=-1).amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    shares = [torch.exp2(lse - top) for _, lse in parts]
    total = torch.stack(shares).sum(0)
    merged = torch.stack([share * output for share, (output, _) in zip(shares, parts, strict=True)]).sum(0)
    return (merged / total.masked_fill(total == 0, 1)).transpose(0, 1).to(given.query.dtype)


def split(given: Given) -> torch.Tensor:
    """As ``blocked``, in three parts."""
    return blocked(given, size=4, num_splits=3)


ORDERS: Mapping[str, Callable[[Given], torch.Tensor]] = {
    each.__name__: each for each in (by_definition, permuted, scaled_first, one_by_one, blocked, split)
}
"""Every order, by name."""


def _wide(given: Given) -> Given:
    """Return the arguments in the dtype that kernels sum in, with a key and a value for each query head."""
    wide = given.to(torch.float32) if given.query.dtype.itemsize < 4 else given
    kv_head = torch.arange(given.query.shape[1]) // (given.query.shape[1] // given.key.shape[1])
    return attrs.evolve(wide, key=wide.key[:, kv_head], value=wide.value[:, kv_head])


def _finish(given: Given, products: torch.Tensor) -> torch.Tensor:
    """Return the scores from the products of queries and keys."""
    scores = products * given.layer.scale
    if given.layer.soft_cap is not None:
        scores = given.layer.soft_cap * torch.tanh(scores / given.layer.soft_cap)
    if given.bias is not None:
        scores = scores + given.bias
    return scores.masked_fill(~given.visible, -math.inf)
