"""Backends that read wrong pages, or remember what they must not, from another step, layer or instance."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

import attrs
import torch

from kvframe.contract.backend import AttentionMetadataBuilder, KVCache
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.slots import Slots
from kvframe.contract.specs import LayerSpec
from tests.testing.mistakes.backend import RightBackend, WrongRequests
from tests.testing.mistakes.kinds import kind
from tests.testing.plain_backend import Built, PlainBuilder

# --- pages ------------------------------------------------------------------------------------------------------------


@kind("pages that two requests share are read for the first only")
class _SharedPages(WrongRequests):
    def is_wrong(self, layer: LayerSpec, built: Built, request: int, num_new: int, seq_len: int) -> bool:
        size, table = built.common.block_size, built.block_table
        before = {
            int(page)
            for other in range(request)
            for page in table[other, : -(-int(built.common.seq_lens[other]) // size)]
        }
        num_reqs = len(Counted.of(built.common))
        own = table[request, : -(-seq_len // size)].tolist()
        return request < num_reqs and any(page in before and page != 0 for page in own)


@kind("a prefix that all requests share has the length of the first request's")
class _Cascade(WrongRequests):
    def is_wrong(self, layer: LayerSpec, built: Built, request: int, num_new: int, seq_len: int) -> bool:
        num_reqs = len(Counted.of(built.common))
        if num_reqs < 2 or int(built.common.seq_lens[:num_reqs].min()) <= built.common.block_size:
            return False
        first = built.block_table[:num_reqs, 0]
        return request > 0 and bool((first == first[0]).all()) and int(first[0]) != 0


@kind("pages in a row are read as one page, from where the first begins")
class _PagesInARow(WrongRequests):
    def is_wrong(self, layer: LayerSpec, built: Built, request: int, num_new: int, seq_len: int) -> bool:
        num_blocks = -(-seq_len // built.common.block_size)
        if num_blocks < 3:
            return False
        step = built.block_table[request, :num_blocks].diff()
        pages = built.block_table.unique()
        least = int(pages[pages > 0].diff().min())
        return bool((step == least).all())


class Counted:
    """The requests that have new tokens."""

    @staticmethod
    def of(common: CommonAttentionMetadata) -> list[int]:
        """Return their rows."""
        lens: list[int] = common.query_start_loc.diff().nonzero().flatten().tolist()
        return lens


@kind("offsets into the pool have 32 bits")
class _NarrowOffsets(RightBackend):
    def read(
        self, layer: LayerSpec, kv_cache: KVCache, built: Built, request: int, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = super().read(layer, kv_cache, built, request, tokens)
        pages = built.block_table[request, tokens // built.common.block_size].long()
        is_far = pages * kv_cache["k"].stride(0) >= 1 << 31
        return key.masked_fill(is_far[:, None, None], 0), value


@kind("slots have 31 bits when they are written")
class _NarrowSlots(RightBackend):
    def write_kv(self, key: torch.Tensor, value: torch.Tensor, kv_cache: KVCache, slots: Slots) -> None:
        is_far = slots.blocks * kv_cache["k"].stride(0) >= 1 << 31
        near_slots = Slots(slots.flat.masked_fill(is_far, -1), slots.block_size)
        super().write_kv(key, value, kv_cache, near_slots)


@kind("one new token alone is not written")
class _WritesMany(RightBackend):
    def write_kv(self, key: torch.Tensor, value: torch.Tensor, kv_cache: KVCache, slots: Slots) -> None:
        if len(key) != 1:
            super().write_kv(key, value, kv_cache, slots)


@kind("only 256 new tokens are written")
class _Writes256(RightBackend):
    def write_kv(self, key: torch.Tensor, value: torch.Tensor, kv_cache: KVCache, slots: Slots) -> None:
        super().write_kv(key[:256], value[:256], kv_cache, Slots(slots.flat[:256], slots.block_size))


@kind("new tokens are written in the order of their slots")
class _SortsSlots(RightBackend):
    def write_kv(self, key: torch.Tensor, value: torch.Tensor, kv_cache: KVCache, slots: Slots) -> None:
        flat = slots.flat
        if len(flat) > 20:
            flat = flat.sort().values
        super().write_kv(key, value, kv_cache, Slots(flat, slots.block_size))


# --- steps ------------------------------------------------------------------------------------------------------------


class _Steps(RightBackend):
    """Counts the steps of an instance, and may read another step's block table."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.steps: list[Built] = []

    def table_of(self, built: Built) -> torch.Tensor:
        return built.block_table

    def attend(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, **options: Any
    ) -> torch.Tensor:
        built = self.step_of(metadata)
        if not any(step is built for step in self.steps):
            copied = attrs.evolve(built, block_table=built.block_table.clone())
            self.steps.append(built)
            self.copies = [*getattr(self, "copies", []), copied]
        changed = attrs.evolve(built, block_table=self.table_of(built))
        return super().attend(layer, query, kv_cache, changed, **options)

    def before(self, num_steps: int, built: Built) -> torch.Tensor:
        """Return the block table so many steps before, if it can be used."""
        copies: list[Built] = self.copies
        if len(copies) <= num_steps:
            return built.block_table
        old = copies[-1 - num_steps].block_table
        table = built.block_table.clone()
        rows, columns = min(len(old), len(table)), min(old.shape[1], table.shape[1])
        table[:rows, :columns] = old[:rows, :columns]
        return table


@kind("the third step reads the pages of the first")
class _TwoSteps(_Steps):
    def table_of(self, built: Built) -> torch.Tensor:
        return self.before(2, built)


@kind("the fourth step reads the pages of the first")
class _ThreeSteps(_Steps):
    def table_of(self, built: Built) -> torch.Tensor:
        return self.before(3, built)


