"""Attention to each half of a request's keys, merged, equals attention to all of them, for any backend with the LSE.

The halves are a wrapper's, so the backends run unchanged.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from kvframe_cpu.backend import CpuBackend
from kvframe_decode_only.wrapper import DecodeOnly
from kvframe_numba.backend import NumbaBackend
from kvframe_torch.backend import TorchBackend

from kvframe.builtin.torch_reference import TorchReferenceBackend
from kvframe.contract import AttentionBackend, WrapperError
from kvframe.testing.case import Case
from kvframe.testing.conformance import check_backend
from kvframe.testing.framework import check_order
from kvframe.testing.grid import chain_refusals, make_cases
from kvframe.testing.laws import ConformanceError
from kvframe.testing.sample import sample
from kvframe.testing.wrappers import check_wrapper
from tests.attention.key_halves import KeyHalves
from tests.covering import keep

BACKENDS: tuple[type[AttentionBackend], ...] = (TorchReferenceBackend, TorchBackend, NumbaBackend, CpuBackend)
CHAIN = (KeyHalves(),)
TOGETHER = (("batch", "visible"), ("format", "dtype"))
"""Traits whose pairs occur: halves depend on what is visible in a batch, and their rounding on what is stored."""


def halved_cases(backend: type[AttentionBackend]) -> list[Case]:
    """Return the grid's cases whose keys can be divided, with the wrapper."""
    return [
        attrs.evolve(case, wrappers=CHAIN)
        for case in make_cases(backend.capabilities)
        if not case.num_padding
        and not any(request.num_hidden or request.ranges for request in case.requests)
        and any(request.seq_len for request in case.requests)
        and not chain_refusals(CHAIN, case.layer, backend.capabilities, "cpu")
    ]


# Numba takes ten seconds to compile its kernel with a log-sum-exp, which its own tests check.
@pytest.mark.parametrize("backend", keep(BACKENDS, TorchBackend, CpuBackend))
def test_two_halves_merged_are_the_whole(backend: type[AttentionBackend]) -> None:
    cases = halved_cases(backend)
    names = {name for case in cases for name in case.name.split("-")}
    assert {"full", "window=5", "bidirectional", "decode", "prefill", "mixed", "cross_mixed"} <= names
    assert {"bfloat16", "soft_cap", "learned_sinks", "fp8_token_head"} <= names
    assert ("chunk" in backend.capabilities.masks) == ("chunk=6" in names)
    for case in sample(cases, TOGETHER):
        check_backend(backend, case)


@pytest.mark.whole
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_halves_of_every_sampled_case_merged_are_the_whole(backend: type[AttentionBackend]) -> None:
    for case in sample(halved_cases(backend)):
        check_backend(backend, case)


def test_the_halves_are_two_calls_of_the_backend_without_its_other_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the merge, or with one half, the same cases fail."""
    case = next(case for case in halved_cases(TorchReferenceBackend) if case.name == "full-block=16-uneven")
    calls: list[Any] = []

    class Counting(TorchReferenceBackend):
        def forward_with_lse(self, layer: Any, query: Any, kv_cache: Any, metadata: Any, sinks: Any) -> Any:
            calls.append(metadata.seq_lens_cpu.tolist())
            return super().forward_with_lse(layer, query, kv_cache, metadata, sinks)

    check_backend(Counting, case)
    assert 4 == len(calls)
    first, second = calls[:2]
    assert [request.seq_len for request in case.requests][-1] == first[-1] + second[-1]
    monkeypatch.setattr("kvframe.attention.key_parts.merge_attention", lambda outputs, lses: (outputs[0], lses[0]))
    with pytest.raises(ConformanceError, match="queries are wrong"):
        check_backend(TorchReferenceBackend, case)
    monkeypatch.setattr(
        "kvframe.attention.key_parts.merge_attention", lambda outputs, lses: (sum(outputs) / 2, sum(lses) / 2)
    )
    with pytest.raises(ConformanceError, match="queries are wrong"):
        check_backend(TorchReferenceBackend, case)


# --- wrong parts ------------------------------------------------------------------------------------------------------


class OnePart(KeyHalves):
    def parts(self, metadata: Any) -> Any:
        return super().parts(metadata)[:1]


class NotMetadata(KeyHalves):
    def parts(self, metadata: Any) -> Any:
        return metadata, None


class FewerTokens(KeyHalves):
    def parts(self, metadata: Any) -> Any:
        return metadata, attrs.evolve(metadata, slot_mapping=metadata.slot_mapping.clone())


class WrongLengths(KeyHalves):
    def parts(self, metadata: Any) -> Any:
        first, second = super().parts(metadata)
        return first, attrs.evolve(second, seq_lens=second.seq_lens + 1)


class NoTable(KeyHalves):
    def parts(self, metadata: Any) -> Any:
        first, second = super().parts(metadata)
        return first, attrs.evolve(second, block_table=second.block_table[:1])


class Raises(KeyHalves):
    def parts(self, metadata: Any) -> Any:
        raise ZeroDivisionError("halves")


@pytest.mark.parametrize(
    ("wrapper", "code", "message"),
    [
        (OnePart, "wrong_parts", "returns 1 parts, and declares 2"),
        (NotMetadata, "wrong_shape", "returns 'NoneType', not metadata"),
        (FewerTokens, "wrong_parts", "gives a part with other tokens"),
        (WrongLengths, "wrong_value", "seq_lens is not what seq_lens_cpu says"),
        (NoTable, "wrong_shape", "block_table has the shape"),
        (Raises, "failed", "failed: ZeroDivisionError: halves"),
    ],
)
def test_a_wrong_division_is_refused_by_code(wrapper: type[KeyHalves], code: str, message: str) -> None:
    case = next(case for case in halved_cases(TorchReferenceBackend) if case.name == "full-block=16-uneven")
    with pytest.raises(WrapperError, match=message) as raised:
        check_backend(TorchReferenceBackend, attrs.evolve(case, wrappers=(wrapper(),)))
    assert code == raised.value.code


class LosesKeys(KeyHalves):
    def parts(self, metadata: Any) -> Any:
        first, _ = super().parts(metadata)
        return first, first


def test_the_kit_holds_a_wrapper_to_each_key_in_one_part() -> None:
    layers = {case.name: case.layer for case in halved_cases(TorchReferenceBackend)}
    for name in ("full-block=16-decode", "window=5-block=16-decode", "chunk=6-block=1-decode"):
        check_wrapper(KeyHalves(), layers[name])
    with pytest.raises(ConformanceError, match=r"token \d+ of the batch attends to the slot \d+ in [02] parts"):
        check_wrapper(LosesKeys(), layers["full-block=16-decode"])


def test_only_the_last_wrapper_of_a_chain_divides_keys() -> None:
    with pytest.raises(WrapperError, match="'key_halves' divides keys, and cannot come before 'decode_only'"):
        check_order([KeyHalves, DecodeOnly])
    check_order([DecodeOnly, KeyHalves])


def test_a_backend_without_the_log_sum_exp_is_refused_by_code() -> None:
    layer = halved_cases(TorchBackend)[0].layer
    silent = attrs.evolve(TorchBackend.capabilities, returns_lse=False)
    assert ["lse"] == [refusal.code for refusal in chain_refusals(CHAIN, layer, silent, "cpu")]
    assert [] == chain_refusals((), layer, silent, "cpu")
