"""Both backends' arithmetic on stand-ins for the libraries, and the libraries themselves on a GPU."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from kvframe_kernels.flash_reference import paged_attention
from kvframe_testing.case import Case, Request
from kvframe_testing.conformance import check_backend
from kvframe_testing.framework import pad_metadata
from kvframe_testing.grid import make_cases, make_layer
from kvframe_testing.hosts import OtherHost
from kvframe_testing.laws import ConformanceError
from kvframe_testing.metadata import make_metadata
from kvframe_testing.refusals import find_refusals
from kvframe_testing.staging import check_staging
from kvframe_testing.suites import BackendTests, chains_of

from kvframe import load_plugins
from kvframe.contract import RANGE_ENDS, AttentionBackend, Axis, CommonAttentionMetadata, Extension

HEAD_SIZES = (8, 40, 256)
FORMATS = ("plain", "int8_token_head")
"""Formats of the cases: a backend handles copies of pages in the same way for every format."""
CHAINS = (("decode_only",), ("chunked_local",), ("decode_only", "chunked_local"))
CLASSES = {"flash_attn": "backend:FlashAttnBackend", "flash_attn_3": "backend_3:FlashAttn3Backend"}
LIBRARIES = {"flash_attn": "flash_attn", "flash_attn_3": "flash_attn_interface"}


def check_tensors(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *arrays: torch.Tensor) -> None:
    """Raise if the libraries would refuse either kind of call."""
    assert query.dtype == key.dtype == value.dtype
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert query.shape[-1] % 8 == 0
    assert query.shape[-1] <= 256
    assert key.shape == value.shape
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert {torch.int32} == {array.dtype for array in arrays}
    assert all(array.is_contiguous() for array in arrays if array.dim() == 1)
    assert all(array.stride(-1) == 1 for array in arrays)


class FlashAttn2:
    """Package ``flash-attn`` 2.8 on a CPU, with its documented signatures.

    Attributes:
        calls: The function of each call, and its argument for the most queries.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: torch.Tensor | None = None,
    ) -> Any:
        self.calls.append(("varlen", max_seqlen_q))
        assert block_table is not None
        assert softmax_scale is not None
        check_tensors(q, k, v, cu_seqlens_q, cu_seqlens_k, block_table)
        assert k.shape[1] % 256 == 0
        assert len(cu_seqlens_q) == len(cu_seqlens_k) == len(block_table) + 1
        if q.is_meta:
            lse = q.new_empty(q.shape[1], len(q), dtype=torch.float32)
            return (torch.empty_like(q), lse, None) if return_attn_probs else torch.empty_like(q)
        seq_lens = cu_seqlens_k.diff()
        assert int(seq_lens.max()) <= max_seqlen_k
        assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
        if max_seqlen_q == 1 and q.shape[1] > k.shape[2] and window_size == (-1, -1):
            # A request's heads become its queries, and row and request are equal for any cu_seqlens_q.
            cu_seqlens_q = torch.arange(len(block_table) + 1, dtype=torch.int32)
            assert len(q) == len(block_table)
        output, lse = paged_attention(
            q,
            k,
            v,
            cu_seqlens_q,
            seq_lens,
            block_table,
            scale=softmax_scale,
            causal=causal and max_seqlen_q > 1,
            window=window_size,
            soft_cap=softcap,
        )
        return (output, lse, None) if return_attn_probs else output

    def flash_attn_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        rotary_cos: torch.Tensor | None = None,
        rotary_sin: torch.Tensor | None = None,
        cache_seqlens: torch.Tensor | None = None,
        cache_batch_idx: torch.Tensor | None = None,
        cache_leftpad: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: torch.Tensor | None = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> Any:
        num_reqs, num_queries, num_heads, head_size = q.shape
        self.calls.append(("kvcache", num_queries))
        assert block_table is not None
        assert cache_seqlens is not None
        assert softmax_scale is not None
        check_tensors(q, k_cache, v_cache, cache_seqlens, block_table)
        assert k_cache.shape[1] % 256 == 0
        assert num_reqs == len(cache_seqlens) == len(block_table)
        if q.is_meta:
            lse = q.new_empty(num_reqs, num_heads, num_queries, dtype=torch.float32)
            return (torch.empty_like(q), lse) if return_softmax_lse else torch.empty_like(q)
        output, lse = paged_attention(
            q.reshape(-1, num_heads, head_size),
            k_cache,
            v_cache,
            torch.arange(num_reqs + 1, dtype=torch.int32) * num_queries,
            cache_seqlens,
            block_table,
            scale=softmax_scale,
            causal=causal,
            window=window_size,
            soft_cap=softcap,
        )
        lse = lse.view(num_heads, num_reqs, num_queries).transpose(0, 1)
        return (output.view(q.shape), lse) if return_softmax_lse else output.view(q.shape)


