"""The backend's arithmetic on a stand-in for the library, and the library itself on a GPU."""

from __future__ import annotations

import gc
import importlib
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
import torch
from kvframe_kernels.flash_reference import paged_attention
from kvframe_testing.case import Case, Request
from kvframe_testing.conformance import check_backend
from kvframe_testing.grid import make_cases, make_layer
from kvframe_testing.laws import ConformanceError
from kvframe_testing.metadata import make_metadata, on_device
from kvframe_testing.refusals import find_refusals, needs_copies
from kvframe_testing.staging import check_staging
from kvframe_testing.suites import BackendTests, chains_of

from kvframe import load_plugins
from kvframe.contract import RANGE_ENDS, AttentionBackend, Axis, Extension, LayerSpec

FORMATS = ("plain", "fp8_tensor", "int8_token_head")
"""Formats of the cases: a backend handles copies of pages in the same way for every format."""
CHAINS = chains_of(("decode_only",), ("chunked_local",), ("decode_only", "chunked_local"))


# --- a stand-in for FlashInfer 0.6.9 ----------------------------------------------------------------------------------


class Wrapper:
    """The common part of both wrappers."""

    instances: ClassVar[list[Wrapper]]

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert kv_layout == "NHD"
        assert float_workspace_buffer.nbytes == 128 << 20
        self.plans = 0
        self.instances.append(self)

    def remember(
        self,
        query_starts: torch.Tensor,
        starts: torch.Tensor,
        ids: torch.Tensor,
        last_page_lens: torch.Tensor,
        sizes: tuple[int, int, int, int],
        options: dict[str, Any],
    ) -> None:
        assert {torch.int32} == {tensor.dtype for tensor in (query_starts, starts, ids, last_page_lens)}
        counts, page_size = starts.diff(), sizes[3]
        assert len(ids) == starts[-1]
        assert bool(((last_page_lens > 0) == (counts > 0)).all())
        self.plans += 1
        self.query_starts, self.sizes, self.options = query_starts, sizes, options
        self.seq_lens = ((counts - 1) * page_size + last_page_lens).clamp(min=0).to(torch.int32)
        self.ids = ids
        if ids.is_meta:
            return
        self.table = torch.zeros(len(counts), max(1, int(counts.max())), dtype=torch.int32)
        for row, (start, stop) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
            self.table[row, : stop - start] = ids[start:stop]

    def attend(
        self, q: torch.Tensor, paged_kv_cache: Any, k_scale: float, v_scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = paged_kv_cache
        assert keys.stride() == values.stride()
        assert (q.shape[1], keys.shape[2], q.shape[2], keys.shape[1]) == self.sizes
        assert q.dtype == self.options["q_data_type"]
        assert keys.dtype == values.dtype == self.options["kv_data_type"]
        assert len(q) == self.query_starts[-1]
        if q.is_meta:
            return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        output, lse = paged_attention(
            q,
            keys,
            values,
            self.query_starts,
            self.seq_lens,
            self.table,
            scale=self.options["sm_scale"] * k_scale,
            causal=self.options["causal"],
            window=(self.options["window_left"], -1),
            soft_cap=self.options["logits_soft_cap"] or 0.0,
        )
        lse = lse.masked_fill(lse == float("inf"), -5e4)
        return output * v_scale, (lse / math.log(2)).T


def written(output: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Return the output in ``out``, which the library checks; in the kit's dtypes the backend always gives it."""
    assert out is not None
    assert (output.shape, output.dtype, output.device) == (out.shape, out.dtype, out.device)
    assert out.is_contiguous()
    return out.copy_(output)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    instances: ClassVar[list[Wrapper]] = []

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        self.backend = backend

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        max_token_per_sequence: int | None = None,
    ) -> None:
        assert max_token_per_sequence == int(qo_indptr.diff().max())
        options = {
            "causal": causal,
            "sm_scale": sm_scale,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
        }
        sizes = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        self.remember(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, sizes, options)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        output, lse = self.attend(q, paged_kv_cache, k_scale or 1.0, v_scale or 1.0)
        output = written(output, out)
        return (output, lse) if return_lse else output


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    instances: ClassVar[list[Wrapper]] = []

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_tensor_cores: bool = False
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
    ) -> None:
        options = {
            "causal": False,
            "sm_scale": sm_scale,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
        }
        rows = torch.arange(len(indptr), dtype=torch.int32)
        self.remember(rows, indptr, indices, last_page_len, (num_qo_heads, num_kv_heads, head_dim, page_size), options)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        output, lse = self.attend(q, paged_kv_cache, k_scale or 1.0, v_scale or 1.0)
        if not q.is_meta:
            output[self.seq_lens == 0] = float("nan")  # it divides by a denominator of zero
        output = written(output, out)
        return (output, lse) if return_lse else output


