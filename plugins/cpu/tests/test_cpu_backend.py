"""The backend computes the kit's grid, and another backend is chosen if its kernels cannot be built."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kvframe_cpu.backend import CpuBackend
from kvframe_cpu.chosen import as_pages
from kvframe_kernels.cpu import build
from kvframe_testing.case import Request
from kvframe_testing.conformance import check_backend
from kvframe_testing.framework import select_backends
from kvframe_testing.grid import make_cases
from kvframe_testing.laws import ConformanceError
from kvframe_testing.metadata import make_metadata, on_device
from kvframe_testing.suites import BackendTests

from kvframe import FullAttentionSpec, Stack, load_plugins
from kvframe.contract import BackendError, ChosenPlaces, LayerSpec, QuerySpec

CASES = make_cases(CpuBackend.capabilities)


class TestCpu(BackendTests):
    backend = "cpu"
    writes_out = True


@pytest.mark.parametrize(
    "batch", ["mixed", "decode", *(pytest.param(batch, marks=pytest.mark.whole) for batch in ("uneven", "extend"))]
)
def test_finite_values_where_nothing_is_live_change_nothing(batch: str) -> None:
    cases = [
        case for case in CASES if case.name.endswith(f"block=17-{batch}") or case.name == f"full-everything-{batch}"
    ]
    assert 9 < len(cases)
    for case in cases:
        check_backend(CpuBackend, case, poison=1e4)


def test_threads_change_nothing() -> None:
    torch.set_num_threads(2)
    for case in CASES:
        if case.name in ("full-block=16-uneven", "window=5-sink_tokens=3-block=16-mixed", "full-bfloat16-extend"):
            check_backend(CpuBackend, case)
    torch.set_num_threads(1)


class _WithoutCap(CpuBackend):
    def __init__(self, layers: Any, device: Any) -> None:
        super().__init__(layers, device)
        self._scoring = type(self._scoring)(scale=self._scoring.scale)


def test_the_grid_sees_mistakes() -> None:
    (case,) = (case for case in CASES if case.name == "full-soft_cap-mixed")
    with pytest.raises(ConformanceError, match="queries are wrong"):
        check_backend(_WithoutCap, case)


# --- choosing it ------------------------------------------------------------------------------------------------------


def layer(**options: Any) -> LayerSpec:
    spec = FullAttentionSpec(**{"block_size": 16, "num_kv_heads": 2, "head_size": 16, **options})
    return LayerSpec(name="layer", spec=spec, query=QuerySpec(num_heads=4, head_size=16, scale=0.25))


@pytest.fixture
def _without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    build._try_to_load.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    yield
    build._try_to_load.cache_clear()


def test_it_is_chosen_on_a_cpu_for_what_it_computes() -> None:
    registry = load_plugins().registry
    backends = [
        select_backends([layer(dtype=dtype)], Stack(), registry, "cpu")[0].backend for dtype in ("bfloat16", "float64")
    ]
    assert ["kvframe-cpu:cpu", "kvframe-torch:torch"] == backends


@pytest.mark.usefixtures("_without_a_compiler")
def test_without_a_compiler_the_next_one_is_chosen_and_the_reason_is_kept() -> None:
    (choice,) = select_backends([layer()], Stack(), load_plugins().registry, "cpu")
    assert "kvframe-cpu:cpu" != choice.backend
    (passed_over,) = (candidate for candidate in choice.candidates if candidate.name == "kvframe-cpu:cpu")
    expected = "there is no C++ compiler to build its kernels with (c++, g++, clang++)"
    assert expected == choice.why_not(passed_over)


@pytest.mark.usefixtures("_without_a_compiler")
def test_without_a_compiler_a_stack_that_names_it_is_refused() -> None:
    stack = Stack.from_mapping({"rules": [{"layers": "*", "backend": "cpu"}]})
    with pytest.raises(BackendError, match=r"backend 'cpu', which cannot serve it: .*no C.. compiler"):
        select_backends([layer()], stack, load_plugins().registry, "cpu")


# --- its metadata -----------------------------------------------------------------------------------------------------


def test_building_never_waits_for_the_device() -> None:
    builder = CpuBackend([layer()], torch.device("cpu")).make_builder()
    built = builder.build(on_device(make_metadata([Request(40, 1), Request(0, 19), Request(4, 0, 0)], 16)))
    assert 3 == len(built.seq_lens)


def test_what_is_built_are_the_tensors_of_the_step() -> None:
    metadata = make_metadata([Request(40, 1), Request(0, 19)], 16)
    built = CpuBackend([layer()], torch.device("cpu")).make_builder().build(metadata)
    assert built.block_table is metadata.block_table
    assert built.seq_lens is metadata.seq_lens
    assert built.query_start_loc is metadata.query_start_loc


# --- chosen tokens ----------------------------------------------------------------------------------------------------


def test_chosen_tokens_are_copied_if_32_bits_do_not_number_them() -> None:
    # Memory that is not written takes address space only.
    keys = torch.empty(2**27 + 1, 16, 1, 1, dtype=torch.int8)
    keys[-1, -1] = 7
    places = ChosenPlaces(*(torch.full((1, 1, 1), last) for last in (2**27, 15, True)))
    pages, batch = as_pages({"k": keys, "v": keys}, places)
    assert 7 == pages["k"][batch.block_table[0, 0]]