class FlashAttn3:
    """``flash_attn_interface``, the module of FlashAttention-3, on a CPU, with its documented signature."""

    def flash_attn_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        qv: torch.Tensor | None = None,
        rotary_cos: torch.Tensor | None = None,
        rotary_sin: torch.Tensor | None = None,
        cache_seqlens: torch.Tensor | None = None,
        cache_batch_idx: torch.Tensor | None = None,
        cache_leftpad: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k_new: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        rotary_seqlens: torch.Tensor | None = None,
        q_descale: torch.Tensor | None = None,
        k_descale: torch.Tensor | None = None,
        v_descale: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: torch.Tensor | None = None,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> Any:
        assert page_table is not None
        assert cache_seqlens is not None
        assert cu_seqlens_q is not None
        assert max_seqlen_q is not None
        assert softmax_scale is not None
        check_tensors(q, k_cache, v_cache, cache_seqlens, cu_seqlens_q, page_table)
        assert len(cu_seqlens_q) == len(cache_seqlens) + 1 == len(page_table) + 1
        if q.is_meta:
            lse = q.new_empty(q.shape[1], len(q), dtype=torch.float32)
            return (torch.empty_like(q), lse, None, None) if return_softmax_lse else torch.empty_like(q)
        assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
        output, lse = paged_attention(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q,
            cache_seqlens,
            page_table,
            scale=softmax_scale,
            causal=causal,
            window=window_size,
            soft_cap=softcap,
        )
        return (output, lse, None, None) if return_softmax_lse else output


def load(name: str) -> type[AttentionBackend]:
    module, _, attribute = CLASSES[name].partition(":")
    backend_class: type[AttentionBackend] = getattr(importlib.import_module(f"kvframe_flash_attn.{module}"), attribute)
    return backend_class


@contextmanager
def installed() -> Iterator[dict[str, Any]]:
    """Install stand-ins for the libraries, and yield them; the backends are imported anew."""
    libraries: dict[str, Any] = {"flash_attn": FlashAttn2(), "flash_attn_3": FlashAttn3()}
    before = dict(sys.modules)
    for name, stand_in in libraries.items():
        module = ModuleType(LIBRARIES[name])
        for function in ("flash_attn_with_kvcache", "flash_attn_varlen_func"):
            if hasattr(stand_in, function):
                setattr(module, function, getattr(stand_in, function))
        sys.modules[module.__name__] = module
        sys.modules.pop(f"kvframe_flash_attn.{CLASSES[name].partition(':')[0]}", None)
    yield libraries
    for name in {*sys.modules} - {*before}:
        if name.startswith(("flash_attn", "kvframe_flash_attn.backend")):
            del sys.modules[name]
    sys.modules.update({name: before[name] for name in before if name.startswith(("flash_attn", "kvframe_flash_"))})


@pytest.fixture
def stand_ins() -> Iterator[dict[str, Any]]:
    with installed() as libraries:
        yield libraries


def is_kept(case: Case) -> bool:
    """Return whether a case is computed: not in every format and head size."""
    return case.spec.kv_format.name in FORMATS and ("head_size=" not in case.name or case.query.head_size in HEAD_SIZES)


