"""Backends in the memory and the step of another host, and backends that only work in kvframe's engine."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from kvframe_testing.case import Case
from kvframe_testing.conformance import check_backend
from kvframe_testing.grid import make_cases
from kvframe_testing.hosts import LAYOUTS, OtherHost, in_other_hosts
from kvframe_testing.laws import ConformanceError
from kvframe_torch.backend import TorchBackend

from kvframe.builtin.torch_reference import TorchReferenceBackend
from kvframe.contract import (
    PLAIN,
    SEQ_STARTS,
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    Slots,
)
from tests.testing.lse_backends import LseBackend
from tests.testing.plain_backend import PlainBackend, PlainBuilder

CASES = make_cases(PlainBackend.capabilities)


def case_of(name: str) -> Case:
    (case,) = (case for case in CASES if case.name == name)
    return case


@pytest.mark.parametrize("backend", [TorchBackend, TorchReferenceBackend, PlainBackend])
def test_a_backend_serves_another_host(backend: type[AttentionBackend]) -> None:
    pairs = [*in_other_hosts(make_cases(backend.capabilities))]
    assert len(LAYOUTS) < len(pairs)
    for case, host in pairs:
        check_backend(backend, case, host=host)
    # The reference returns a tensor of its own, which a host has to copy.
    num_copied = sum(host.num_copies for _, host in pairs)
    assert (num_copied > 0) == (backend is not TorchBackend)


def test_each_layout_occurs_with_keys_and_values_in_the_plain_format() -> None:
    for cases in (CASES, CASES[:1]):
        pairs = [*in_other_hosts(cases)]
        assert {*LAYOUTS} == {host.layout for case, host in pairs if case.spec.kv_format == PLAIN}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_serves_every_layout(layout: str) -> None:
    check_backend(PlainBackend, case_of("full-block=16-mixed"), host=OtherHost(layout))


# --- backends that only work in kvframe's engine ----------------------------------------------------------------------


class ReadsHostCopies(PlainBackend):
    def lengths(self, common: CommonAttentionMetadata) -> tuple[list[int], list[int]]:
        return common.query_start_loc_cpu.tolist(), common.seq_lens_cpu.tolist()


class WritesNegativeSlots(PlainBackend):
    """As if a negative slot were one: it is that of the last token of the last page."""

    def write_kv(self, key: Any, value: Any, kv_cache: Any, slots: Slots) -> None:
        blocks, offsets = slots.flat // slots.block_size, slots.flat % slots.block_size
        super().write_kv(key, value, kv_cache, Slots(slots.flat, slots.block_size, (blocks, offsets)))


class StopsAtANegativeSlot(PlainBackend):
    """As if all tokens after a skipped one were padding."""

    def write_kv(self, key: Any, value: Any, kv_cache: Any, slots: Slots) -> None:
        is_written = (slots.flat >= 0).cummin(0).values
        super().write_kv(key, value, kv_cache, Slots(torch.where(is_written, slots.flat, -1), slots.block_size))


class TakesDenseKeys(PlainBackend):
    def write_kv(self, key: Any, value: Any, kv_cache: Any, slots: Slots) -> None:
        dense = key.as_strided(key.shape, torch.empty(key.shape).stride())
        super().write_kv(dense, value, kv_cache, slots)


class TakesDenseValues(PlainBackend):
    def write_kv(self, key: Any, value: Any, kv_cache: Any, slots: Slots) -> None:
        dense = value.as_strided(value.shape, torch.empty(value.shape).stride())
        super().write_kv(key, dense, kv_cache, slots)


class TakesTheLastEntryForTheLastBlock(PlainBackend):
    def read(self, layer: Any, kv_cache: Any, built: Any, request: int, tokens: torch.Tensor) -> Any:
        size, last = built.common.block_size, int(built.block_table[request].nonzero()[-1])
        moved = torch.where(tokens // size == tokens[-1] // size, last * size + tokens % size, tokens)
        return super().read(layer, kv_cache, built, request, moved)


class TakesDenseRows(PlainBackend):
    def attend(self, layer: Any, query: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        return super().attend(layer, query.as_strided(query.shape, torch.empty(query.shape).stride()), *rest, **options)


class TakesDensePages(PlainBackend):
    """As if tokens followed one another without gaps within a page, as they do in kvframe's pool."""

    def read(self, layer: Any, kv_cache: Any, *rest: Any) -> Any:
        dense = {
            name: tensor.as_strided(tensor.shape, (tensor.stride(0), *torch.empty(tensor.shape[1:]).stride()))
            for name, tensor in kv_cache.items()
        }
        return super().read(layer, dense, *rest)