OWN_MODULES = ("backend", "builder")


@contextmanager
def installed(folder: Path) -> Iterator[ModuleType]:
    """Install the stand-in under the library's name, and yield it; the backend is imported anew."""
    modules = {name: ModuleType(name) for name in ("flashinfer", "flashinfer.jit", "flashinfer.jit.cpp_ext")}
    with pytest.MonkeyPatch.context() as patch:
        for wrapper in (BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper):
            patch.setattr(wrapper, "instances", [])
            setattr(modules["flashinfer"], wrapper.__name__, wrapper)
        env = ModuleType("flashinfer.jit.env")
        vars(env)["FLASHINFER_AOT_DIR"] = folder / "aot"
        vars(modules["flashinfer.jit"])["env"] = env
        vars(modules["flashinfer.jit.cpp_ext"])["get_cuda_path"] = lambda: str(folder)
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        for name in OWN_MODULES:
            patch.delitem(sys.modules, f"kvframe_flashinfer.{name}", raising=False)
        yield modules["flashinfer"]
        for name in OWN_MODULES:
            sys.modules.pop(f"kvframe_flashinfer.{name}", None)


@pytest.fixture
def library(tmp_path: Path) -> Iterator[ModuleType]:
    with installed(tmp_path) as module:
        yield module


def load() -> type[AttentionBackend]:
    backend_class: type[AttentionBackend] = importlib.import_module("kvframe_flashinfer.backend").FlashInferBackend
    return backend_class


# --- the grid ---------------------------------------------------------------------------------------------------------


with installed(Path()):

    @pytest.mark.usefixtures("library")
    class TestFlashInfer(BackendTests):
        backend = load()
        device = "cuda"
        runs_on = "cpu"
        chains = CHAINS
        together = (("batch", "visible"), ("batch", "causal"), ("has_sinks", "soft_cap"), ("wrappers", "batch"))
        writes_out = True

        def keeps(self, case: Case) -> bool:
            return case.spec.kv_format.name in FORMATS


@pytest.mark.gpu
class TestFlashInferOnAGpu(BackendTests):
    backend = "flashinfer"
    device = "cuda"
    always_whole = True
    chains = CHAINS
    writes_out = True

    def keeps(self, case: Case) -> bool:
        # Each size, dtype and feature needs another compiled kernel; those of one head size and dtype are enough here.
        is_compiled = case.query.head_size == 64 and case.query_dtype == torch.bfloat16
        return is_compiled and case.spec.kv_format.name in FORMATS


def cases(backend_class: type[AttentionBackend]) -> list[Case]:
    return [case for case in make_cases(backend_class.capabilities, "cuda") if case.spec.kv_format.name in FORMATS]


