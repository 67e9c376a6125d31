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
class Inputs:
    """The arguments of ``dense_attention``, by name."""

    layer: QuerySpec
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    visible: torch.Tensor
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def to(self, dtype: torch.dtype) -> Inputs:
        """Return the same numbers, rounded to a dtype."""
        return attrs.evolve(
            self,
            query=self.query.to(dtype),
            key=self.key.to(dtype),
            value=self.value.to(dtype),
            sinks=None if self.sinks is None else self.sinks.to(dtype),
            bias=None if self.bias is None else self.bias.to(dtype),
        )

    def of_tokens(self, tokens: torch.Tensor) -> Inputs:
        """Return the arguments for some of the tokens, in an order."""
        bias = None if self.bias is None else self.bias[:, :, tokens]
        return attrs.evolve(
            self, key=self.key[tokens], value=self.value[tokens], visible=self.visible[..., tokens], bias=bias
        )


def by_definition(inputs: Inputs) -> torch.Tensor:
    """The definition, with every operation rounded to the dtype."""
    return dense_attention(**attrs.asdict(inputs, recurse=False))


def permuted(inputs: Inputs) -> torch.Tensor:
    """The definition, with tokens and elements in another order."""
    generator = torch.Generator().manual_seed(len(inputs.key))
    inputs = inputs.of_tokens(torch.randperm(len(inputs.key), generator=generator))
    parts = torch.randperm(inputs.query.shape[2], generator=generator)
    return by_definition(attrs.evolve(inputs, query=inputs.query[:, :, parts], key=inputs.key[:, :, parts]))


def scaled_first(inputs: Inputs) -> torch.Tensor:
    """The definition, with the scale multiplied into the query, which is rounded once more."""
    layer = attrs.evolve(inputs.layer, scale=1.0)
    return by_definition(attrs.evolve(inputs, layer=layer, query=inputs.query * inputs.layer.scale))


def one_by_one(inputs: Inputs) -> torch.Tensor:
    """Every sum from the last term to the first."""
    wide = _wide(inputs)
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
    return (output / total.masked_fill(total == 0, 1)[:, :, None]).transpose(0, 1).to(inputs.query.dtype)


def blocked(inputs: Inputs, *, size: int = 5, num_splits: int = 1) -> torch.Tensor:
    """Online softmax over blocks of tokens (FlashAttention, arXiv 2205.14135), in base 2.

    Weights are rounded to the dtype before they are multiplied by values. With several splits, parts of the tokens are
    computed separately and merged by the logarithms of their sums; the sinks are one more part.
    """
    wide = _wide(inputs)
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
            weights, rescale = torch.exp2(scores - shift), torch.exp2(top - shift)
            total = total * rescale + weights.sum(-1, keepdim=True)
            rounded = weights.to(inputs.query.dtype).to(weights.dtype)
            output = output * rescale + torch.einsum("hqt,thd->hqd", rounded, part.value)
            top = higher
        lse = (top + torch.log2(total)).masked_fill(total == 0, -math.inf)
        parts.append((output / total.masked_fill(total == 0, 1), lse))
    if wide.sinks is not None:
        parts.append((torch.zeros_like(parts[0][0]), (wide.sinks * LOG2_E)[:, None, None].expand_as(parts[0][1])))
    top = torch.cat([lse for _, lse in parts], dim=-1).amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    shares = [torch.exp2(lse - top) for _, lse in parts]
    total = torch.stack(shares).sum(0)
    merged = torch.stack([share * output for share, (output, _) in zip(shares, parts, strict=True)]).sum(0)
    return (merged / total.masked_fill(total == 0, 1)).transpose(0, 1).to(inputs.query.dtype)


def split(inputs: Inputs) -> torch.Tensor:
    """As ``blocked``, in three parts."""
    return blocked(inputs, size=4, num_splits=3)


ORDERS: Mapping[str, Callable[[Inputs], torch.Tensor]] = {
    order.__name__: order for order in (by_definition, permuted, scaled_first, one_by_one, blocked, split)
}
"""Every order, by name."""


def _wide(inputs: Inputs) -> Inputs:
    """Return the arguments in the dtype that kernels sum in, with a key and a value for each query head."""
    wide = inputs.to(torch.float32) if inputs.query.dtype.itemsize < 4 else inputs
    kv_head = torch.arange(inputs.query.shape[1]) // (inputs.query.shape[1] // inputs.key.shape[1])
    return attrs.evolve(wide, key=wide.key[:, kv_head], value=wide.value[:, kv_head])


def _finish(inputs: Inputs, products: torch.Tensor) -> torch.Tensor:
    """Return the scores from the products of queries and keys."""
    scores = products * inputs.layer.scale
    if inputs.layer.soft_cap is not None:
        scores = inputs.layer.soft_cap * torch.tanh(scores / inputs.layer.soft_cap)
    if inputs.bias is not None:
        scores = scores + inputs.bias
    return scores.masked_fill(~inputs.visible, -math.inf)
