"""The kit finds every bug of a list in wrappers, and none in the wrappers without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs
import pytest
import torch
from kvframe_chunked_local.wrapper import ChunkedLocal
from kvframe_decode_only.wrapper import DecodeOnly

from kvframe.contract.metadata import SEQ_STARTS, CommonAttentionMetadata, Extension
from kvframe.contract.specs import LayerSpec
from kvframe.contract.wrapper import CHANGES_MASK, FieldUse, MetadataWrapper
from kvframe.testing.laws import ConformanceError
from kvframe.testing.state import GridSpec
from kvframe.testing.wrappers import check_wrapper


def layer(**options: Any) -> LayerSpec:
    return LayerSpec(name="layer", spec=GridSpec(block_size=4, num_kv_heads=1, head_size=8, **options))


CHUNKS, PART_BLOCKS, FULL = layer(chunk=8), layer(chunk=6), layer()
SHARING = attrs.evolve(FULL, shares_with="owner")

Change = Callable[[CommonAttentionMetadata, CommonAttentionMetadata], Mapping[str, Any]]


def after(base: type[MetadataWrapper], change: Change, **declared: Any) -> MetadataWrapper:
    """Return a wrapper with a change of its output: new fields from its input and its right output."""

    def call(self: Any, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        wrapped = base.__call__(self, metadata)
        return attrs.evolve(wrapped, **change(metadata, wrapped))

    wrapper: MetadataWrapper = attrs.frozen(kw_only=True)(type("Wrong", (base,), {"__call__": call, **declared}))()
    return wrapper


class Passes(MetadataWrapper):
    """Returns its input."""

    name: ClassVar[str] = "passes"
    fields: ClassVar[Mapping[str, FieldUse]] = dict.fromkeys(ChunkedLocal.fields, FieldUse.CARRY)
    extensions: ClassVar[Mapping[str, FieldUse]] = {SEQ_STARTS: FieldUse.CARRY, "labels": FieldUse.SLICE}

    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        return attrs.evolve(metadata, extensions=self.pass_extensions(metadata))


RESETS_ALL = dict.fromkeys(Passes.fields, FieldUse.RESET)


@attrs.frozen(kw_only=True)
class Narrows(Passes):
    """Gives full attention a window."""

    effects: ClassVar[frozenset[str]] = frozenset({CHANGES_MASK})
    window: int = 3

    def wrapped_layer(self, layer: LayerSpec) -> LayerSpec:
        assert layer.spec is not None
        return attrs.evolve(layer, spec=attrs.evolve(layer.spec, window=self.window))  # type: ignore[call-arg]


RIGHT = {
    "chunks of whole blocks": (ChunkedLocal(), CHUNKS),
    "chunks that end within a block": (ChunkedLocal(), PART_BLOCKS),
    "generating tokens": (DecodeOnly(), SHARING),
    "everything": (Passes(), FULL),
    "a window": (Narrows(), FULL),
    "batches that are not causal": (
        after(Passes, lambda _, wrapped: {"causal": False}, fields={**Passes.fields, "causal": FieldUse.RESET}),
        FULL,
    ),
}


def other_blocks(metadata: CommonAttentionMetadata, wrapped: CommonAttentionMetadata, shift: int) -> torch.Tensor:
    """Return the table of virtual requests, with blocks ``shift`` times as far from a request's first block."""
    width = wrapped.block_table.shape[1]
    first = {int(row[0]): row for row in metadata.block_table}
    rows = []
    for row in wrapped.block_table:
        owner = next((each for each in first.values() if int(row[0]) in each.tolist()), row)
        start = owner.tolist().index(int(row[0])) if int(row[0]) in owner.tolist() else 0
        rows.append(torch.roll(owner, -shift * start)[:width])
    return torch.stack(rows)


def longer_by(difference: int) -> Change:
    def change(metadata: CommonAttentionMetadata, wrapped: CommonAttentionMetadata) -> Mapping[str, Any]:
        lens = (wrapped.seq_lens_cpu + difference).clamp(min=0)
        return {"seq_lens": lens, "seq_lens_cpu": lens, "max_seq_len": max(0, wrapped.max_seq_len + difference)}

    return change


