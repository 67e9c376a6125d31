"""The kit finds every bug of a list in wrappers, and none in the wrappers without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs
import pytest
import torch
from kvframe_chunked_local.wrapper import ChunkedLocal
from kvframe_decode_only.wrapper import DecodeOnly
from kvframe_testing.case import Case, Request
from kvframe_testing.conformance import check_backend
from kvframe_testing.grid import chain_refusals, make_cases, make_layer, share_cache
from kvframe_testing.laws import ConformanceError, check_spec
from kvframe_testing.sample import sample
from kvframe_testing.state import GridSpec
from kvframe_testing.wrappers import check_wrapper

from kvframe.builtin.torch_reference import TorchReferenceBackend
from kvframe.contract.backend import AttentionBackend, KVCache
from kvframe.contract.capture import GraphCapture
from kvframe.contract.metadata import NO_EXTENSIONS, SEQ_STARTS, CommonAttentionMetadata, Extension
from kvframe.contract.specs import LayerSpec
from kvframe.contract.wrapper import FieldUse, MetadataWrapper


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


class Narrows(Passes):
    """Gives full attention a window."""

    def wrapped_layer(self, layer: LayerSpec) -> LayerSpec:
        assert layer.spec is not None
        return attrs.evolve(layer, spec=attrs.evolve(layer.spec, window=3))  # type: ignore[call-arg]


RESETS_ALL = dict.fromkeys(Passes.fields, FieldUse.RESET)


RIGHT = {
    "chunks of whole blocks": (ChunkedLocal(), CHUNKS),
    "chunks that end within a block": (ChunkedLocal(), PART_BLOCKS),
    "generating tokens": (DecodeOnly(), SHARING),
    "everything": (Passes(), FULL),
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
        owner = next((table_row for table_row in first.values() if int(row[0]) in table_row.tolist()), row)
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
        starts, starts_cpu = ((values + difference).clamp(min=0) for values in (old.values, old.values_cpu))
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


class SaysNothingOfWhatItDrops(DecodeOnly):
    effects = frozenset()


class DropsTheFirstTokens(DecodeOnly):
    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        last = metadata.generating_indices.clamp(max=len(metadata.slot_mapping) - 1)
        return super().__call__(attrs.evolve(metadata, slot_mapping=metadata.slot_mapping[last.flip(0)[0] - last]))


def of_rows(change: Callable[[torch.Tensor], torch.Tensor], *names: str) -> Change:
    return lambda _, wrapped: {name: change(getattr(wrapped, name)) for name in names}


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
        after(DecodeOnly, last_of_each, fields=RESETS_ALL),
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
    "a mask is changed": (Narrows(), FULL, "attends to"),
    "an extension is not sliced": (
        after(ChunkedLocal, lambda metadata, wrapped: {"extensions": {**wrapped.extensions, **metadata.extensions}}),
        CHUNKS,
        "has not one row|fit together|does not lie between",
    ),
    "the longest request is told too short": (
        after(ChunkedLocal, lambda _, wrapped: {"max_seq_len": wrapped.max_seq_len - 1}),
        CHUNKS,
        "max_seq_len is 6, the longest request has 7 tokens",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_wrappers_without_a_mistake_pass(name: str) -> None:
    check_wrapper(*RIGHT[name])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_kit_finds_a_mistake(mistake: str) -> None:
    wrapper, layer, message = MISTAKES[mistake]
    with pytest.raises(ConformanceError, match=message):
        check_wrapper(wrapper, layer)


# --- attention after wrappers -----------------------------------------------------------------------------------------

CHAINS = ((DecodeOnly(),), (ChunkedLocal(),), (DecodeOnly(), ChunkedLocal()))
CAPABILITIES = TorchReferenceBackend.capabilities
TOGETHER = [("wrappers", name) for name in ("batch", "format", "is_padded", "mask", "causal", "block_size")]


def chain_cases() -> list[Case]:
    return [case for case in make_cases(CAPABILITIES, chains=CHAINS) if case.wrappers]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in sample(chain_cases(), TOGETHER)])
def test_attention_after_wrappers_is_what_the_layers_mask_says(case: Case) -> None:
    check_backend(TorchReferenceBackend, case)


@pytest.mark.whole
def test_attention_after_wrappers_is_right_on_the_whole_grid() -> None:
    for case in chain_cases():
        check_backend(TorchReferenceBackend, case)


def test_chains_are_crossed_with_the_layers_that_they_serve() -> None:
    names = {(case.name.split("-")[0], "-shared" in case.name) for case in chain_cases()}
    assert {
        ("decode_only", True),
        ("chunked_local", False),
        ("chunked_local", True),
        ("decode_only+chunked_local", True),
    } == names


def test_a_chain_that_rejects_batches_that_are_not_causal_is_not_given_any() -> None:
    assert {"decode_only"} == {case.name.split("-")[0] for case in chain_cases() if not case.causal}


def test_padding_is_given_to_chains_that_can_always_be_captured() -> None:
    class Eager(DecodeOnly):
        capture = GraphCapture.NEVER

    padded = [case for case in make_cases(CAPABILITIES, chains=[(DecodeOnly(),), (Eager(),)]) if case.num_padding]
    assert {(), (DecodeOnly(),)} == {case.wrappers for case in padded}


@pytest.mark.parametrize(
    ("code", "chain", "shared", "chunk"),
    [
        ("keeps_cache", (DecodeOnly(),), False, None),
        ("no_chunk", (ChunkedLocal(),), True, None),
        ("chain_order", (ChunkedLocal(), DecodeOnly()), True, 8),
        ("extension_seq_starts", (ChunkedLocal(),), False, 7),
    ],
)
def test_what_does_not_compose_is_refused_by_code(
    code: str, chain: tuple[MetadataWrapper, ...], shared: bool, chunk: int | None
) -> None:
    capabilities = attrs.evolve(CAPABILITIES, extensions=frozenset())
    refusing = make_layer(capabilities, block_size=4, chunk=chunk)
    refusals = chain_refusals(chain, share_cache(refusing) if shared else refusing, capabilities, "cpu")
    assert [code] == [refusal.code for refusal in refusals]


def fewer_of_the_first(metadata: CommonAttentionMetadata, wrapped: CommonAttentionMetadata) -> Mapping[str, Any]:
    """Keep one token less of the first request than generates."""
    starts = wrapped.query_start_loc_cpu.clone()
    starts[1:] -= 1
    num_tokens = wrapped.num_actual_tokens - 1
    return {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "num_actual_tokens": num_tokens,
        "num_generating": num_tokens,
        "generating_indices": wrapped.generating_indices.clamp(max=num_tokens - 1),
        "generating_indices_cpu": wrapped.generating_indices_cpu.clamp(max=num_tokens - 1),
    }


def of_the_second_instead(metadata: CommonAttentionMetadata, wrapped: CommonAttentionMetadata) -> Mapping[str, Any]:
    """Keep one token less of the first request than generates, and one more of the second."""
    starts = wrapped.query_start_loc_cpu.clone()
    starts[1] -= 1
    return {"query_start_loc": starts, "query_start_loc_cpu": starts, "max_query_len": 3}


def first_tokens(metadata: CommonAttentionMetadata, wrapped: CommonAttentionMetadata) -> Mapping[str, Any]:
    """Let the kept tokens lie where the new tokens of their requests begin."""
    lens = wrapped.seq_lens - metadata.query_start_loc_cpu.diff() + wrapped.query_start_loc_cpu.diff()
    return {"seq_lens": lens, "seq_lens_cpu": lens}


def counts_in_place(metadata: CommonAttentionMetadata, wrapped: CommonAttentionMetadata) -> Mapping[str, Any]:
    metadata.seq_lens_cpu.clamp_(max=3)
    return {}


def dropping(change: Change) -> MetadataWrapper:
    """Return a wrapper that keeps the generating tokens, with a change of its output in any field."""
    right = DecodeOnly()

    def call(self: Any, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        wrapped = right(metadata)
        return attrs.evolve(wrapped, **change(metadata, wrapped))

    members = {"__call__": call, "fields": RESETS_ALL}
    wrapper: MetadataWrapper = attrs.frozen(kw_only=True)(type("Wrong", (DecodeOnly,), members))()
    return wrapper


def case_after(wrapper: MetadataWrapper, num_padding: int = 0, **options: Any) -> Case:
    requests = (Request(9, 1), Request(0, 7), Request(8, 6, 0), Request(11, 3, 3))
    shared = share_cache(make_layer(CAPABILITIES, block_size=4, **options))
    return Case(name="step", layer=shared, requests=requests, num_padding=num_padding, wrappers=(wrapper,))


@pytest.mark.parametrize(
    ("wrapper", "message"),
    [
        (TooLong(), "wrong, the first at position 9 of request 0"),
        (TooShort(), "wrong, the first at position 9 of request 0"),
        (after(ChunkedLocal, lambda *_: {"extensions": {}}, fields=ChunkedLocal.fields), "wrong"),
        (after(ChunkedLocal, lambda metadata, wrapped: {"block_table": other_blocks(metadata, wrapped, 0)}), "wrong"),
        (
            dropping(fewer_of_the_first),
            "the chain keeps 4 tokens, 5 with padding, of 17, of which 5 generate",
        ),
        (
            dropping(of_the_second_instead),
            "wrong, the first at position 9 of request 0",
        ),
        (
            dropping(first_tokens),
            "1 of 5 queries are wrong, the first at position 6 of request 1",
        ),
        (
            dropping(lambda _, wrapped: {"slot_mapping": wrapped.slot_mapping[:5], "max_query_len": 3}),
            "the chain keeps 5 tokens, 5 with padding, of 17, of which 5 generate",
        ),
        (dropping(counts_in_place), "a wrapper wrote to the batch metadata"),
    ],
)
def test_attention_says_what_a_wrong_wrapper_got_wrong(wrapper: MetadataWrapper, message: str) -> None:
    options = {"chunk": 6} if isinstance(wrapper, ChunkedLocal) else {}
    case = case_after(wrapper, num_padding=2 if "5 tokens, 5 with padding" in message else 0, **options)
    with pytest.raises(ConformanceError, match=f"^TorchReferenceBackend on step: .*{message}"):
        check_backend(TorchReferenceBackend, case)


class IgnoresSeqStarts(TorchReferenceBackend):
    def attend(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, **options: Any
    ) -> torch.Tensor:
        plain = attrs.evolve(metadata, extensions=NO_EXTENSIONS)
        return super().attend(layer, query, kv_cache, plain, **options)


def failures(backend: type[AttentionBackend], cases: list[Case]) -> set[str]:
    failed = set()
    for case in cases:
        try:
            check_backend(backend, case)
        except ConformanceError:
            failed.add(case.name)
    return failed


def test_a_backend_that_ignores_hidden_starts_fails_alone_and_after_a_chain() -> None:
    alone = [case for case in make_cases(CAPABILITIES) if case.name == "full-block=16-hidden_starts"]
    wrapped = [case for case in chain_cases() if case.name == "chunked_local-chunk=6-block=16-mixed"]
    assert {case.name for case in alone + wrapped} == failures(IgnoresSeqStarts, alone + wrapped)
    assert len(alone + wrapped) == 2


def test_a_layer_that_shares_a_cache_reads_the_owners() -> None:
    class Recorder(TorchReferenceBackend):
        def write_kv(self, *args: Any) -> None:
            writers.append(self.layers[0])
            super().write_kv(*args)

        def attend(self, layer: LayerSpec, *args: Any, **options: Any) -> torch.Tensor:
            readers.append(layer)
            return super().attend(layer, *args, **options)

    writers: list[LayerSpec] = []
    readers: list[LayerSpec] = []
    check_backend(Recorder, case_after(DecodeOnly()))
    assert {"owner": None} == {layer.name: layer.shares_with for layer in writers}
    assert {"layer": "owner"} == {layer.name: layer.shares_with for layer in readers}


@pytest.mark.parametrize("options", [{}, {"chunk": 6}, {"stride": 5}, {"window": 4, "num_sink_tokens": 2}])
def test_the_grids_specs_keep_the_laws(options: dict[str, Any]) -> None:
    check_spec(GridSpec(block_size=4, num_kv_heads=1, head_size=8, **options))


def test_a_stride_shows_its_run_and_the_last_token_of_each_run_before() -> None:
    spec = GridSpec(block_size=4, num_kv_heads=1, head_size=8, stride=3)
    assert ((2, 3), (5, 6), (6, 8)) == spec.live_ranges(8)
