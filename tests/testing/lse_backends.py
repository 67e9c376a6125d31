"""A correct backend that returns the log-sum-exp, and one with each bug in it, with the case that finds the bug."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import attrs
import torch

from kvframe.contract.backend import KVCache
from kvframe.contract.formats import PLAIN
from kvframe.contract.merging import lse_dtype
from kvframe.contract.specs import LayerSpec
from tests.testing.plain_backend import PlainBackend


class LseBackend(PlainBackend):
    """The plain backend, with the log-sum-exp."""

    capabilities = attrs.evolve(
        PlainBackend.capabilities, dtypes={"float32", "bfloat16"}, formats={PLAIN.name}, returns_lse=True
    )

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
        if lse is not None:
            lse.copy_(self.returned(layer, self.log_sums(layer, query, kv_cache, metadata, sinks), sinks))
        sinks = None if sinks is None else sinks.float()
        return super().attend(layer, query.float(), kv_cache, metadata, sinks=sinks).to(query.dtype)

    def log_sums(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the log-sum-exp of each query and head."""
        built = self.step_of(metadata)
        lse = query.new_full(query.shape[:2], -math.inf, dtype=lse_dtype(query.dtype))
        starts, seq_lens = self.lengths(built.common)
        for request, (start, stop) in enumerate(itertools.pairwise(starts)):
            if start < stop:
                seq_len = seq_lens[request]
                own = query[start:stop].float()
                logits, _, _ = self.logits(layer, own, kv_cache, built, request, seq_len, sinks)
                lse[start:stop] = self.reduced(logits).T
        return lse

    def reduced(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the log-sum-exp of logits, over the last axis."""
        return torch.logsumexp(logits, dim=-1)

    def returned(self, layer: LayerSpec, lse: torch.Tensor, sinks: torch.Tensor | None) -> Any:
        """Return what is handed out for the log-sum-exp."""
        return lse


MISTAKES: dict[str, tuple[type[LseBackend], str, str]] = {}
"""For each bug: the backend, the case or run of the kit that finds it, and a part of the kit's error."""

WRONG = "the log-sum-exp: .*wrong, the first at"


def shown_by(mistake: str, where: str, message: str = WRONG) -> Callable[[type[LseBackend]], type[LseBackend]]:
    """Add a backend with a bug to the list."""

    def note(backend_class: type[LseBackend]) -> type[LseBackend]:
        assert mistake not in MISTAKES
        MISTAKES[mistake] = (backend_class, where, message)
        return backend_class

    return note


@shown_by("it is a logarithm of base 2", "full-block=1-decode")
class BaseTwo(LseBackend):
    def reduced(self, logits: torch.Tensor) -> torch.Tensor:
        return super().reduced(logits) / math.log(2)


@shown_by("it is a logarithm of base 2, in bfloat16", "full-bfloat16-decode")
class BaseTwoInBfloat16(BaseTwo):
    pass


@shown_by("it is the denominator itself", "full-block=1-decode")
class WithoutLogarithm(LseBackend):
    def reduced(self, logits: torch.Tensor) -> torch.Tensor:
        return super().reduced(logits).exp()


@shown_by("the scale is left out", "full-block=1-decode")
class WithoutScale(LseBackend):
    def returned(self, layer: LayerSpec, lse: torch.Tensor, sinks: torch.Tensor | None) -> Any:
        assert layer.query is not None
        return lse / layer.query.scale


@shown_by("it is only the largest score", "full-block=1-decode")
class OnlyTheLargest(LseBackend):
    def reduced(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.amax(-1) if logits.shape[-1] else super().reduced(logits)


@shown_by("it lacks the largest score", "full-block=1-decode")
class WithoutTheLargest(LseBackend):
    def reduced(self, logits: torch.Tensor) -> torch.Tensor:
        return super().reduced(logits - logits.amax(-1, keepdim=True)) if logits.shape[-1] else super().reduced(logits)


class OtherLogits(LseBackend):
    """Computes the log-sum-exp of other logits than the output."""

    def log_sums(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        return super().log_sums(*self.changed(layer, query, kv_cache, metadata, sinks))

    def changed(self, layer: Any, query: Any, kv_cache: Any, metadata: Any, sinks: Any) -> Any:
        return layer, query, kv_cache, metadata, sinks


@shown_by("the soft cap is left out", "full-soft_cap-decode")
class WithoutSoftCap(OtherLogits):
    def changed(self, layer: Any, query: Any, kv_cache: Any, metadata: Any, sinks: Any) -> Any:
        return attrs.evolve(layer, query=attrs.evolve(layer.query, soft_cap=None)), query, kv_cache, metadata, sinks


@shown_by("the learned sink is left out", "full-learned_sinks-decode")
class WithoutSinks(OtherLogits):
    def changed(self, layer: Any, query: Any, kv_cache: Any, metadata: Any, sinks: Any) -> Any:
        return layer, query, kv_cache, metadata, None


@shown_by("the bias is left out", "full-relative_bias-decode")
class WithoutBias(OtherLogits):
    def changed(self, layer: Any, query: Any, kv_cache: Any, metadata: Any, sinks: Any) -> Any:
        without = attrs.evolve(layer.query, relative_bias=None)
        return attrs.evolve(layer, query=without), query, kv_cache, metadata, sinks


@shown_by("queries without keys have +inf, as in FlashAttention", "bidirectional-block=1-cross_without_keys")
class PlusInfinity(LseBackend):
    def returned(self, layer: LayerSpec, lse: torch.Tensor, sinks: torch.Tensor | None) -> Any:
        return lse.masked_fill(lse == -math.inf, math.inf)


@shown_by("queries without keys have 0", "bidirectional-block=1-cross_without_keys")
class ZeroWithoutKeys(LseBackend):
    def returned(self, layer: LayerSpec, lse: torch.Tensor, sinks: torch.Tensor | None) -> Any:
        return lse.masked_fill(lse == -math.inf, 0)


@shown_by("queries without keys have a large negative number", "bidirectional-block=1-cross_without_keys")
class LargeWithoutKeys(LseBackend):
    def returned(self, layer: LayerSpec, lse: torch.Tensor, sinks: torch.Tensor | None) -> Any:
        return lse.clamp(min=-5e4)


@shown_by("rows begin with the padding", "full-block=1-decode-padded")
class PaddingFirst(LseBackend):
    def returned(self, layer: LayerSpec, lse: torch.Tensor, sinks: torch.Tensor | None) -> Any:
        return lse.flip(0)


@shown_by("it is rounded to half precision", "full-block=1-decode")
class Rounded(LseBackend):
    def returned(self, layer: LayerSpec, lse: torch.Tensor, sinks: torch.Tensor | None) -> Any:
        return lse.bfloat16().float()


@shown_by("the output is another one", "full-block=1-decode", "with the log-sum-exp, .* queries are wrong")
class OtherOutput(LseBackend):
    def attend(self, *arguments: Any, lse: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        output = super().attend(*arguments, lse=lse, **options)
        return output if lse is None else 2 * output


@shown_by("it is declared and not written", "full-block=1-decode")
class Unwritten(LseBackend):
    def attend(self, *arguments: Any, lse: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        return super().attend(*arguments, **options)


@shown_by("it is written for all heads but the last", "full-block=1-decode")
class WithoutTheLastHead(LseBackend):
    def attend(self, *arguments: Any, lse: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        last = None if lse is None else lse[:, -1].clone()
        output = super().attend(*arguments, lse=lse, **options)
        if lse is not None and last is not None:
            lse[:, -1] = last
        return output


@shown_by("heads of a group are exchanged", "full-block=1-decode")
class ExchangedHeads(LseBackend):
    def returned(self, layer: LayerSpec, lse: torch.Tensor, sinks: torch.Tensor | None) -> Any:
        return lse.unflatten(1, (-1, 2)).flip(2).flatten(1)


@shown_by("KV heads are exchanged", "full-block=1-decode")
class ExchangedGroups(LseBackend):
    def returned(self, layer: LayerSpec, lse: torch.Tensor, sinks: torch.Tensor | None) -> Any:
        return lse.roll(lse.shape[1] // 2, 1)


@shown_by(
    "the sinks of the call before are added to a part without sinks",
    "full-learned_sinks-decode",
    "with the log-sum-exp and without the layer's sinks, .* queries are wrong",
)
class KeepsSinks(LseBackend):
    def attend(
        self, *arguments: Any, sinks: torch.Tensor | None = None, lse: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        if lse is not None:
            sinks = self.last_sinks = getattr(self, "last_sinks", None) if sinks is None else sinks
        return super().attend(*arguments, sinks=sinks, lse=lse, **options)


@shown_by("queries that see a sink only have -inf", "bidirectional-learned_sinks-cross_without_keys")
class WithoutKeysWithoutSinks(LseBackend):
    def reduced(self, logits: torch.Tensor) -> torch.Tensor:
        sums = super().reduced(logits)
        return sums if logits.shape[-1] > 1 else sums.fill_(-math.inf)


@shown_by("the second layer has that of the first", "head_size=64-num_kv_heads=8-full-decodes")
class OfTheFirstLayer(LseBackend):
    def returned(self, layer: LayerSpec, lse: torch.Tensor, sinks: torch.Tensor | None) -> Any:
        if layer.name.endswith("0"):
            self.first = lse
        return getattr(self, "first", lse)


@shown_by("it is written to memory of the step before, too late", "head_size=64-num_kv_heads=8-full-decodes")
class OfTheFirstStep(LseBackend):
    def returned(self, layer: LayerSpec, lse: torch.Tensor, sinks: torch.Tensor | None) -> Any:
        steps = vars(self).setdefault("steps", {})
        return steps.setdefault((layer.name, lse.shape), lse)


@shown_by("it is computed for the first sixteen heads", "head_size=64-num_kv_heads=8-full-decodes")
class FewHeads(LseBackend):
    def returned(self, layer: LayerSpec, lse: torch.Tensor, sinks: torch.Tensor | None) -> Any:
        return torch.cat([lse[:, :16], lse[:, 16:].zero_()], dim=1)
