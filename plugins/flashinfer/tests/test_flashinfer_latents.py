"""The backend for latents on a stand-in for the library, and the library itself on a GPU."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, ClassVar

import attrs
import pytest
import torch
from kvframe_kernels.flash_reference import paged_attention
from kvframe_testing.case import Case, Request
from kvframe_testing.grid import make_cases, make_layer
from kvframe_testing.metadata import make_metadata, on_device
from kvframe_testing.refusals import find_refusals
from kvframe_testing.staging import check_staging
from kvframe_testing.state import form_of
from kvframe_testing.suites import BackendTests, chains_of

from kvframe.contract import RANGE_ENDS, AttentionBackend, Axis, Extension, LayerSpec


class BatchMLAPagedAttentionWrapper:
    """A stand-in for the latent wrapper of FlashInfer 0.6.9."""

    instances: ClassVar[list[BatchMLAPagedAttentionWrapper]] = []

    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        assert float_workspace_buffer.nbytes == 128 << 20
        self.backend = backend
        self.instances.append(self)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert {torch.int32} == {tensor.dtype for tensor in (qo_indptr, kv_indptr, kv_indices, kv_len_arr)}
        assert len(qo_indptr) == len(kv_indptr) == len(kv_len_arr) + 1
        assert len(kv_indices) == kv_indptr[-1]
        # There are no kernels for mixed dtypes and other sizes.
        assert (512, 64, q_data_type) == (head_dim_ckv, head_dim_kpe, kv_data_type)
        assert torch.equal(kv_indptr.diff(), -(-kv_len_arr // page_size))
        self.query_starts, self.seq_lens = qo_indptr.clone(), kv_len_arr.clone()  # copied to the device
        self.sizes, self.causal, self.scale, self.dtype = (num_heads, page_size), causal, sm_scale, q_data_type
        self.ids = kv_indices
        if kv_indices.is_meta:
            return
        self.table = torch.zeros(len(kv_len_arr), max(1, int(kv_indptr.diff().max())), dtype=torch.int32)
        for row, (start, stop) in enumerate(zip(kv_indptr[:-1].tolist(), kv_indptr[1:].tolist(), strict=True)):
            self.table[row, : stop - start] = kv_indices[start:stop]

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        assert out is not None
        assert (512, 64) == (ckv_cache.shape[-1], kpe_cache.shape[-1])
        assert (q_nope.shape[1], ckv_cache.shape[1]) == self.sizes
        assert {self.dtype} == {tensor.dtype for tensor in (q_nope, q_pe, ckv_cache, kpe_cache, out)}
        for tensor in (q_nope, q_pe, ckv_cache, kpe_cache):
            assert tensor.stride(-1) == 1
            assert not any(stride * tensor.itemsize % 16 for stride in tensor.stride()[:-1])
        assert len(q_nope) == self.query_starts[-1]
        if out.is_meta:
            return (out, out.new_empty(q_nope.shape[:2], dtype=torch.float32)) if return_lse else out
        output, normaliser = paged_attention(
            torch.cat([q_nope, q_pe], dim=-1),
            torch.cat([ckv_cache, kpe_cache], dim=-1).unsqueeze(2),
            ckv_cache.unsqueeze(2),
            self.query_starts,
            self.seq_lens,
            self.table,
            scale=self.scale,
            causal=self.causal,
        )
        out.copy_(output)
        return (out, (normaliser / math.log(2)).T.contiguous()) if return_lse else out


@contextmanager
def installed() -> Iterator[type[AttentionBackend]]:
    """Install the stand-in under the library's name, and yield the backend, imported anew."""
    names = ("flashinfer", "flashinfer.mla", "flashinfer.jit", "flashinfer.jit.cpp_ext", "flashinfer.jit.env")
    modules = {name: ModuleType(name) for name in names}
    vars(modules["flashinfer.mla"])["BatchMLAPagedAttentionWrapper"] = BatchMLAPagedAttentionWrapper
    vars(modules["flashinfer.jit"])["env"] = modules["flashinfer.jit.env"]
    vars(modules["flashinfer.jit.cpp_ext"])["get_cuda_path"] = str
    own = [f"kvframe_flashinfer.{name}" for name in ("backend", "builder", "latents", "latents_builder")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchMLAPagedAttentionWrapper, "instances", [])
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        for name in own:
            patch.delitem(sys.modules, name, raising=False)
        yield importlib.import_module("kvframe_flashinfer.latents").FlashInferMLABackend
        for name in own:
            sys.modules.pop(name, None)


@pytest.fixture
def backend_class() -> Iterator[type[AttentionBackend]]:
    with installed() as installed_class:
        yield installed_class


