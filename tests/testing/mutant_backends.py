"""Backends with one bug each, and the first case or run of the kit that finds it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from kvframe.contract.backend import AttentionBackend, AttentionMetadataBuilder, KVCache
from kvframe.contract.metadata import NO_EXTENSIONS, CommonAttentionMetadata
from kvframe.contract.slots import Slots
from kvframe.contract.specs import LayerSpec
from tests.testing.plain_backend import Built, PlainBackend, PlainBuilder

Arguments = tuple[LayerSpec, torch.Tensor, KVCache, Built, torch.Tensor | None]

MISTAKES: dict[str, tuple[type[AttentionBackend], str, str]] = {}
"""For each bug: the backend, the case or run of the kit that finds it, and a part of the kit's error."""


def shown_by(mistake: str, where: str, message: str = "wrong, the first at") -> Any:
    """Add a backend with a bug to the list."""

    def note(backend_class: type[AttentionBackend]) -> type[AttentionBackend]:
        assert mistake not in MISTAKES
        MISTAKES[mistake] = (backend_class, where, message)
        return backend_class

    return note


class Changes(PlainBackend):
    """Changes the arguments of ``attend``."""

    def given(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, built: Built, sinks: torch.Tensor | None
    ) -> Arguments:
        return layer, query, kv_cache, built, sinks

    def attend(
        self,
        layer: LayerSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        metadata: Any,
        *,
        sinks: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        *changed, sinks = self.given(layer, query, kv_cache, metadata, sinks)
        return super().attend(*changed, sinks=sinks)


class Returns(PlainBackend):
    """Changes the result of ``attend``."""

    def returned(self, output: torch.Tensor, query: torch.Tensor) -> Any:
        return output

    def attend(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, **options: Any
    ) -> torch.Tensor:
        output: torch.Tensor = self.returned(super().attend(layer, query, kv_cache, metadata, **options), query)
        return output


def over(built: Built, **changes: Any) -> Built:
    """Return a step with other batch metadata."""
    return attrs.evolve(built, common=attrs.evolve(built.common, **changes))


# --- another step or layer --------------------------------------------------------------------------------------------


@shown_by("the block table of the first step is kept", "head_size=64-num_kv_heads=1-full-decodes", "step 2")
class KeepsTheFirstTable(Changes):
    first_table: torch.Tensor | None = None

    def given(self, layer: Any, query: Any, kv_cache: Any, built: Built, sinks: Any) -> Arguments:
        if self.first_table is None or self.first_table.shape != built.block_table.shape:
            self.first_table = built.block_table.clone()
        return layer, query, kv_cache, attrs.evolve(built, block_table=self.first_table), sinks


@shown_by("lengths are kept by where they lie", "decodes-padded", "step 2")
class KeepsLengthsByPlace(Changes):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.kept: dict[tuple[int, int], torch.Tensor] = {}

    def given(self, layer: Any, query: Any, kv_cache: Any, built: Built, sinks: Any) -> Arguments:
        lens = built.common.seq_lens
        lens = self.kept.setdefault((lens.data_ptr(), len(lens)), lens.clone())
        return layer, query, kv_cache, over(built, seq_lens=lens), sinks


@shown_by("the metadata of the first step is kept", "head_size=64-num_kv_heads=1-full-decodes", "step 2")
class KeepsTheFirstMetadata(Changes):
    first_built: Built | None = None

    def given(self, layer: Any, query: Any, kv_cache: Any, built: Built, sinks: Any) -> Arguments:
        if self.first_built is None or self.first_built.common.num_actual_tokens != built.common.num_actual_tokens:
            self.first_built = built
        return layer, query, kv_cache, self.first_built, sinks


@shown_by("pages are copied once and never again", "head_size=64-num_kv_heads=1-full-decodes", "step 2")
class KeepsPages(PlainBackend):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.copies: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def read(self, layer: Any, kv_cache: Any, built: Built, request: int, tokens: Any) -> Any:
        size = built.common.block_size
        blocks = built.block_table[request, tokens // size].tolist()
        pages_of_tokens = [
            self.copies.setdefault((layer.name, block), (kv_cache["k"][block].clone(), kv_cache["v"][block].clone()))
            for block in blocks
        ]
        offsets = (tokens % size).tolist()
        key = [pages[0][offset] for pages, offset in zip(pages_of_tokens, offsets, strict=True)]
        value = [pages[1][offset] for pages, offset in zip(pages_of_tokens, offsets, strict=True)]
        return torch.stack(key), torch.stack(value)


@shown_by("the cache of another layer is read", "head_size=64-num_kv_heads=1-full-decodes", "layers.1 in step 1")
class ReadsAnotherLayersCache(Changes):
    first_cache: KVCache | None = None

    def given(self, layer: Any, query: Any, kv_cache: Any, built: Any, sinks: Any) -> Arguments:
        self.first_cache = kv_cache if self.first_cache is None else self.first_cache
        return layer, query, self.first_cache, built, sinks


@shown_by("the sinks of another layer are used", "num_kv_heads=8-window=20-sink_tokens=4-", "layers.1")
class UsesAnotherLayersSinks(Changes):
    first_sinks: torch.Tensor | None = None

    def given(self, layer: Any, query: Any, kv_cache: Any, built: Any, sinks: Any) -> Arguments:
        self.first_sinks = sinks if self.first_sinks is None else self.first_sinks
        return layer, query, kv_cache, built, self.first_sinks


@shown_by("the bias of another layer is used", "num_kv_heads=1-relative_bias-", "layers.0 in step 1")
class UsesAnotherLayersBias(PlainBackend):
    def bind(self, layer: LayerSpec, parameters: Mapping[str, torch.Tensor]) -> None:
        for own_layer in self.layers:
            self.parameters[own_layer.name] = parameters


# --- a size -----------------------------------------------------------------------------------------------------------


class WrongAboveHeadSize(PlainBackend):
    limit = 0

    def scores(self, layer: LayerSpec, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return super().scores(layer, query[..., : self.limit], key[..., : self.limit])


@shown_by("heads end at 64 elements", "head_size=128-")
class WrongAbove64(WrongAboveHeadSize):
    limit = 64


@shown_by("heads end at 128 elements", "head_size=256-")
class WrongAbove128(WrongAboveHeadSize):
    limit = 128


@shown_by("values end at 128 elements", "head_size=256-")
class ValuesEndAt128(Returns):
    def returned(self, output: torch.Tensor, query: torch.Tensor) -> Any:
        output[..., 128:] = 0
        return output


@shown_by("the ninth query head is the first one", "head_size=64-num_kv_heads=1-full-decodes")
class WrongAbove8Heads(Returns):
    def returned(self, output: torch.Tensor, query: torch.Tensor) -> Any:
        return output[:, torch.arange(output.shape[1]) % 8]


@shown_by("the fifth KV head is the first one", "num_kv_heads=8-")
class WrongAbove4KVHeads(PlainBackend):
    def kv_heads(self, num_heads: int, num_kv_heads: int) -> torch.Tensor:
        return super().kv_heads(num_heads, num_kv_heads) % 4


@shown_by("requests from the ninth on read the pages of another", "head_size=64-num_kv_heads=1-full-decodes")
class WrongFromRequest8On(Changes):
    def given(self, layer: Any, query: Any, kv_cache: Any, built: Built, sinks: Any) -> Arguments:
        rows = torch.arange(len(built.block_table)).clamp(max=7)
        return layer, query, kv_cache, attrs.evolve(built, block_table=built.block_table[rows]), sinks


@shown_by("the seventeenth request is left out", "head_size=64-num_kv_heads=1-full-decodes")
class LeavesOutRequest16(Changes):
    def given(self, layer: Any, query: Any, kv_cache: Any, built: Built, sinks: Any) -> Arguments:
        starts = built.common.query_start_loc
        return layer, query, kv_cache, over(built, query_start_loc=starts[:17]), sinks


# --- the mask ---------------------------------------------------------------------------------------------------------


class OtherWindow(PlainBackend):
    more = 0

    def ranges(self, layer: LayerSpec, position: int) -> list[tuple[int, int]]:
        window = getattr(layer.spec, "window", None)
        if window is None:
            return super().ranges(layer, position)
        sinks = getattr(layer.spec, "num_sink_tokens", 0)
        return [(0, min(sinks, position)), (max(0, position + 1 - window - self.more), position + 1)]


@shown_by("a window is one token too long", "window=5-block=1-decode", "NaN is state that is not live")
class WindowTooLong(OtherWindow):
    more = 1


@shown_by("a window is one token too short", "window=5-block=1-decode")
class WindowTooShort(OtherWindow):
    more = -1


@shown_by("sink tokens are not seen", "window=5-sink_tokens=3-block=1-decode")
class WithoutSinkTokens(PlainBackend):
    def ranges(self, layer: LayerSpec, position: int) -> list[tuple[int, int]]:
        window = getattr(layer.spec, "window", None)
        return super().ranges(layer, position) if window is None else [(max(0, position + 1 - window), position + 1)]


class OtherWindowBothWays(PlainBackend):
    earlier, later = 0, 0

    def ranges(self, layer: LayerSpec, position: int) -> list[tuple[int, int]]:
        mask = None if layer.spec is None else layer.spec.mask
        if mask is None or mask.window is None or mask.lookahead is None:
            return super().ranges(layer, position)
        start = max(0, position + 1 - mask.window - self.earlier)
        return [(start, max(start, position + 1 + mask.lookahead + self.later))]


@shown_by("a window in both directions begins one token early", "window=5-lookahead=3-block=1-prefill")
class BeginsEarlyBothWays(OtherWindowBothWays):
    earlier = 1


@shown_by("a window in both directions begins one token late", "window=5-lookahead=3-block=1-prefill")
class BeginsLateBothWays(OtherWindowBothWays):
    earlier = -1


@shown_by("a window in both directions ends one token late", "window=5-lookahead=3-block=1-prefill")
class EndsLateBothWays(OtherWindowBothWays):
    later = 1


@shown_by("a window in both directions ends one token early", "window=5-lookahead=3-block=1-prefill")
class EndsEarlyBothWays(OtherWindowBothWays):
    later = -1


@shown_by("a window in both directions has no begin", "window=5-lookahead=3-block=1-prefill")
class WithoutBeginBothWays(OtherWindowBothWays):
    earlier = 1 << 20


@shown_by("a window in both directions has no end", "window=5-lookahead=3-block=1-prefill")
class WithoutEndBothWays(OtherWindowBothWays):
    later = 1 << 20


@shown_by("later tokens of a window in both directions are not seen", "window=5-lookahead=3-block=1-prefill")
class CausalBothWays(PlainBackend):
    def ranges(self, layer: LayerSpec, position: int) -> list[tuple[int, int]]:
        return [(start, min(stop, position + 1)) for start, stop in super().ranges(layer, position)]


@shown_by("a chunk begins one token late", "chunk=6-block=1-decode")
class ChunkBeginsLate(PlainBackend):
    def ranges(self, layer: LayerSpec, position: int) -> list[tuple[int, int]]:
        chunk = getattr(layer.spec, "chunk", None)
        if chunk is None:
            return super().ranges(layer, position)
        return [(min(position, position - position % chunk + 1), position + 1)]


@shown_by("a chunk ends one token late", "chunk=6-block=1-prefill")
class ChunkEndsLate(PlainBackend):
    def ranges(self, layer: LayerSpec, position: int) -> list[tuple[int, int]]:
        chunk = getattr(layer.spec, "chunk", None)
        if chunk is None or position % chunk:
            return super().ranges(layer, position)
        return [(max(0, position - chunk), position + 1)]


@shown_by("the mask function of a sparse type is ignored", "window=4-dilation=3-block=1-decode")
class SeesEveryLiveToken(PlainBackend):
    def shown(self, layer: LayerSpec, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return key <= query


@shown_by("a sparse pattern is that of the first query", "window=4-dilation=3-block=1-prefill")
class PatternOfTheFirst(PlainBackend):
    def shown(self, layer: LayerSpec, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return super().shown(layer, query[:1], key) | (key == query)


@shown_by("queries see later tokens", "full-block=1-prefill")
class NeverCausal(Changes):
    def given(self, layer: Any, query: Any, kv_cache: Any, built: Built, sinks: Any) -> Arguments:
        return layer, query, kv_cache, over(built, causal=False), sinks


@shown_by("a batch is causal that is not", "full-block=1-prefill-not_causal")
class AlwaysCausal(Changes):
    def given(self, layer: Any, query: Any, kv_cache: Any, built: Built, sinks: Any) -> Arguments:
        return layer, query, kv_cache, over(built, causal=True), sinks


@shown_by("hidden tokens are seen", "full-block=1-hidden_starts")
class SeesHiddenTokens(Changes):
    def given(self, layer: Any, query: Any, kv_cache: Any, built: Built, sinks: Any) -> Arguments:
        return layer, query, kv_cache, over(built, extensions=NO_EXTENSIONS), sinks


@shown_by("a query does not see itself", "full-block=1-decode")
class DoesNotSeeItself(PlainBackend):
    def ranges(self, layer: LayerSpec, position: int) -> list[tuple[int, int]]:
        return super().ranges(layer, position)[:-1]


@shown_by("the last token of a block is not seen", "full-block=16-decode")
class DropsTheLastTokenOfBlocks(PlainBackend):
    def visible(self, layer: Any, common: CommonAttentionMetadata, request: int, first: int, seq_len: int) -> Any:
        mask = super().visible(layer, common, request, first, seq_len)
        mask[:, common.block_size - 1 : first : common.block_size] = False
        return mask


# --- scores -----------------------------------------------------------------------------------------------------------


class OtherLayer(Changes):
    """Replaces the layer's query side."""

    def query_side(self, layer: LayerSpec) -> dict[str, Any]:
        return {}

    def given(self, layer: LayerSpec, query: Any, kv_cache: Any, built: Any, sinks: Any) -> Arguments:
        assert layer.query is not None
        changed = attrs.evolve(layer.query, **self.query_side(layer))
        return attrs.evolve(layer, query=changed), query, kv_cache, built, sinks


@shown_by("the scale is that of the head size", "full-block=1-prefill")
class OwnScale(OtherLayer):
    def query_side(self, layer: LayerSpec) -> dict[str, Any]:
        assert layer.query is not None
        return {"scale": 1 / math.sqrt(layer.query.head_size)}


@shown_by("scores are not capped", "full-soft_cap-prefill")
class WithoutSoftCap(OtherLayer):
    def query_side(self, layer: LayerSpec) -> dict[str, Any]:
        return {"soft_cap": None}


@shown_by("learned sinks are left out", "full-learned_sinks-prefill")
class WithoutSinks(Changes):
    def given(self, layer: Any, query: Any, kv_cache: Any, built: Any, sinks: Any) -> Arguments:
        return layer, query, kv_cache, built, None


@shown_by("query heads take turns over KV heads", "full-block=1-prefill")
class TakesTurns(PlainBackend):
    def kv_heads(self, num_heads: int, num_kv_heads: int) -> torch.Tensor:
        return torch.arange(num_heads) % num_kv_heads


@shown_by("the relative bias is shifted", "full-relative_bias-prefill")
class ShiftsTheBias(PlainBackend):
    def bias(self, layer: LayerSpec, first: int, seq_len: int) -> torch.Tensor | None:
        bias = super().bias(layer, first, seq_len)
        return None if bias is None else bias.roll(1, dims=-1)


@shown_by("the slopes of ALiBi are those of other heads", "full-alibi-prefill")
class TakesSlopesOfOtherHeads(PlainBackend):
    def bias(self, layer: LayerSpec, first: int, seq_len: int) -> torch.Tensor | None:
        bias = super().bias(layer, first, seq_len)
        assert layer.query is not None
        return bias if bias is None or layer.query.alibi_slopes is None else bias.roll(1, dims=0)


@shown_by("the distances of ALiBi have a sign", "bidirectional-alibi-prefill")
class SignsTheDistances(PlainBackend):
    def bias(self, layer: LayerSpec, first: int, seq_len: int) -> torch.Tensor | None:
        bias = super().bias(layer, first, seq_len)
        assert layer.query is not None
        if bias is None or layer.query.alibi_slopes is None:
            return bias
        later = torch.arange(seq_len) > torch.arange(first, seq_len)[:, None]
        return torch.where(later, -bias, bias)


@shown_by("values are taken to be as long as keys", "full-short_values-prefill")
class ConfusesValueSize(PlainBackend):
    def read(self, layer: LayerSpec, kv_cache: Any, built: Any, request: int, tokens: Any) -> Any:
        key, value = super().read(layer, kv_cache, built, request, tokens)
        return key, value if value.shape == key.shape else value.roll(1, dims=-1)


@shown_by("it computes in half precision", "full-block=1-prefill")
class ComputesInHalfPrecision(Changes):
    def given(self, layer: Any, query: torch.Tensor, kv_cache: Any, built: Any, sinks: Any) -> Arguments:
        return layer, query.bfloat16().float(), kv_cache, built, sinks


# --- pages ------------------------------------------------------------------------------------------------------------


@shown_by("pages are taken to lie in order", "full-block=16-uneven")
class PagesInOrder(Changes):
    def given(self, layer: Any, query: Any, kv_cache: Any, built: Built, sinks: Any) -> Arguments:
        first, width = built.block_table[:, :1], built.block_table.shape[1]
        page = next((int(row[1] - row[0]) for row in built.block_table if width > 1 and row[1]), 0)
        return layer, query, kv_cache, attrs.evolve(built, block_table=first + page * torch.arange(width)), sinks


@shown_by("the last block is the one before", "full-block=16-uneven")
class StaleLastBlock(Changes):
    def given(self, layer: Any, query: Any, kv_cache: Any, built: Built, sinks: Any) -> Arguments:
        table = built.block_table.clone()
        last = (built.common.seq_lens - 1) // built.common.block_size
        for row, block in enumerate(last.tolist()):
            table[row, block] = table[row, max(0, block - 1)]
        return layer, query, kv_cache, attrs.evolve(built, block_table=table), sinks


@shown_by("all padded tokens are the last request's", "full-block=1-decode-padded")
class CountsPaddedTokens(Changes):
    def given(self, layer: Any, query: torch.Tensor, kv_cache: Any, built: Built, sinks: Any) -> Arguments:
        starts = built.common.query_start_loc.clone()
        starts[starts == built.common.num_actual_tokens] = len(query)
        return layer, query, kv_cache, over(built, query_start_loc=starts), sinks


@shown_by("NaN is taken for a mask", "num_kv_heads=1-window=20-", "step 2")
class MasksNaN(PlainBackend):
    def visible(self, layer: Any, common: Any, request: int, first: int, seq_len: int) -> Any:
        mask = super().visible(layer, common, request, first, seq_len)
        if getattr(layer.spec, "window", None) is not None:
            mask[:, max(0, first - 32) : first] = True
        return mask

    def scores(self, layer: LayerSpec, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        scores = super().scores(layer, query, key)
        return scores.masked_fill(scores.isnan(), float("-inf"))

    def read(self, layer: Any, kv_cache: Any, built: Any, request: int, tokens: Any) -> Any:
        key, value = super().read(layer, kv_cache, built, request, tokens)
        return key, value.nan_to_num(0.0)


@shown_by("the scale of another head is used", "fp8_token_head-full-prefill")
class ScaleOfAnotherHead(PlainBackend):
    def read(self, layer: LayerSpec, kv_cache: KVCache, built: Any, request: int, tokens: Any) -> Any:
        rolled = {name: tensor.roll(1, dims=2) if tensor.ndim == 3 else tensor for name, tensor in kv_cache.items()}
        return super().read(layer, rolled, built, request, tokens)


@shown_by("a token is stored in the next slot too", "full-block=16-prefill", "bytes beside its slots")
class WritesTheNextSlot(PlainBackend):
    def write_kv(self, key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
        beside = (slots.offsets[-1:] + 1) % kv_cache["k"].shape[1]
        super().write_kv(key[-1:], value[-1:], kv_cache, Slots.at(slots.blocks[-1:], beside, slots.block_size))
        super().write_kv(key, value, kv_cache, slots)


@shown_by("keys are stored as values", "full-block=1-prefill")
class StoresKeysAsValues(PlainBackend):
    def write_kv(self, key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
        super().write_kv(key, key if key.shape == value.shape else value, kv_cache, slots)


# --- the builder ------------------------------------------------------------------------------------------------------


@shown_by("refreshed metadata has the first table", "full-block=1-prefill", "refreshed metadata")
class RefreshesNothing(PlainBackend):
    class Builder(PlainBuilder):
        def refreshed_fields(self, built: Built, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
            return {"block_table": built.block_table}

    def make_builder(self) -> AttentionMetadataBuilder:
        return self.Builder()


@shown_by("another field is refreshed than is declared", "full-block=1-prefill", "refreshed_fields returned")
class RefreshesAnotherField(PlainBackend):
    class Builder(PlainBuilder):
        def refreshed_fields(self, built: Built, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
            return {"common": metadata}

    def make_builder(self) -> AttentionMetadataBuilder:
        return self.Builder()


# --- results and writes -----------------------------------------------------------------------------------------------


@shown_by("nothing is returned", "full-block=1-prefill", "returns NoneType")
class ReturnsNone(Returns):
    def returned(self, output: torch.Tensor, query: torch.Tensor) -> Any:
        return None


@shown_by("another dtype is returned", "full-block=1-prefill", "float64")
class ReturnsAnotherDtype(Returns):
    def returned(self, output: torch.Tensor, query: torch.Tensor) -> Any:
        return output.double()


@shown_by("a row is missing", "full-block=1-prefill", "the output is")
class ReturnsARowLess(Returns):
    def returned(self, output: torch.Tensor, query: torch.Tensor) -> Any:
        return output[:-1]


@shown_by("heads are joined", "full-block=1-prefill", "the output is")
class JoinsHeads(Returns):
    def returned(self, output: torch.Tensor, query: torch.Tensor) -> Any:
        return output.flatten(1)


@shown_by("the output lies on another device", "full-block=1-prefill", "meta")
class ReturnsToAnotherDevice(Returns):
    def returned(self, output: torch.Tensor, query: torch.Tensor) -> Any:
        return output.to("meta")


@shown_by("the query is returned", "full-block=1-prefill")
class ReturnsTheQuery(Returns):
    def returned(self, output: torch.Tensor, query: torch.Tensor) -> Any:
        return query[..., : output.shape[-1]] if query.shape[-1] >= output.shape[-1] else output


@shown_by("the query is scaled where it lies", "full-block=1-prefill", "it wrote to")
class WritesTheQuery(Returns):
    def returned(self, output: torch.Tensor, query: torch.Tensor) -> Any:
        query.mul_(0.5)
        return output


@shown_by("the cache is written by attend", "full-block=1-prefill", "it wrote to")
class WritesTheCache(Changes):
    def attend(self, layer: Any, query: Any, kv_cache: Any, metadata: Any, **options: Any) -> torch.Tensor:
        output = super().attend(layer, query, kv_cache, metadata, **options)
        kv_cache["k"][0].zero_()
        return output


@shown_by("the metadata is written by attend", "full-block=1-prefill", "it wrote to")
class WritesTheMetadata(Changes):
    def given(self, layer: Any, query: Any, kv_cache: Any, built: Built, sinks: Any) -> Arguments:
        built.common.slot_mapping.add_(1)
        return layer, query, kv_cache, built, sinks


@shown_by("the metadata is written by the builder", "full-block=1-prefill", "it wrote to")
class BuilderWritesTheMetadata(PlainBackend):
    class Builder(PlainBuilder):
        def build(self, metadata: CommonAttentionMetadata) -> Built:
            metadata.generating_indices.zero_()
            return super().build(metadata)

    def make_builder(self) -> AttentionMetadataBuilder:
        return self.Builder()