@kind("a block table is kept while the number of requests and the longest length stay in a block")
class _KeptTable(_Steps):
    saved_table: torch.Tensor | None = None
    key: Any = None

    def table_of(self, built: Built) -> torch.Tensor:
        common = built.common
        key = tuple(common.seq_lens.tolist())
        if self.key != key or self.saved_table is None or self.saved_table.shape != built.block_table.shape:
            self.key, self.saved_table = key, built.block_table.clone()
        return self.saved_table


@kind("lengths never fall")
class _LengthsNeverFall(RightBackend):
    def lengths(self, common: CommonAttentionMetadata) -> tuple[list[int], list[int]]:
        starts, lens = super().lengths(common)
        old = getattr(self, "old", [])
        if len(lens) < len(old) and common.num_actual_tokens == len(lens):
            lens = [
                min(max(pair), common.block_table.shape[1] * common.block_size) for pair in zip(lens, old, strict=False)
            ]
        self.old = lens
        return starts, lens


@kind("after many requests, a batch of a few keeps the rest's first row")
class _StaleRow(WrongRequests):
    max_reqs = 0

    def is_wrong(self, layer: LayerSpec, built: Built, request: int, num_new: int, seq_len: int) -> bool:
        num_reqs = len(Counted.of(built.common))
        self.max_reqs = max(self.max_reqs, num_reqs)
        return num_reqs < self.max_reqs // 3 and request == 0


@kind("a request that is alone after others reads the first row of the batch before")
class _AloneAfterOthers(WrongRequests):
    had_others = False

    def is_wrong(self, layer: LayerSpec, built: Built, request: int, num_new: int, seq_len: int) -> bool:
        num_reqs = len(Counted.of(built.common))
        self.had_others |= num_reqs > 1
        return self.had_others and num_reqs == 1


@kind("a buffer of 256 tokens is filled once")
class _FullBuffer(WrongRequests):
    total = 0

    def is_wrong(self, layer: LayerSpec, built: Built, request: int, num_new: int, seq_len: int) -> bool:
        if layer == self.layers[0] and request == 0:
            self.total += built.common.num_actual_tokens
        return self.total > 300 and request == 0 and num_new > 1


@kind("every hundredth step", missed="the kit runs few steps: an error that needs a hundred shows in a soak run")
class _EveryHundredth(_Steps):
    def table_of(self, built: Built) -> torch.Tensor:
        return built.block_table * 0 if len(self.steps) % 100 == 0 else built.block_table


# --- layers and instances ---------------------------------------------------------------------------------------------


@kind("the third layer reads the cache of the first")
class _TwoLayers(RightBackend):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.caches: dict[str, KVCache] = {}

    def attend(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, **options: Any
    ) -> torch.Tensor:
        self.caches[layer.name] = kv_cache
        names = [*self.caches]
        index = names.index(layer.name)
        return super().attend(layer, query, self.caches[names[index % 2]], metadata, **options)


@kind("the fourth layer of an instance is the first again")
class _ThreeLayers(RightBackend):
    def attend(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, **options: Any
    ) -> torch.Tensor:
        output = super().attend(layer, query, kv_cache, metadata, **options)
        outputs: dict[str, torch.Tensor] = vars(self).setdefault("outputs", {})
        outputs[layer.name] = output
        names = [*outputs]
        first = outputs[names[names.index(layer.name) % 3]]
        return first if first.shape == output.shape else output


@kind("metadata are kept on the class")
class _OnTheClass(RightBackend):
    built: ClassVar[Any] = None

    def make_builder(self) -> AttentionMetadataBuilder:
        backend_class = type(self)

        class Builder(PlainBuilder):
            def build(self, metadata: CommonAttentionMetadata) -> Built:
                built = super().build(metadata)
                backend_class.built = built
                return built

            def refreshed_fields(self, built: Built, metadata: CommonAttentionMetadata) -> Any:
                backend_class.built = attrs.evolve(built, common=metadata, block_table=metadata.block_table)
                return super().refreshed_fields(built, metadata)

        return Builder()

    def step_of(self, metadata: Any) -> Built:
        built: Built = type(self).built
        return built


@kind("the layer of the class's last instance is used")
class _LastInstance(RightBackend):
    last: ClassVar[LayerSpec | None] = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        type(self).last = self.layers[0]

    def visible(
        self, layer: LayerSpec, common: CommonAttentionMetadata, request: int, first: int, seq_len: int
    ) -> torch.Tensor:
        last = type(self).last
        assert last is not None
        return super().visible(last, common, request, first, seq_len)


@kind("a reuse key leaves out the window that the metadata depend on")
class _NarrowReuse(RightBackend):
    def make_builder(self) -> AttentionMetadataBuilder:
        spec = self.layers[0].spec

        @attrs.frozen(eq=False)
        class WithSpec(Built):
            spec: Any = None

        class Builder(PlainBuilder):
            @property
            def reuse_key(self) -> Hashable:
                return "any"

            def build(self, metadata: CommonAttentionMetadata) -> Built:
                return WithSpec(metadata, metadata.block_table, spec)

        return Builder()

    def attend_request(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, built: Any, *rest: Any
    ) -> torch.Tensor:
        window = getattr(built.spec, "window", None)
        if window == getattr(layer.spec, "window", None):
            return super().attend_request(layer, query, kv_cache, built, *rest)
        return super().attend_request(layer, query, kv_cache, built, *rest) * 0.9


@kind("refreshed metadata keep the slots and lengths of the first group")
class _RefreshesTooMuch(RightBackend):
    def make_builder(self) -> AttentionMetadataBuilder:
        class Builder(PlainBuilder):
            def refreshed_fields(self, built: Built, metadata: CommonAttentionMetadata) -> Any:
                return {"block_table": built.block_table}

        return Builder()