class OnAStandIn(BackendTests):
    """Tests of a backend on a stand-in for its library."""

    device = "cuda"
    runs_on = "cpu"
    chains = chains_of(*CHAINS)
    together = (("batch", "visible"), ("batch", "causal"), ("has_sinks", "soft_cap"), ("wrappers", "batch"))
    # With pages of 256 tokens, a run takes seconds: the cases have the formats, the sizes, and shorter prompts.
    run_traits = ("feature",)
    run_kinds = ("decodes", "decodes-padded", "mixed")

    def keeps(self, case: Case) -> bool:
        return is_kept(case)


with installed():

    class TestFlashAttn(OnAStandIn):
        backend = load("flash_attn")

    class TestFlashAttn3(OnAStandIn):
        backend = load("flash_attn_3")


class OnAGpu(BackendTests):
    """Tests of a backend on the library itself."""

    device = "cuda"
    always_whole = True
    chains = OnAStandIn.chains

    def keeps(self, case: Case) -> bool:
        return is_kept(case)


@pytest.mark.gpu
class TestFlashAttnOnAGpu(OnAGpu):
    backend = "flash_attn"


@pytest.mark.gpu
class TestFlashAttn3OnAGpu(OnAGpu):
    backend = "flash_attn_3"


def cases(backend_class: type[AttentionBackend]) -> list[Case]:
    return [case for case in make_cases(backend_class.capabilities, "cuda") if is_kept(case)]


@pytest.mark.parametrize(("case", "num_copies"), [("full-block=256-mixed", 2), ("full-learned_sinks-mixed", 1)])
def test_only_what_is_computed_after_the_library_is_written_where_the_host_wants_it(
    case: str, num_copies: int, stand_ins: dict[str, Any]
) -> None:
    # The libraries' public functions take no memory for the output.
    backend_class, host = load("flash_attn"), OtherHost("by_page")
    check_backend(
        backend_class, next(candidate for candidate in cases(backend_class) if candidate.name == case), host=host
    )
    # The sinks of a case are left out in one of its calls.
    assert (num_copies, True) == (host.num_copies, host.num_outputs >= num_copies)


@pytest.mark.parametrize("name", CLASSES)
def test_what_a_step_needs_is_in_its_one_copy_and_nobody_waits(name: str, stand_ins: dict[str, Any]) -> None:
    check_staging(load(name))


# --- bugs that the grid finds -----------------------------------------------------------------------------------------


def windowed(backend_class: type[AttentionBackend]) -> Case:
    block_size = max(16, backend_class.capabilities.block_size_multiple)
    name = f"window=5-block={block_size}-uneven"
    return next(case for case in cases(backend_class) if case.name == name)


def test_without_the_cut_of_windows_the_null_page_is_read(stand_ins: dict[str, Any]) -> None:
    backend_class = load("flash_attn_3")

    class WithoutCut(backend_class):  # type: ignore[valid-type, misc]
        def make_builder(self) -> Any:
            builder = super().make_builder()
            builder._mask = attrs.evolve(builder._mask, window=None)
            return builder

    with pytest.raises(ConformanceError, match="NaN is state that is not live"):
        check_backend(WithoutCut, windowed(backend_class))


@pytest.mark.parametrize("name", CLASSES)
def test_both_say_that_they_read_dead_tokens_because_they_do(name: str, stand_ins: dict[str, Any]) -> None:
    backend_class = load(name)

    class Silent(backend_class):  # type: ignore[valid-type, misc]
        capabilities = attrs.evolve(backend_class.capabilities, reads_dead_tokens=False)

    with pytest.raises(ConformanceError, match="NaN is state that is not live"):
        check_backend(Silent, windowed(backend_class))


# --- how the library is called ----------------------------------------------------------------------------------------