def hiding(difference: int) -> Change:
    def change(metadata: CommonAttentionMetadata, wrapped: CommonAttentionMetadata) -> Mapping[str, Any]:
        if SEQ_STARTS not in wrapped.extensions:
            return {}
        old = wrapped.extensions[SEQ_STARTS]
        assert old.values_cpu is not None
        starts, starts_cpu = ((each + difference).clamp(min=0) for each in (old.values, old.values_cpu))
        return {"extensions": {**wrapped.extensions, SEQ_STARTS: Extension(starts, old.axis, starts_cpu)}}

    return change


def last_of_each(metadata: CommonAttentionMetadata, wrapped: CommonAttentionMetadata) -> Mapping[str, Any]:
    """Keep the last tokens of each request, as many as generate, shifted to the front."""
    if wrapped is metadata or metadata.num_generating < 2:
        return {}
    lens = wrapped.seq_lens_cpu - wrapped.query_start_loc_cpu.diff().clamp(max=1)
    lens = torch.where(wrapped.seq_lens_cpu > 1, lens, wrapped.seq_lens_cpu).int()
    return {"seq_lens": lens, "seq_lens_cpu": lens}


def one_token_less(metadata: CommonAttentionMetadata, wrapped: CommonAttentionMetadata) -> Mapping[str, Any]:
    starts = wrapped.query_start_loc_cpu.clamp(max=max(0, wrapped.num_actual_tokens - 1))
    slots = wrapped.slot_mapping.clone()
    slots[-1:] = 0
    return {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "num_actual_tokens": max(0, wrapped.num_actual_tokens - 1),
        "slot_mapping": slots,
    }


class ChunksOf(ChunkedLocal):
    """Splits at chunks of another size than the layer's."""

    more: ClassVar[int] = 0

    def for_layer(self, layer: LayerSpec) -> Any:
        bound = super().for_layer(layer)
        assert bound.chunk is not None
        return attrs.evolve(bound, chunk=bound.chunk + self.more)


class TooLong(ChunksOf):
    more = 1


class TooShort(ChunksOf):
    more = -1


class KeepsTheMask(ChunkedLocal):
    def wrapped_layer(self, layer: LayerSpec) -> LayerSpec:
        return layer


class OtherWindowThanItSays(Narrows):
    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        return attrs.evolve(super().__call__(metadata), causal=False)


class SaysNothingOfItsMask(Narrows):
    effects = frozenset()


class SaysNothingOfWhatItDrops(DecodeOnly):
    effects = frozenset()


class DropsTheFirstTokens(DecodeOnly):
    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        last = metadata.generating_indices.clamp(max=len(metadata.slot_mapping) - 1)
        return super().__call__(attrs.evolve(metadata, slot_mapping=metadata.slot_mapping[last.flip(0)[0] - last]))


class LoopsOverRequests(Passes):
    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        assert all(length >= 0 for length in metadata.seq_lens_cpu.tolist())
        return super().__call__(metadata)


def write(metadata: CommonAttentionMetadata, wrapped: CommonAttentionMetadata) -> Mapping[str, Any]:
    metadata.block_table.add_(1)
    return {}


def write_on_the_host(metadata: CommonAttentionMetadata, wrapped: CommonAttentionMetadata) -> Mapping[str, Any]:
    metadata.seq_lens_cpu.numpy()[:] += 1
    return {}


def of_rows(change: Callable[[torch.Tensor], torch.Tensor], *names: str) -> Change:
    return lambda _, wrapped: {name: change(getattr(wrapped, name)) for name in names}


WAITS = {"fields": RESETS_ALL}