@pytest.mark.parametrize("missing", ["the cut", "the declaration"])
def test_the_grid_sees_mistakes(missing: str, library: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    backend_class = load()
    case = next(case for case in cases(backend_class) if case.name == "window=5-block=16-uneven")
    if missing == "the cut":
        builder = importlib.import_module("kvframe_flashinfer.builder")
        of = builder.PageLists.of
        monkeypatch.setattr(builder.PageLists, "of", lambda metadata, window: of(metadata, None))
    else:
        capabilities = attrs.evolve(backend_class.capabilities, reads_dead_tokens=False)
        monkeypatch.setattr(backend_class, "capabilities", capabilities)
    with pytest.raises(ConformanceError, match="NaN is state that is not live"):
        check_backend(backend_class, case)


def test_eight_bit_floats_are_read_where_they_lie_with_the_scales_of_their_format(library: ModuleType) -> None:
    backend_class = load()
    kv_format = load_plugins().registry.formats.load("fp8_tensor")(k_scale=0.5, v_scale=2.0)
    layer = make_layer(backend_class.capabilities, format=kv_format)
    assert not needs_copies(backend_class.capabilities, layer)
    case = Case(name="fp8_tensor-scales", layer=layer, requests=(Request(40, 1), Request(0, 9)))
    check_backend(backend_class, case)
    assert {torch.float8_e4m3fn} == {
        wrapper.options["kv_data_type"] for wrapper in (*DECODE.instances, *PREFILL.instances)
    }


# --- plans ------------------------------------------------------------------------------------------------------------


def make_backend(library: ModuleType, **options: Any) -> tuple[LayerSpec, AttentionBackend]:
    backend_class = load()
    layer = make_layer(backend_class.capabilities, block_size=16, **options)
    options_class = backend_class.options_class
    assert options_class is not None
    return layer, backend_class([layer], torch.device("cpu"), options_class())


def parts(backend: AttentionBackend, requests: list[Request]) -> list[tuple[type, slice]]:
    builder = backend.make_builder()
    built = builder.finish(builder.build(make_metadata(requests, 16)))
    return [(type(part.wrapper), part.rows) for part in built.parts]


DECODE, PREFILL = BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ([Request(40, 1), Request(7, 1)], [(DECODE, slice(0, 2))]),
        ([Request(0, 9), Request(7, 2)], [(PREFILL, slice(0, 11))]),
        ([Request(40, 1), Request(7, 1), Request(0, 9)], [(DECODE, slice(0, 2)), (PREFILL, slice(2, 11))]),
        ([Request(0, 1, num_keys=8), Request(0, 1, num_keys=0)], [(PREFILL, slice(0, 2))]),
    ],
    ids=["decodes", "prompts", "both", "a decode without keys"],
)
def test_decodes_and_other_requests_are_planned_apart(
    requests: list[Request], expected: list[tuple[type, slice]], library: ModuleType
) -> None:
    _, backend = make_backend(library)
    assert expected == parts(backend, requests)


def test_queries_in_ranges_of_prompts_are_planned_apart(library: ModuleType) -> None:
    _, backend = make_backend(library, window=20)
    builder = backend.make_builder()
    ends = torch.tensor([0, 0, 6, 6, 0, 48, 48], dtype=torch.int32)
    step = make_metadata([Request(40, 1), Request(3, 4), Request(46, 2)], 16)
    ranged = attrs.evolve(step, extensions={RANGE_ENDS: Extension(ends, Axis.TOKEN, ends)})
    decodes, causal, both_ways = builder.finish(builder.build(ranged)).parts
    assert slice(0, 1) == decodes.rows
    assert ([1, 4], [2, 3, 5, 6]) == (causal.rows.tolist(), both_ways.rows.tolist())
    assert (True, False) == (causal.wrapper.options["causal"], both_ways.wrapper.options["causal"])
    assert {19} == {part.wrapper.options["window_left"] for part in (decodes, causal, both_ways)}
    assert ([4, 7], [0, 1, 2]) == (causal.wrapper.seq_lens.tolist(), causal.wrapper.query_starts.tolist())
    # The first of 48 tokens that query 46 sees is 27, so the first page is not read.
    assert ([6, 32], [0, 2, 4]) == (both_ways.wrapper.seq_lens.tolist(), both_ways.wrapper.query_starts.tolist())
    assert step.block_table[2, 1:3].tolist() == both_ways.wrapper.table[1].tolist()


def test_ranges_change_nothing_if_queries_see_all_tokens_anyway(library: ModuleType) -> None:
    ends = torch.tensor([0, 3, 3, 0], dtype=torch.int32)
    ranged = attrs.evolve(
        make_metadata([Request(0, 4)], 16), extensions={RANGE_ENDS: Extension(ends, Axis.TOKEN, ends)}
    )
    for causal, step in ((True, attrs.evolve(ranged, causal=False)), (False, ranged)):
        builder = make_backend(library, causal=causal)[1].make_builder()
        assert [slice(0, 4)] == [part.rows for part in builder.finish(builder.build(step)).parts]


def test_page_lists_are_made_on_the_host_without_waiting_for_the_device(library: ModuleType) -> None:
    _, backend = make_backend(library, window=20)
    builder = backend.make_builder()
    assert builder.on_host is not None
    built = builder.finish(builder.build(on_device(make_metadata([Request(40, 1), Request(0, 9), Request(7, 2)], 16))))
    assert [1, 2] == [len(part.wrapper.seq_lens) for part in built.parts]


