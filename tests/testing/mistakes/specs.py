"""Specs that are wrong far away, in their layout, or in what they store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from kvframe.contract.fields import positive_int
from kvframe.contract.formats import StateTensor
from kvframe.contract.specs import AttentionMask, AttentionSpec, KVCacheSpec, QuerySpec
from tests.testing.mistakes.kinds import kind


@attrs.frozen(kw_only=True)
class RightSpec(AttentionSpec):
    """A window."""

    kind: ClassVar[str] = "right_window"
    window: int = positive_int

    def live_ranges(self, n: int) -> Any:
        start = max(0, n - self.window + 1)
        return ((start, n),) if start < n else ()

    @property
    def mask(self) -> AttentionMask | None:
        return AttentionMask(window=self.window)


def _ranges(start: int, n: int) -> Any:
    return ((start, n),) if start < n else ()


@kind("the window is among the fields of the layout")
@attrs.frozen(kw_only=True)
class _WindowOfLayout(RightSpec):
    layout_fields = AttentionSpec.layout_fields | {"window"}


@kind("the live range depends on the head size")
@attrs.frozen(kw_only=True)
class _RangeByHeadSize(RightSpec):
    def live_ranges(self, n: int) -> Any:
        return _ranges(max(0, n - self.window + 1 - (self.head_size > 8)), n)

    @property
    def mask(self) -> AttentionMask | None:
        return AttentionMask(window=self.window + (self.head_size > 8))


@kind("the live range depends on the dtype")
@attrs.frozen(kw_only=True)
class _RangeByDtype(RightSpec):
    def live_ranges(self, n: int) -> Any:
        return _ranges(max(0, n - self.window + 1 - (self.dtype == "float32")), n)

    @property
    def mask(self) -> AttentionMask | None:
        return AttentionMask(window=self.window + (self.dtype == "float32"))


@kind("a mask is another one from position 700 on")
@attrs.frozen(kw_only=True)
class _FarMask(RightSpec):
    def live_ranges(self, n: int) -> Any:
        return _ranges(max(0, n - self.window + 1) if n < 700 else n, n)


@kind("tokens come back at position 3,000")
@attrs.frozen(kw_only=True)
class _ComeBack(RightSpec):
    def live_ranges(self, n: int) -> Any:
        return _ranges(max(0, n - self.window + 1) if n < 3000 else 2000, n)

    @property
    def mask(self) -> AttentionMask | None:
        return None


@kind("a mask function is another one from position 700 on")
@attrs.frozen(kw_only=True)
class _FarFunction(RightSpec):
    @property
    def mask(self) -> AttentionMask | None:
        return None

    @property
    def mask_function(self) -> Any:
        window = self.window

        def sees(query: Any, key: Any) -> Any:
            return (key <= query) & ((query - key < window) | (query > 700) & (query - key < window + 1))

        return sees


@kind("windows of more than 20 tokens are one too long")
@attrs.frozen(kw_only=True)
class _LongWindows(RightSpec):
    def live_ranges(self, n: int) -> Any:
        return _ranges(max(0, n - self.window + 1 - (self.window > 20)), n)


@kind("live ranges of blocks of 32 tokens are those of blocks")
@attrs.frozen(kw_only=True)
class _RangesOfBlocks(RightSpec):
    def live_ranges(self, n: int) -> Any:
        start = max(0, n - self.window + 1)
        return _ranges(start // self.block_size * self.block_size if self.block_size >= 32 else start, n)


@kind("a parameter has no shape of whole numbers")
@attrs.frozen(kw_only=True)
class _WrongShape(RightSpec):
    def parameters(self, query: QuerySpec) -> Mapping[str, tuple[int, ...]]:
        return {"gate": (query.num_heads, self.head_size / 2)}  # type: ignore[dict-item]


@kind("a parameter of the query's bias is left out")
@attrs.frozen(kw_only=True)
class _NoParameters(RightSpec):
    def parameters(self, query: QuerySpec) -> Mapping[str, tuple[int, ...]]:
        return {"gate": (query.num_heads,)}


@kind("the state's dtype is not the one that was given")
@attrs.frozen(kw_only=True)
class _OtherDtype(RightSpec):
    def state_tensors(self) -> Mapping[str, StateTensor]:
        return {name: attrs.evolve(tensor, dtype="bfloat16") for name, tensor in super().state_tensors().items()}


@kind("a state lacks its first dimension")
@attrs.frozen(kw_only=True)
class _WithoutBlocks(RightSpec):
    def state_tensors(self) -> Mapping[str, StateTensor]:
        tensors = super().state_tensors()
        return {name: StateTensor(tensor.shape[1:], tensor.dtype) for name, tensor in tensors.items()}


@kind("a value of head size 16 is stored with 8 elements")
@attrs.frozen(kw_only=True)
class _ShortState(RightSpec):
    def state_tensors(self) -> Mapping[str, StateTensor]:
        tensors = dict(super().state_tensors())
        size, heads, _ = tensors["v"].shape
        return {**tensors, "v": StateTensor((size, heads, min(8, self.head_size_v)), self.dtype)}


@kind("drafts change the live range")
@attrs.frozen(kw_only=True)
class _Drafts(RightSpec):
    def with_drafts(self, num_draft_tokens: int) -> KVCacheSpec:
        return attrs.evolve(self, window=self.window + num_draft_tokens)


@kind("two equal specs are not equal")
@attrs.frozen(kw_only=True, eq=False)
class _NotEqual(RightSpec):
    __eq__ = object.__eq__
    __hash__ = object.__hash__


@kind("a query of any head size is accepted")
@attrs.frozen(kw_only=True)
class _AnyQuery(RightSpec):
    def check_query(self, query: QuerySpec) -> None:
        pass


@kind("peaks of long requests are those of one block")
@attrs.frozen(kw_only=True)
class _LowPeak(RightSpec):
    def peak_blocks(self, num_tokens: int, max_new_tokens: int) -> int:
        right = super().peak_blocks(num_tokens, max_new_tokens)
        return right if num_tokens < 500 else 1
