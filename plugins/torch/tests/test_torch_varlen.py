"""The backend on torch's own paged attention: its arithmetic on a stand-in, and torch's function on a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import attrs
import pytest
import torch
from kvframe_kernels.flash_reference import paged_attention
from kvframe_testing.case import Case, Request
from kvframe_testing.conformance import check_backend
from kvframe_testing.grid import make_cases, make_layer
from kvframe_testing.laws import ConformanceError
from kvframe_testing.metadata import make_metadata
from kvframe_testing.refusals import find_refusals
from kvframe_testing.staging import check_staging
from kvframe_testing.suites import BackendTests, chains_of
from kvframe_torch import varlen
from kvframe_torch.varlen import TorchVarlenBackend

CAPABILITIES = TorchVarlenBackend.capabilities
HEAD_SIZES = (8, 40, 256)
FORMATS = ("plain", "int8_token_head")
"""Formats of the cases: a backend handles copies of pages in the same way for every format."""


class AuxRequest(NamedTuple):
    lse: bool = False


class StandIn:
    """``torch.nn.attention.varlen`` as torch 2.13 has it, on a CPU.

    Attributes:
        AuxRequest: As there.
        called_with: The arguments of the last call.
    """

    AuxRequest = AuxRequest

    def __init__(self) -> None:
        self.called_with: dict[str, Any] = {}

    def varlen_attn(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        *,
        return_aux: AuxRequest | None = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
        seqused_k: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        num_splits: int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        self.called_with = {"max_q": max_q, "window_size": window_size}
        assert seqused_k is not None
        assert block_table is not None
        assert cu_seq_k is None
        assert scale is not None
        assert {torch.int32} == {tensor.dtype for tensor in (cu_seq_q, seqused_k, block_table)}
        assert query.dtype == key.dtype == value.dtype
        assert query.dtype in (torch.float16, torch.bfloat16)
        assert key.shape[1] % 256 == query.shape[2] % 8 == 0
        assert len(cu_seq_q) == len(seqused_k) + 1 == len(block_table) + 1
        if query.is_meta:
            lse = query.new_empty(query.shape[1], len(query), dtype=torch.float32)
            return torch.empty_like(query) if return_aux is None else (torch.empty_like(query), lse)
        assert int(seqused_k.max()) <= max_k
        assert int(cu_seq_q.diff().max()) <= max_q
        num_groups = query.shape[1] // key.shape[2]
        assert enable_gqa or num_groups == 1
        if max_q == 1 and num_groups > 1 and window_size == (-1, -1):
            # A request's heads become its queries, and row and request are equal for any cu_seq_q.
            assert len(query) == len(seqused_k)
            cu_seq_q = torch.arange(len(query) + 1, dtype=torch.int32)
        output, lse = paged_attention(
            query,
            key,
            value,
            cu_seq_q,
            seqused_k,
            block_table,
            scale=scale,
            causal=window_size == (-1, 0) and max_q > 1,
            window=window_size,
        )
        return (output, lse) if return_aux is not None and return_aux.lse else output


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    library = StandIn()
    monkeypatch.setattr(varlen, "varlen", library)
    return library


def is_kept(case: Case) -> bool:
    """Return whether a case is computed: not in every format and head size."""
    return case.spec.kv_format.name in FORMATS and ("head_size=" not in case.name or case.query.head_size in HEAD_SIZES)


@pytest.mark.usefixtures("stand_in")
class TestTorchVarlen(BackendTests):
    backend = "torch_varlen"
    device = "cuda"
    runs_on = "cpu"
    chains = chains_of(("decode_only",), ("chunked_local",), ("decode_only", "chunked_local"))
    together = (("batch", "visible"), ("batch", "causal"), ("has_sinks", "soft_cap"), ("wrappers", "batch"))
    # With pages of 256 tokens, a run takes seconds: the cases have the formats, the sizes, and shorter prompts.
    run_traits = ("feature",)
    run_kinds = ("decodes", "decodes-padded", "mixed")

    def keeps(self, case: Case) -> bool:
        return is_kept(case)


@pytest.mark.gpu
class TestTorchVarlenOnAGpu(BackendTests):
    backend = "torch_varlen"
    device = "cuda"
    always_whole = True
    chains = TestTorchVarlen.chains

    def keeps(self, case: Case) -> bool:
        return is_kept(case)


def cases() -> list[Case]:
    return [case for case in make_cases(CAPABILITIES, "cuda") if is_kept(case)]


def test_what_a_step_needs_is_in_its_one_copy_and_nobody_waits(stand_in: StandIn) -> None:
    check_staging(TorchVarlenBackend)


class _OneTokenShort(TorchVarlenBackend):
    def attend(self, layer: Any, query: Any, kv_cache: Any, metadata: Any, **options: Any) -> torch.Tensor:
        short = attrs.evolve(metadata, seq_lens=metadata.seq_lens - 1)
        return super().attend(layer, query, kv_cache, short, **options)


class _WithoutDeadTokens(TorchVarlenBackend):
    capabilities = attrs.evolve(TorchVarlenBackend.capabilities, reads_dead_tokens=False)


# With a window of 5 in pages of 256, tokens before it are in the tile in which it begins, and are multiplied by zero.
@pytest.mark.parametrize(
    ("wrong", "message"),
    [(_OneTokenShort, "queries are wrong"), (_WithoutDeadTokens, "NaN is state that is not live")],
)
def test_the_grid_sees_mistakes(wrong: type[TorchVarlenBackend], message: str, stand_in: StandIn) -> None:
    case = next(case for case in cases() if case.name == "window=5-block=256-decode")
    with pytest.raises(ConformanceError, match=message):
        check_backend(wrong, case)


def test_a_window_of_one_token_is_refused_because_the_page_of_the_next_token_may_be_another() -> None:
    codes = {
        window: [
            refusal.code for refusal in find_refusals(CAPABILITIES, make_layer(CAPABILITIES, window=window), "cuda")
        ]
        for window in (1, 2)
    }
    assert {1: ["mask_window"], 2: []} == codes


# --- how the function is called ---------------------------------------------------------------------------------------


def call(stand_in: StandIn, requests: list[Request], **options: Any) -> dict[str, Any]:
    layer = make_layer(CAPABILITIES, block_size=256, **options)
    backend = TorchVarlenBackend([layer], torch.device("cpu"))
    metadata = make_metadata(requests, 256)
    num_pages = int(metadata.block_table.max()) + 1
    pages = torch.zeros(num_pages, 256, 2, 8, dtype=torch.bfloat16)
    query = torch.zeros(len(metadata.slot_mapping), 4, 8, dtype=torch.bfloat16)
    backend.attend(layer, query, {"k": pages, "v": pages}, backend.make_builder().build(metadata))
    return stand_in.called_with


def test_decodes_without_a_window_take_the_path_that_reads_each_page_once_for_a_group_of_heads(
    stand_in: StandIn,
) -> None:
    assert {"max_q": 1, "window_size": (-1, -1)} == call(stand_in, [Request(300, 1), Request(7, 1)])
    assert {"max_q": 1, "window_size": (4, 0)} == call(stand_in, [Request(300, 1), Request(7, 1)], window=5)


def test_decodes_that_do_not_lie_in_their_requests_rows_take_the_other_one(stand_in: StandIn) -> None:
    requests = [Request(300, 1), Request(5, 0, 0), Request(7, 1)]
    assert {"max_q": 2, "window_size": (-1, 0)} == call(stand_in, requests)


def test_other_steps_are_causal_or_not_as_the_layer_is(stand_in: StandIn) -> None:
    assert {"max_q": 9, "window_size": (-1, 0)} == call(stand_in, [Request(0, 9), Request(7, 1)])
    assert {"max_q": 9, "window_size": (-1, -1)} == call(stand_in, [Request(0, 9)], causal=False)


# --- where it runs ----------------------------------------------------------------------------------------------------


def test_it_says_why_it_cannot_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(varlen, "_takes_block_tables", lambda: True)
    assert TorchVarlenBackend.unusable_reason() == "needs a CUDA device; torch sees none"
    monkeypatch.setattr(varlen, "_takes_block_tables", lambda: False)
    expected = f"torch {torch.__version__} has no torch.nn.attention.varlen that takes a block table"
    assert expected == TorchVarlenBackend.unusable_reason()


def test_it_asks_for_a_gpu_that_the_function_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(varlen, "_takes_block_tables", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert "needs compute capability 8.0 or more, and the device has 7.5" == TorchVarlenBackend.unusable_reason()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert TorchVarlenBackend.unusable_reason() is None


def test_it_refuses_pages_that_the_function_does_not_take() -> None:
    layer = make_layer(CAPABILITIES, block_size=16)
    assert ["block_size"] == [refusal.code for refusal in find_refusals(CAPABILITIES, layer, "cuda")]
