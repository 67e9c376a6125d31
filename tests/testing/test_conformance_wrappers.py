"""The conformance kit after wrapper chains: plain wrappers pass, and each bug is found."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import attrs
import pytest
import torch

from kvframe.builtin.torch_reference import TorchReferenceBackend
from kvframe.contract.backend import AttentionBackend, KVCache
from kvframe.contract.capture import GraphCapture
from kvframe.contract.errors import WrapperError
from kvframe.contract.metadata import NO_EXTENSIONS, SEQ_STARTS, Axis, CommonAttentionMetadata, Extension
from kvframe.contract.specs import LayerSpec
from kvframe.contract.wrapper import CHANGES_MASK, DROPS_TOKENS, VIRTUAL_REQUESTS, FieldUse, MetadataWrapper
from kvframe.testing.case import Case, Request
from kvframe.testing.conformance import check_backend
from kvframe.testing.grid import chain_refusals, make_cases, make_layer, share_cache
from kvframe.testing.laws import ConformanceError, check_spec
from kvframe.testing.sample import sample
from kvframe.testing.state import GridSpec

FIELDS: Mapping[str, FieldUse] = {
    **{field.name: FieldUse.RESET for field in attrs.fields(CommonAttentionMetadata) if field.name != "extensions"},
    "causal": FieldUse.CARRY,
}


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@attrs.frozen
class KeepGenerating(MetadataWrapper):
    """Keeps the generating tokens, counted request by request."""

    name: ClassVar[str] = "keep_generating"
    fields: ClassVar[Mapping[str, FieldUse]] = FIELDS
    effects: ClassVar[frozenset[str]] = frozenset({DROPS_TOKENS})
    not_after: ClassVar[frozenset[str]] = frozenset({VIRTUAL_REQUESTS})
    capture: ClassVar[GraphCapture] = GraphCapture.ALWAYS

    def for_layer(self, layer: LayerSpec) -> Self:
        if layer.shares_with is None:
            raise WrapperError("the layer keeps a cache", code="keeps_cache")
        return self

    def counts(self, metadata: CommonAttentionMetadata) -> list[int]:
        """The number of generating tokens of each request."""
        starts = metadata.query_start_loc_cpu.tolist()
        kept = metadata.generating_indices_cpu[: metadata.num_generating].tolist()
        return [sum(start <= row < stop for row in kept) for start, stop in itertools.pairwise(starts)]

    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        if metadata.all_generate:
            return metadata
        counts = self.counts(metadata)
        starts = ints([sum(counts[:request]) for request in range(len(counts) + 1)])
        generating = torch.arange(len(metadata.generating_indices)).clamp_(max=max(0, sum(counts) - 1))
        return attrs.evolve(
            metadata,
            generating_indices=generating,
            generating_indices_cpu=generating,
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            num_actual_tokens=sum(counts),
            max_query_len=max(counts),
            slot_mapping=metadata.slot_mapping[metadata.generating_indices],
        )


@attrs.frozen
class CutChunks(MetadataWrapper):
    """Makes each chunk of a request a request of its own, chunk by chunk."""

    name: ClassVar[str] = "cut_chunks"
    fields: ClassVar[Mapping[str, FieldUse]] = {**FIELDS, "causal": FieldUse.REJECT}
    effects: ClassVar[frozenset[str]] = frozenset({VIRTUAL_REQUESTS})

    chunk: int = 0

    def for_layer(self, layer: LayerSpec) -> Self:
        assert layer.spec is not None
        if layer.spec.mask is None or layer.spec.mask.chunk is None:
            raise WrapperError("the layer has no chunks", code="no_chunk")
        return attrs.evolve(self, chunk=layer.spec.mask.chunk)

    def wrapped_layer(self, layer: LayerSpec) -> LayerSpec:
        assert layer.spec is not None
        return attrs.evolve(layer, spec=layer.spec.retain_all())

    def added_extensions(self, layer: LayerSpec) -> frozenset[str]:
        assert layer.spec is not None
        return frozenset({SEQ_STARTS}) if self.chunk % layer.spec.block_size else frozenset()

    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        size = metadata.block_size
        starts = metadata.query_start_loc_cpu.tolist()
        lens, ends, hidden, tables = [], [], [], []
        for request, seq_len in enumerate(metadata.seq_lens_cpu.tolist()):
            position = seq_len - (starts[request + 1] - starts[request])
            while position < seq_len:
                first = position - position % self.chunk
                stop = min(seq_len, first + self.chunk)
                block = first // size
                lens.append(stop - position)
                ends.append(stop - block * size)
                hidden.append(first - block * size)
                tables.append(metadata.block_table[request].roll(-block))
                position = stop
        padding = 1 if not lens else 0
        query_start_loc = ints([sum(lens[:row]) for row in range(len(lens) + 1)] + [0] * padding)
        seq_lens, seq_starts = ints(ends + [0] * padding), ints(hidden + [0] * padding)
        return attrs.evolve(
            metadata,
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc,
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens,
            num_reqs=len(seq_lens),
            max_query_len=max(lens, default=0),
            max_seq_len=max(ends, default=0),
            block_table=torch.stack(tables) if tables else metadata.block_table[:1],
            extensions={SEQ_STARTS: Extension(seq_starts, Axis.REQUEST, seq_starts)} if any(hidden) else NO_EXTENSIONS,
        )


CHAINS = ((KeepGenerating(),), (CutChunks(),), (KeepGenerating(), CutChunks()))
CAPABILITIES = TorchReferenceBackend.capabilities


def chain_cases() -> list[Case]:
    return [case for case in make_cases(CAPABILITIES, chains=CHAINS) if case.wrappers]


TOGETHER = [("wrappers", name) for name in ("batch", "format", "is_padded", "mask", "causal", "block_size")]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in sample(chain_cases(), TOGETHER)])
def test_plain_wrappers_compute_what_the_layers_mask_says(case: Case) -> None:
    check_backend(TorchReferenceBackend, case)


@pytest.mark.whole
def test_plain_wrappers_compute_the_whole_grid() -> None:
    for case in chain_cases():
        check_backend(TorchReferenceBackend, case)


# --- the cases --------------------------------------------------------------------------------------------------------


def test_chains_are_crossed_with_the_layers_that_they_serve() -> None:
    found = {(case.name.split("-")[0], "-shared" in case.name) for case in chain_cases()}
    assert {
        ("keep_generating", True),
        ("cut_chunks", False),
        ("cut_chunks", True),
        ("keep_generating+cut_chunks", True),
    } == found


def test_a_chain_that_rejects_batches_that_are_not_causal_is_not_given_any() -> None:
    assert {"keep_generating"} == {case.name.split("-")[0] for case in chain_cases() if not case.causal}


def test_padding_is_given_to_chains_that_can_always_be_captured() -> None:
    assert {"keep_generating"} == {case.name.split("-")[0] for case in chain_cases() if case.num_padding}


@pytest.mark.parametrize(
    ("code", "chain", "shared", "chunk"),
    [
        ("keeps_cache", (KeepGenerating(),), False, None),
        ("no_chunk", (CutChunks(),), True, None),
        ("chain_order", (CutChunks(), KeepGenerating()), True, 8),
        ("extension_seq_starts", (CutChunks(),), False, 7),
    ],
)
def test_what_does_not_compose_is_refused_by_code(
    code: str, chain: tuple[MetadataWrapper, ...], shared: bool, chunk: int | None
) -> None:
    capabilities = attrs.evolve(CAPABILITIES, extensions=frozenset())
    layer = make_layer(capabilities, block_size=4, chunk=chunk)
    refused = chain_refusals(chain, share_cache(layer) if shared else layer, capabilities, "cpu")
    assert [code] == [refusal.code for refusal in refused]


# --- the kit finds bugs -----------------------------------------------------------------------------------------------


class ChunkTooLong(CutChunks):
    def for_layer(self, layer: LayerSpec) -> Self:
        bound = super().for_layer(layer)
        return attrs.evolve(bound, chunk=bound.chunk + 1)


class ChunkTooShort(CutChunks):
    def for_layer(self, layer: LayerSpec) -> Self:
        bound = super().for_layer(layer)
        return attrs.evolve(bound, chunk=bound.chunk - 1)


class HidesNothing(CutChunks):
    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        return attrs.evolve(super().__call__(metadata), extensions=NO_EXTENSIONS)


class PagesOfTheRequest(CutChunks):
    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        wrapped = super().__call__(metadata)
        return attrs.evolve(wrapped, block_table=metadata.block_table[:1].expand(wrapped.num_reqs, -1))


class KeepsOneTooFew(KeepGenerating):
    def counts(self, metadata: CommonAttentionMetadata) -> list[int]:
        first, *rest = super().counts(metadata)
        return [first - 1, *rest]

    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        wrapped = super().__call__(metadata)
        return attrs.evolve(wrapped, num_generating=wrapped.num_actual_tokens)


class KeepsAnothersToken(KeepGenerating):
    def counts(self, metadata: CommonAttentionMetadata) -> list[int]:
        first, second, *rest = super().counts(metadata)
        return [first - 1, second + 1, *rest]


class KeepsTheFirstTokens(KeepGenerating):
    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        wrapped = super().__call__(metadata)
        late = metadata.query_start_loc_cpu.diff() - wrapped.query_start_loc_cpu.diff()
        return attrs.evolve(wrapped, seq_lens=wrapped.seq_lens - late, seq_lens_cpu=wrapped.seq_lens_cpu - late)


class ForgetsPadding(KeepGenerating):
    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        wrapped = super().__call__(metadata)
        return attrs.evolve(wrapped, slot_mapping=wrapped.slot_mapping[: metadata.num_generating])


class CountsInPlace(KeepGenerating):
    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        metadata.seq_lens_cpu.clamp_(max=3)
        return super().__call__(metadata)


STEP = (Request(9, 1), Request(0, 7), Request(8, 6, 0), Request(11, 3, 3))


def case_after(wrapper: MetadataWrapper, num_padding: int = 0, **options: Any) -> Case:
    layer = share_cache(make_layer(CAPABILITIES, block_size=4, **options))
    return Case(name="step", layer=layer, requests=STEP, num_padding=num_padding, wrappers=(wrapper,))


@pytest.mark.parametrize(
    ("wrapper", "message"),
    [
        (ChunkTooLong(), "wrong, the first at position 9 of request 0"),
        (ChunkTooShort(), "wrong, the first at position 9 of request 0"),
        (HidesNothing(), "wrong"),
        (PagesOfTheRequest(), "wrong"),
        (KeepsOneTooFew(), "the chain keeps 4 tokens, 5 with padding, of 17, of which 5 generate"),
        (KeepsAnothersToken(), "wrong, the first at position 9 of request 0"),
        (KeepsTheFirstTokens(), "1 of 5 queries are wrong, the first at position 6 of request 1"),
        (ForgetsPadding(), "the chain keeps 5 tokens, 5 with padding, of 17, of which 5 generate"),
        (CountsInPlace(), "a wrapper wrote to the batch metadata"),
    ],
)
def test_the_kit_says_what_a_wrong_wrapper_got_wrong(wrapper: MetadataWrapper, message: str) -> None:
    options = {"chunk": 6} if isinstance(wrapper, CutChunks) else {}
    case = case_after(wrapper, num_padding=2 if isinstance(wrapper, ForgetsPadding) else 0, **options)
    with pytest.raises(ConformanceError, match=f"^TorchReferenceBackend on step: .*{message}"):
        check_backend(TorchReferenceBackend, case)


class Narrows(MetadataWrapper):
    """Gives a layer of full attention a window."""

    name: ClassVar[str] = "narrows"
    fields: ClassVar[Mapping[str, FieldUse]] = dict.fromkeys(FIELDS, FieldUse.CARRY)
    effects: ClassVar[frozenset[str]] = frozenset({CHANGES_MASK})

    def wrapped_layer(self, layer: LayerSpec) -> LayerSpec:
        assert layer.spec is not None
        return attrs.evolve(layer, spec=attrs.evolve(layer.spec, window=4))  # type: ignore[call-arg]

    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        return metadata


class NarrowsInSilence(Narrows):
    effects = frozenset()


def test_after_a_wrapper_that_changes_the_mask_the_mask_that_it_declares_is_computed() -> None:
    check_backend(TorchReferenceBackend, case_after(Narrows()))
    with pytest.raises(ConformanceError, match="wrong, the first at position 9 of request 0"):
        check_backend(TorchReferenceBackend, case_after(NarrowsInSilence()))


class IgnoresSeqStarts(TorchReferenceBackend):
    def attend(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, **named: Any
    ) -> torch.Tensor:
        plain = attrs.evolve(metadata, extensions=NO_EXTENSIONS)
        return super().attend(layer, query, kv_cache, plain, **named)


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
    wrapped = [case for case in chain_cases() if case.name == "cut_chunks-chunk=6-block=16-mixed"]
    assert {case.name for case in alone + wrapped} == failures(IgnoresSeqStarts, alone + wrapped)
    assert len(alone + wrapped) == 2


def test_a_layer_that_shares_a_cache_reads_the_owners() -> None:
    class Recorder(TorchReferenceBackend):
        def write_kv(self, *args: Any) -> None:
            writers.append(self.layers[0])
            super().write_kv(*args)

        def attend(self, layer: LayerSpec, *args: Any, **named: Any) -> torch.Tensor:
            readers.append(layer)
            return super().attend(layer, *args, **named)

    writers: list[LayerSpec] = []
    readers: list[LayerSpec] = []
    check_backend(Recorder, case_after(KeepGenerating()))
    assert {"owner": None} == {layer.name: layer.shares_with for layer in writers}
    assert {"layer": "owner"} == {layer.name: layer.shares_with for layer in readers}


@pytest.mark.parametrize("options", [{}, {"chunk": 6}, {"stride": 5}, {"window": 4, "num_sink_tokens": 2}])
def test_the_grids_specs_keep_the_laws(options: dict[str, Any]) -> None:
    check_spec(GridSpec(block_size=4, num_kv_heads=1, head_size=8, **options))


def test_a_stride_shows_its_run_and_the_last_token_of_each_run_before() -> None:
    spec = GridSpec(block_size=4, num_kv_heads=1, head_size=8, stride=3)
    assert ((2, 3), (5, 6), (6, 8)) == spec.live_ranges(8)