class FindsValuesAfterKeys(PlainBackend):
    """As if the values of a page followed its keys, as they do in kvframe's pool."""

    def read(self, layer: Any, kv_cache: Any, *rest: Any) -> Any:
        key, value = kv_cache["k"], kv_cache["v"]
        start = key.storage_offset() + -(-key[0].numel() // 16) * 16
        after = key.as_strided(value.shape, (key.stride(0), *value.stride()[1:]), start)
        return super().read(layer, {"k": key, "v": after}, *rest)


class WritesBesideTheOutput(PlainBackend):
    def attend(self, *arguments: Any, out: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        output = super().attend(*arguments, **options)
        if out is not None:
            out.as_strided((out.numel() + 1,), (1,), out.storage_offset())[-1] = 0
        return output


class ReturnsTheOutputEmpty(PlainBackend):
    def attend(self, *arguments: Any, out: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        output = super().attend(*arguments, **options)
        return output if out is None else out


class TakesBoundsForLengths(PlainBackend):
    def make_builder(self) -> AttentionMetadataBuilder:
        return KeepsLengths()


class KeepsLengths(PlainBuilder):
    """Says that bounds are enough, and then takes them for the lengths."""

    needs_exact_lens = False

    def build(self, metadata: CommonAttentionMetadata) -> Any:
        return super().build(attrs.evolve(metadata, seq_lens=metadata.seq_lens_cpu.clone()))


class KeepsHostCopiesOfStarts(PlainBackend):
    """Reads at each layer where a request's visible tokens start, from the host's copy."""

    def visible(self, layer: Any, common: CommonAttentionMetadata, *rest: Any) -> torch.Tensor:
        starts = common.extensions[SEQ_STARTS]
        extensions = {SEQ_STARTS: attrs.evolve(starts, values=starts.values_cpu)}
        return super().visible(layer, attrs.evolve(common, extensions=extensions), *rest)


class ReadsHostCopiesForTheLse(LseBackend):
    """Reads them for the log-sum-exp only."""

    def log_sums(self, layer: Any, query: Any, kv_cache: Any, metadata: Any, sinks: Any) -> Any:
        common = metadata.common
        starts, lens = common.query_start_loc_cpu, common.seq_lens_cpu
        if int(lens.max()) > common.max_seq_len:
            return torch.zeros(query.shape[:2])
        same_metadata = attrs.evolve(metadata, common=attrs.evolve(common, query_start_loc=starts, seq_lens=lens))
        return super().log_sums(layer, query, kv_cache, same_metadata, sinks)


@pytest.mark.parametrize(
    ("backend", "layout", "message"),
    [
        (ReadsHostCopies, "apart", "queries are wrong"),
        (ReadsHostCopiesForTheLse, "apart", "the log-sum-exp: .* queries are wrong"),
        (WritesNegativeSlots, "apart", "write_kv changes .* bytes beside its slots"),
        (StopsAtANegativeSlot, "apart", "queries are wrong"),
        (TakesDenseKeys, "apart", "queries are wrong"),
        (TakesDenseValues, "apart", "queries are wrong"),
        (FindsValuesAfterKeys, "apart", "queries are wrong"),
        (TakesTheLastEntryForTheLastBlock, "apart", "queries are wrong"),
        (TakesDenseRows, "apart", "queries are wrong"),
        (TakesDensePages, "head_major", "queries are wrong"),
        (TakesDensePages, "interleaved", "queries are wrong"),
        (TakesDensePages, "head_major_interleaved", "queries are wrong"),
        (WritesBesideTheOutput, "apart", "it wrote beside the output"),
        (ReturnsTheOutputEmpty, "apart", "queries are wrong"),
        (TakesBoundsForLengths, "apart", "queries are wrong"),
    ],
)
def test_another_host_shows_what_a_backend_takes_for_granted(
    backend: type[AttentionBackend], layout: str, message: str
) -> None:
    case = case_of("full-block=16-mixed-padded")
    check_backend(backend, case)
    with pytest.raises(ConformanceError, match=message):
        check_backend(backend, case, host=OtherHost(layout))


def test_another_host_overwrites_its_copies_of_extensions() -> None:
    case = case_of("full-block=16-hidden_starts")
    check_backend(KeepsHostCopiesOfStarts, case)
    with pytest.raises(ConformanceError, match="queries are wrong"):
        check_backend(KeepsHostCopiesOfStarts, case, host=OtherHost("apart"))
