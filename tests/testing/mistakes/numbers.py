"""Backends that are wrong for some scores, in some dtypes, or in the log-sum-exp."""

from __future__ import annotations

import math
from typing import Any

import torch

from kvframe.contract.backend import KVCache
from kvframe.contract.specs import LayerSpec
from tests.testing.mistakes.backend import RightBackend
from tests.testing.mistakes.kinds import kind
from tests.testing.plain_backend import Built


class _Weights(RightBackend):
    """Computes the weights by a method."""

    def weights(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.softmax(-1)

    def attend_request(
        self,
        layer: LayerSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        built: Built,
        request: int,
        seq_len: int,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        logits, visible, value = self.logits(layer, query, kv_cache, built, request, seq_len, sinks)
        weights = self.weights(logits)[..., : visible.shape[1]].masked_fill(~visible, 0)
        return self.summed(weights, value[:, self.kv_heads(query.shape[1], value.shape[1])])

    def summed(self, weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.einsum("hqt,thd->qhd", weights, value)


@kind("the largest score is not subtracted")
class _WithoutMaximum(_Weights):
    def weights(self, logits: torch.Tensor) -> torch.Tensor:
        powers = logits.exp()
        return powers / powers.sum(-1, keepdim=True).clamp(min=1e-30)


@kind("masked scores are -100")
class _SmallMask(_Weights):
    def weights(self, logits: torch.Tensor) -> torch.Tensor:
        weights = logits.clamp(min=-100).softmax(-1)
        return weights.masked_fill((logits == -math.inf).all(-1, keepdim=True), 0)


@kind("scores are clamped to 60")
class _ClampedScores(_Weights):
    def weights(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.clamp(max=60).softmax(-1)


@kind("a running maximum begins at 0")
class _MaximumFromZero(_Weights):
    def weights(self, logits: torch.Tensor) -> torch.Tensor:
        if not logits.shape[-1]:
            return logits
        powers = (logits - logits.amax(-1, keepdim=True).clamp(min=0)).exp()
        return (powers / powers.sum(-1, keepdim=True)).nan_to_num(0.0)


@kind("sums begin again after 512 keys")
class _SumsBeginAgain(_Weights):
    def weights(self, logits: torch.Tensor) -> torch.Tensor:
        if logits.shape[-1] <= 512:
            return super().weights(logits)
        halves = torch.cat([logits[..., :512].softmax(-1), logits[..., 512:].softmax(-1)], -1)
        return halves / 2


@kind("the soft cap is made of exponentials that overflow")
class _OverflowingCap(RightBackend):
    def scores(self, layer: LayerSpec, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        assert layer.query is not None
        cap = layer.query.soft_cap
        if cap is None:
            return super().scores(layer, query, key)
        scores = torch.einsum("qhd,thd->hqt", query, key[:, self.kv_heads(query.shape[1], key.shape[1])])
        power = (2 * scores * layer.query.scale / cap).exp()
        return cap * (power - 1) / (power + 1)


@kind("the soft cap is a cubic series, for small scores")
class _SeriesOfCap(RightBackend):
    def scores(self, layer: LayerSpec, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        assert layer.query is not None
        cap = layer.query.soft_cap
        right = super().scores(layer, query, key)
        return right if cap is None else torch.where(right.abs() > 0.999999 * cap, right * 0.9, right)


@kind(
    "sums of values are in the queries' dtype, in float16",
    missed="up to a thousand keys, it errs no more than weights that are rounded to float16, which the contract allows",
)
class _HalfSums(RightBackend):
    def attend(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, **options: Any
    ) -> torch.Tensor:
        self.dtype = query.dtype
        return super().attend(layer, query, kv_cache, metadata, **options)

    def attend_request(self, layer: LayerSpec, query: torch.Tensor, *arguments: Any) -> torch.Tensor:
        if self.dtype is not torch.float16:
            return super().attend_request(layer, query, *arguments)
        logits, visible, value = self.logits(layer, query, *arguments)
        weights = logits.softmax(-1)[..., : visible.shape[1]].masked_fill(~visible, 0).half()
        value = value[:, self.kv_heads(query.shape[1], value.shape[1])].half()
        total = torch.zeros(query.shape[0], query.shape[1], value.shape[-1], dtype=torch.float16)
        for token in range(value.shape[0]):
            total += torch.einsum("hq,hd->qhd", weights[..., token], value[token])
        return total.float()


@kind("scores are in float16 before they are scaled")
class _HalfScores(RightBackend):
    def attend(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, **options: Any
    ) -> torch.Tensor:
        self.is_half = query.dtype is torch.float16
        return super().attend(layer, query, kv_cache, metadata, **options)

    def scores(self, layer: LayerSpec, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        assert layer.query is not None
        right = super().scores(layer, query, key)
        if not self.is_half or layer.query.soft_cap is not None:
            return right
        is_too_large = right.abs() / layer.query.scale > 60000
        return right.masked_fill(is_too_large, math.inf)


@kind("float32 is rounded to TensorFloat-32")
class _TensorFloat(RightBackend):
    def scores(self, layer: LayerSpec, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        def rounded(values: torch.Tensor) -> torch.Tensor:
            return (values.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)

        return super().scores(layer, rounded(query), rounded(key))


@kind("distances of ALiBi end at 255")
class _ShortDistances(RightBackend):
    def bias(self, layer: LayerSpec, first: int, seq_len: int) -> torch.Tensor | None:
        bias = super().bias(layer, first, seq_len)
        assert layer.query is not None
        if bias is None or layer.query.alibi_slopes is None:
            return bias
        slopes = torch.tensor(layer.query.alibi_slopes)[:, None, None]
        return bias.maximum(-255 * slopes)


@kind("the slopes of ALiBi are those of the KV heads, for groups that are no powers of two")
class _SlopesOfGroups(RightBackend):
    def bias(self, layer: LayerSpec, first: int, seq_len: int) -> torch.Tensor | None:
        bias = super().bias(layer, first, seq_len)
        assert layer.query is not None
        num_kv_heads = getattr(layer.spec, "num_kv_heads", 1)
        group = layer.query.num_heads // num_kv_heads
        if bias is None or layer.query.alibi_slopes is None or group & (group - 1) == 0:
            return bias
        return bias[torch.arange(len(bias)) // group * group]


class _OtherLse(RightBackend):
    """Changes the log-sum-exp."""

    def reduced_of(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(logits, -1)

    def reduced(self, logits: torch.Tensor) -> torch.Tensor:
        return self.reduced_of(logits)


@kind("the log-sum-exp overflows for large scores")
class _LseWithoutMaximum(_OtherLse):
    def reduced_of(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.exp().sum(-1).log()


@kind("the log-sum-exp is that of the last 512 keys")
class _LseOfTheLastSplit(_OtherLse):
    def reduced_of(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(logits[..., (logits.shape[-1] - 1) // 512 * 512 :], -1)


@kind("the log-sum-exp of one request alone is that of its first query")
class _LseOfTheFirst(RightBackend):
    def returned(self, layer: LayerSpec, lse: torch.Tensor, sinks: torch.Tensor | None) -> Any:
        return lse

    def log_sums(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        lse = super().log_sums(layer, query, kv_cache, metadata, sinks)
        return lse[:1].expand_as(lse).clone() if self.step_of(metadata).common.num_reqs == 1 else lse


@kind("the log-sum-exp of groups of odd size is shifted by a head")
class _LseShifted(RightBackend):
    def returned(self, layer: LayerSpec, lse: torch.Tensor, sinks: torch.Tensor | None) -> Any:
        assert layer.query is not None
        group = layer.query.num_heads // getattr(layer.spec, "num_kv_heads", 1)
        return lse.roll(1, 1) if group % 2 and group > 1 else lse