with installed() as installed_class:

    @pytest.mark.usefixtures("backend_class")
    class TestFlashInferMLA(BackendTests):
        backend = installed_class
        device = "cuda"
        runs_on = "cpu"
        chains = chains_of(("decode_only",), ("chunked_local",), ("decode_only", "chunked_local"))
        together = (("batch", "causal"), ("wrappers", "batch"))
        run_traits = ("head_size",)
        writes_out = True


@pytest.mark.gpu
class TestFlashInferMLAOnAGpu(BackendTests):
    backend = "flashinfer_mla"
    device = "cuda"
    always_whole = True
    chains = TestFlashInferMLA.chains
    run_traits = ("head_size",)
    writes_out = True

    def keeps(self, case: Case) -> bool:
        return case.query_dtype == torch.bfloat16


def test_but_for_its_plan_what_a_step_needs_is_in_its_one_copy_and_nobody_waits(
    backend_class: type[AttentionBackend],
) -> None:
    check_staging(backend_class)
    assert {"meta"} == {wrapper.ids.device.type for wrapper in BatchMLAPagedAttentionWrapper.instances}


def test_the_grid_has_the_sizes_that_the_library_takes(backend_class: type[AttentionBackend]) -> None:
    grid = make_cases(backend_class.capabilities, "cuda", form=form_of(backend_class))
    assert {(512, 64)} == {(case.spec.latent_size, case.spec.rope_size) for case in grid}  # type: ignore[attr-defined]


def layer(backend_class: type[AttentionBackend], **options: Any) -> LayerSpec:
    return make_layer(backend_class.capabilities, form_of(backend_class), **options)


def make_backend(backend_class: type[AttentionBackend], **options: Any) -> AttentionBackend:
    assert backend_class.options_class is not None
    return backend_class([layer(backend_class, **options)], torch.device("cpu"), backend_class.options_class())


@pytest.mark.parametrize(
    ("codes", "options"),
    [
        (["latent_size"], {"latent_size": 256}),
        (["latent_size", "rope_size"], {"latent_size": 128, "rope_size": 32}),
        (["dtype"], {"dtype": "float32"}),
        (["mask_window"], {"window": 5}),
        (["soft_cap", "sinks"], {"soft_cap": 2.0, "has_sinks": True}),
        (["choice_tokens"], {"choice": {"max_chosen": 8}}),
        (["choice_blocks"], {"choice": {"max_chosen": 2, "block_size": 4}}),
    ],
)
def test_what_the_library_cannot_do_is_refused(
    codes: list[str], options: dict[str, Any], backend_class: type[AttentionBackend]
) -> None:
    refused = find_refusals(backend_class.capabilities, layer(backend_class, **options), "cuda")
    assert codes == [refusal.code for refusal in refused]


def test_deepseeks_sizes_are_served(backend_class: type[AttentionBackend]) -> None:
    deepseek = layer(backend_class, num_heads=128, head_size=192, head_size_v=128, dtype="bfloat16")
    assert [] == find_refusals(backend_class.capabilities, deepseek, "cuda")


def test_a_size_that_is_refused_is_named(backend_class: type[AttentionBackend]) -> None:
    (refused,) = find_refusals(backend_class.capabilities, layer(backend_class, latent_size=256), "cuda")
    assert "takes latent_size 512, not 256" == refused.reason


def test_kernels_are_loaded_at_set_up_and_one_plan_serves_all_requests(backend_class: type[AttentionBackend]) -> None:
    builder = make_backend(backend_class).make_builder()
    assert ["auto"] == [wrapper.backend for wrapper in BatchMLAPagedAttentionWrapper.instances]
    built = builder.finish(builder.build(on_device(make_metadata([Request(40, 1), Request(0, 9), Request(7, 2)], 16))))
    (part,) = built.parts
    assert (12, [0, 1, 10, 12]) == (built.num_tokens, part.wrapper.query_starts.tolist())
    assert [41, 9, 9] == part.wrapper.seq_lens.tolist()


def test_queries_in_ranges_of_prompts_are_planned_apart(backend_class: type[AttentionBackend]) -> None:
    builder = make_backend(backend_class).make_builder()
    ends = torch.tensor([0, 0, 6, 6, 0], dtype=torch.int32)
    step = make_metadata([Request(40, 1), Request(3, 4)], 16)
    ranged = attrs.evolve(step, extensions={RANGE_ENDS: Extension(ends, Axis.TOKEN, ends)})
    causal, both_ways = builder.finish(builder.build(ranged)).parts
    assert ([0, 1, 4], [2, 3]) == (causal.rows.tolist(), both_ways.rows.tolist())
    assert (True, False) == (causal.wrapper.causal, both_ways.wrapper.causal)
    assert ([41, 4, 7], [6]) == (causal.wrapper.seq_lens.tolist(), both_ways.wrapper.seq_lens.tolist())