def test_but_for_its_plans_what_a_step_needs_is_in_its_one_copy_and_nobody_waits(library: ModuleType) -> None:
    check_staging(load())
    assert {"meta"} == {wrapper.ids.device.type for wrapper in (*DECODE.instances, *PREFILL.instances)}


def test_kernels_are_loaded_at_set_up(library: ModuleType) -> None:
    make_backend(library)
    assert ([1], [1]) == tuple([instance.plans for instance in wrapper.instances] for wrapper in (DECODE, PREFILL))


def test_a_wrapper_is_planned_again_only_when_nobody_holds_its_plan(library: ModuleType) -> None:
    _, backend = make_backend(library)
    builder, step = backend.make_builder(), make_metadata([Request(40, 1)], 16)
    plans = [builder.finish(builder.build(step)) for _ in range(3)]
    assert 3 == len({id(built.parts[0].wrapper) for built in plans}) == len(DECODE.instances)
    del plans
    gc.collect()
    for _ in range(5):
        builder.finish(builder.build(step))
    assert 3 == len(DECODE.instances)


@pytest.mark.parametrize(("num_heads", "expected"), [(2, False), (4, False), (8, True), (16, True)])
def test_decodes_of_large_groups_run_on_tensor_cores(num_heads: int, expected: bool, library: ModuleType) -> None:
    make_backend(library, num_heads=num_heads)
    (wrapper,) = DECODE.instances
    assert isinstance(wrapper, DECODE)
    assert expected is wrapper.use_tensor_cores


def test_pages_that_a_window_has_left_are_not_in_the_lists() -> None:
    from kvframe_flashinfer.pages import PageLists

    metadata = make_metadata([Request(40, 1), Request(7, 3), Request(15, 1)], 4)
    table = metadata.block_table
    full, cut = PageLists.of(metadata, None), PageLists.of(metadata, 6)
    assert [0, 11, 14, 18] == full.starts.tolist()
    assert [1, 2, 4] == full.last_page_lens.tolist() == cut.last_page_lens.tolist()
    # Queries at 40, 7 and 15 see from 35, 2 and 10 on: blocks 8, 0 and 2.
    assert [0, 3, 6, 8] == cut.starts.tolist()
    assert [*table[0, 8:11].tolist(), *table[1, :3].tolist(), *table[2, 2:4].tolist()] == cut.ids.tolist()
    part = cut.part(1, 3)
    assert ([0, 3, 5], [2, 4]) == (part.starts.tolist(), part.last_page_lens.tolist())
    assert np.int32 == part.starts.dtype


# --- where it runs ----------------------------------------------------------------------------------------------------


def test_it_says_why_it_cannot_run_here(library: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    backend_class = load()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs a CUDA device; torch sees none" == backend_class.unusable_reason()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert "needs compute capability 8.0 or more, and the device has 7.5" == backend_class.unusable_reason()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    expected = "has no compiled kernels (flashinfer-jit-cache), and finds no nvcc to compile them"
    assert expected == backend_class.unusable_reason()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    assert backend_class.unusable_reason() is None


def test_the_kernels_of_prompts_are_an_option(library: ModuleType) -> None:
    backend_class = load()
    assert backend_class.options_class is not None
    layer = make_layer(backend_class.capabilities)
    backend_class([layer], torch.device("cpu"), backend_class.options_class(kernels="fa2"))
    assert ["fa2"] == [wrapper.backend for wrapper in PREFILL.instances if isinstance(wrapper, PREFILL)]
    with pytest.raises(ValueError, match="kernels"):
        backend_class.options_class(kernels="fa4")


@pytest.mark.parametrize(("unit", "block_size"), [("tokens", 1), ("blocks", 4)])
def test_choices_by_content_are_refused(library: ModuleType, unit: str, block_size: int) -> None:
    capabilities = load().capabilities
    layer = make_layer(capabilities, choice={"max_chosen": 4, "block_size": block_size})
    assert [f"choice_{unit}"] == [refusal.code for refusal in find_refusals(capabilities, layer, "cuda")]


def test_head_sizes_without_kernels_are_refused(library: ModuleType) -> None:
    capabilities = load().capabilities
    layer = make_layer(capabilities, head_size=80)
    assert ["head_size"] == [refusal.code for refusal in find_refusals(capabilities, layer, "cuda")]