def call(stand_ins: dict[str, Any], metadata: CommonAttentionMetadata, **mask: Any) -> list[tuple[str, int]]:
    """Return the function of each call of a step, and its argument for the most queries."""
    backend_class = load("flash_attn")
    layer = make_layer(backend_class.capabilities, block_size=256, **mask)
    backend = backend_class([layer], torch.device("cpu"))
    pages = torch.zeros(int(metadata.block_table.max()) + 1, 256, 2, 8, dtype=torch.bfloat16)
    query = torch.zeros(len(metadata.slot_mapping), 4, 8, dtype=torch.bfloat16)
    builder = backend.make_builder()
    backend.attend(layer, query, {"k": pages, "v": pages}, builder.finish(builder.build(metadata)))
    calls: list[tuple[str, int]] = stand_ins["flash_attn"].calls
    return calls


@pytest.mark.parametrize(
    ("requests", "called"),
    [
        ([Request(300, 1), Request(7, 1)], ("kvcache", 1)),
        ([Request(300, 3), Request(7, 3)], ("kvcache", 3)),
        ([Request(0, 9), Request(7, 1)], ("varlen", 9)),
        ([Request(300, 1), Request(5, 0, 0), Request(7, 1)], ("varlen", 2)),
    ],
    ids=["decodes", "drafts", "mixed", "a request without a query"],
)
def test_requests_with_as_many_queries_go_to_the_function_that_splits_long_ones(
    requests: list[Request], called: tuple[str, int], stand_ins: dict[str, Any]
) -> None:
    assert [called] == call(stand_ins, make_metadata(requests, 256))


def test_padding_does_not_make_requests_have_as_many_queries(stand_ins: dict[str, Any]) -> None:
    uneven = make_metadata([Request(300, 1), Request(7, 3), Request(9, 2)], 256)
    padded = pad_metadata(uneven, num_reqs=3, num_tokens=9, num_generating=6, max_query_len=3)
    assert [("varlen", 3)] == call(stand_ins, padded)


def test_a_step_with_ranges_of_prompts_is_two_calls(stand_ins: dict[str, Any]) -> None:
    ends = torch.tensor([0, 0, 0, 7, 7, 7, 7, 0, 0], dtype=torch.int32)
    step = make_metadata([Request(300, 1), Request(1, 8)], 256)
    ranged = attrs.evolve(step, extensions={RANGE_ENDS: Extension(ends, Axis.TOKEN, ends)})
    assert [("varlen", 4), ("varlen", 4)] == call(stand_ins, ranged)
    # If queries see all tokens anyway, it is one.
    for step, mask in ((ranged, {"causal": False}), (attrs.evolve(ranged, causal=False), {})):
        stand_ins["flash_attn"].calls.clear()
        assert [("varlen", 8)] == call(stand_ins, step, **mask)


@pytest.mark.parametrize("name", CLASSES)
def test_layers_that_see_all_tokens_anyway_have_metadata_of_their_own(name: str, stand_ins: dict[str, Any]) -> None:
    backend_class = load(name)
    keys = [
        backend_class([make_layer(backend_class.capabilities, block_size=256, causal=causal)], torch.device("cpu"))
        .make_builder()
        .reuse_key
        for causal in (True, False, True)
    ]
    assert keys[0] == keys[2] != keys[1]


# --- where they run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLASSES)
def test_it_says_why_it_cannot_run_here(name: str, stand_ins: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    backend_class = load(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs a CUDA device; torch sees none" == backend_class.unusable_reason()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    least = {"flash_attn": "8.0", "flash_attn_3": "9.0"}[name]
    assert f"needs compute capability {least} or more, and the device has 7.5" == backend_class.unusable_reason()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert backend_class.unusable_reason() is None


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="the library is installed")
def test_without_the_library_what_to_type_is_said() -> None:
    entry = load_plugins().registry.backends.get("flash_attn")
    assert ("flash_attn",) == entry.missing()
    assert "pip install flash-attn --no-build-isolation" == entry.install


def test_pages_that_the_library_does_not_take_are_refused(stand_ins: dict[str, Any]) -> None:
    codes = {}
    for name in CLASSES:
        capabilities = load(name).capabilities
        layer = make_layer(capabilities, block_size=16)
        codes[name] = [refusal.code for refusal in find_refusals(capabilities, layer, "cuda")]
    assert {"flash_attn": ["block_size"], "flash_attn_3": []} == codes