MISTAKES: dict[str, tuple[MetadataWrapper, LayerSpec, str]] = {
    "the table is not shifted": (
        after(ChunkedLocal, lambda metadata, wrapped: {"block_table": other_blocks(metadata, wrapped, 0)}),
        CHUNKS,
        "attends to",
    ),
    "the table is shifted twice": (
        after(ChunkedLocal, lambda metadata, wrapped: {"block_table": other_blocks(metadata, wrapped, 2)}),
        CHUNKS,
        "attends to",
    ),
    "the tables of two requests are exchanged": (
        after(ChunkedLocal, of_rows(lambda table: table.flip(0), "block_table")),
        CHUNKS,
        "attends to",
    ),
    "chunks are one token too long": (TooLong(), PART_BLOCKS, "attends to"),
    "chunks are one token too short": (TooShort(), CHUNKS, "attends to"),
    "the tokens before a chunk are seen": (after(ChunkedLocal, hiding(-1)), PART_BLOCKS, "attends to"),
    "the first token of a chunk is hidden": (
        after(ChunkedLocal, hiding(1)),
        PART_BLOCKS,
        "'seq_starts' does not lie between 0 and each request's first new token",
    ),
    "virtual requests keep the mask of chunks": (KeepsTheMask(), PART_BLOCKS, "attends to"),
    "requests are one token longer": (after(Passes, longer_by(1), fields=RESETS_ALL), FULL, "attends to|no room"),
    "requests are one token shorter": (
        after(Passes, longer_by(-1), fields=RESETS_ALL),
        FULL,
        "request 0 has 1 new tokens, and seq_lens of it is 0",
    ),
    "other tokens are kept than those that generate": (
        after(DecodeOnly, last_of_each, fields={**DecodeOnly.fields, **WAITS["fields"]}),
        SHARING,
        "attends to|more new|needs an index of requests",
    ),
    "tokens are dropped and it is not said": (SaysNothingOfWhatItDrops(), SHARING, "does not declare that it drops"),
    "a token is lost": (after(Passes, one_token_less, fields=RESETS_ALL), FULL, "num_generating is 5, of 4 tokens"),
    "kept tokens have other slots": (DropsTheFirstTokens(), SHARING, "has the slot"),
    "slots are those of the next tokens": (
        after(Passes, of_rows(lambda slots: slots.roll(1), "slot_mapping"), fields=RESETS_ALL),
        FULL,
        "has the slot|a padded token has a slot",
    ),
    "a mask is changed and it is not said": (SaysNothingOfItsMask(), FULL, "attends to"),
    "another mask holds than it says": (
        attrs.evolve(after(OtherWindowThanItSays, lambda *_: {}, fields=Passes.fields)),
        FULL,
        "declares to carry causal",
    ),
    "causal is flipped": (after(Passes, lambda _, wrapped: {"causal": not wrapped.causal}), FULL, "to carry causal"),
    "its input is written to": (after(Passes, write), FULL, "writes to its input: block_table"),
    "its input is written to on the host": (
        after(Passes, write_on_the_host),
        FULL,
        "writes to its input: seq_lens_cpu",
    ),
    "an extension is lost": (after(Passes, lambda *_: {"extensions": {}}), FULL, "lost the extension"),
    "an extension is not sliced": (
        after(ChunkedLocal, lambda metadata, wrapped: {"extensions": {**wrapped.extensions, **metadata.extensions}}),
        CHUNKS,
        "has not one row|fit together|does not lie between",
    ),
    "the host is told something else": (
        after(Passes, of_rows(lambda lens: lens.clamp(max=3), "seq_lens_cpu"), fields=RESETS_ALL),
        FULL,
        "seq_lens is not what seq_lens_cpu says",
    ),
    "the longest request is told too short": (
        after(ChunkedLocal, lambda _, wrapped: {"max_seq_len": wrapped.max_seq_len - 1}),
        CHUNKS,
        "max_seq_len is 6, the longest request has 7 tokens",
    ),
    "requests are looped over": (LoopsOverRequests(), FULL, "loops over requests in Python"),
    "the device is waited for": (
        after(Passes, lambda _, wrapped: {"max_seq_len": int(wrapped.seq_lens.max())}, fields=RESETS_ALL),
        FULL,
        "makes the host wait",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_wrappers_without_a_mistake_pass(name: str) -> None:
    check_wrapper(*RIGHT[name])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_kit_finds_a_mistake(mistake: str) -> None:
    wrapper, seen, message = MISTAKES[mistake]
    with pytest.raises(ConformanceError, match=message):
        check_wrapper(wrapper, seen)
