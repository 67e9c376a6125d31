"""The backend computes what mask functions define, compiled or densely, within bounded memory."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import pytest
import torch
from kvframe_flex import builder as flex_builder
from kvframe_flex import kernel, pages
from kvframe_flex.backend import FlexBackend, FlexOptions
from kvframe_flex.kernel import find_blocks
from kvframe_testing.case import Case, Request
from kvframe_testing.conformance import check_backend
from kvframe_testing.framework import select_backends
from kvframe_testing.grid import make_cases, make_layer
from kvframe_testing.laws import ConformanceError
from kvframe_testing.metadata import make_metadata
from kvframe_testing.refusals import find_refusals
from kvframe_testing.sample import sample
from kvframe_testing.staging import check_staging
from kvframe_testing.suites import BackendTests
from torch._dynamo import config as dynamo_config
from torch.fx.experimental import _config as shapes_config

from kvframe import Stack, load_plugins
from kvframe.contract import BackendError, LayerSpec, StackError

CASES = {case.name: case for case in make_cases(FlexBackend.capabilities)}
FEW = sample([*CASES.values()])
"""A sample of the cases with every trait of the grid, because a compilation takes up to a minute."""
TRACED = sample(
    [
        case
        for case in CASES.values()
        if case.name.startswith(("full", "window=5", "bidirectional", "chunk=6", "function-stride"))
        and case.spec.block_size == 16
        and "without_keys" not in case.name
    ],
    (),
)
"""A smaller sample, without the traits in which only sizes and formats differ."""
FEW_TRACED = TRACED[::9]
"""The cases of usual runs: a trace takes seconds, and each mask and feature is computed without one too."""
CPU = torch.device("cpu")


class Compiled(FlexBackend):
    """With the compiler, in cases that the kit computes without it."""

    conformance_options: ClassVar[Mapping[str, Any]] = {"compile": "always"}


class AsItComes(FlexBackend):
    """With the default options."""

    conformance_options: ClassVar[Mapping[str, Any]] = {}


def layer_of(**options: Any) -> LayerSpec:
    return make_layer(FlexBackend.capabilities, **options)


class TestFlex(BackendTests):
    backend = "flex"
    writes_out = True


def test_it_computes_a_case_compiled() -> None:
    check_backend(Compiled, CASES["function-stride=6-block=16-decode"])


@pytest.mark.whole
@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_it_computes_some_of_the_grid_compiled(case: Case) -> None:
    check_backend(Compiled, case)


@pytest.mark.parametrize("mask", ["full", "window=5-sink_tokens=3", "chunk=6"])
def test_a_range_may_go_on_in_the_next_tile(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_TILE_QUERIES", 32)
    check_backend(FlexBackend, CASES[f"{mask}-block=16-long_ranges"])


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch traces kernels and runs the traced graphs; only the compiler of graphs is left out."""
    monkeypatch.setattr(kernel, "COMPILER", "eager")


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[] if case in FEW_TRACED else pytest.mark.whole) for case in TRACED],
)
def test_what_torch_traces_computes_cases_of_every_mask_and_feature(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a GPU, where the kernel returns the log-sum-exp too.
    monkeypatch.setattr(kernel, "WITHOUT_LSE", frozenset())
    check_backend(Compiled, case)


@pytest.mark.usefixtures("traced_only")
def test_where_the_compiled_kernel_returns_no_log_sum_exp_it_is_computed_one_head_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heads, dense = [], kernel.dense_flex_attention

    def spy(query: torch.Tensor, *rest: Any) -> Any:
        heads.append((query.shape[1], rest[-1]))
        return dense(query, *rest)

    monkeypatch.setattr(kernel, "dense_flex_attention", spy)
    check_backend(Compiled, CASES["full-relative_bias-soft_cap-learned_sinks-mixed"])
    assert {(2, 0), (2, 2)} == set(heads)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [
        "function-stride=6-block=16-decode",
        "function-stride=6-block=17-mixed",
        "full-relative_bias-soft_cap-learned_sinks-mixed",
        "window=5-sink_tokens=3-bfloat16-mixed",
        "bidirectional-float16-cross_mixed",
    ],
)
def test_it_computes_cases_on_a_gpu(name: str) -> None:
    check_backend(Compiled, CASES[name], "cuda")


@pytest.mark.parametrize("limit", [pytest.param(1, marks=pytest.mark.whole), 7, 300])
def test_small_limits_cut_the_work_and_change_nothing(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_TILE_QUERIES", "MAX_BATCH_TOKENS", "MAX_BATCH_PAIRS"):
        monkeypatch.setattr(pages, name, limit)
    cases = [
        case for case in CASES.values() if "block=17" in case.name and ("mixed" in case.name or "hidden" in case.name)
    ]
    for case in sample(cases, [("batch", "visible")]):
        check_backend(FlexBackend, case)


class _OneTokenMore(FlexBackend):
    def __init__(self, layers: Any, device: Any, options: Any) -> None:
        super().__init__(layers, device, options)
        sees = self._visibility.sees
        wider = attrs.evolve(self._visibility, sees=lambda query, key: sees(query, key) | (key == query - 5), mask=None)
        self._visibility, self._kernel._sees = wider, wider.sees


class _SinksOfOtherHeads(FlexBackend):
    def attend(self, layer: Any, query: Any, kv_cache: Any, metadata: Any, *, sinks: Any = None, **options: Any) -> Any:
        return super().attend(
            layer, query, kv_cache, metadata, sinks=None if sinks is None else sinks.flip(0), **options
        )


@pytest.mark.parametrize(
    ("wrong", "name"),
    [(_OneTokenMore, "window=5-block=16-decode"), (_SinksOfOtherHeads, "full-learned_sinks-mixed")],
)
def test_the_grid_sees_mistakes(wrong: type[FlexBackend], name: str) -> None:
    with pytest.raises(ConformanceError):
        check_backend(wrong, CASES[name])


def test_it_serves_what_a_function_says_and_refuses_what_only_live_ranges_say() -> None:
    capabilities = FlexBackend.capabilities
    assert [] == find_refusals(capabilities, layer_of(stride=6, has_function=True), "cpu")
    assert ["mask_live_range"] == [refusal.code for refusal in find_refusals(capabilities, layer_of(stride=6), "cpu")]


def test_what_a_step_needs_is_in_its_one_copy_and_nobody_waits() -> None:
    check_staging(FlexBackend)


# --- which pages are read, and which blocks of tokens -----------------------------------------------------------------


def pages_read(num_computed: int, num_new: int, **options: Any) -> list[int]:
    layer = layer_of(block_size=4, **options)
    builder = FlexBackend([layer], CPU, FlexOptions(compile="never")).make_builder()
    built = builder.build(make_metadata([Request(num_computed, num_new)], block_size=4))
    return sorted(set(built.page_columns_cpu.tolist()))


def test_only_pages_with_a_token_that_is_seen_are_read() -> None:
    assert [0, 1, 2, 3, 4, 5] == pages_read(20, 1)
    assert [4, 5] == pages_read(20, 1, window=4)
    assert [0, 4, 5] == pages_read(20, 1, window=4, num_sink_tokens=1)
    assert [3, 4, 5] == pages_read(20, 1, chunk=7)
    assert [1, 3, 4, 5] == pages_read(20, 1, stride=8, has_function=True)
    assert [1, 3, 4, 5, 6] == pages_read(20, 6, stride=8, has_function=True)


def test_a_block_mask_tells_blocks_that_are_seen_whole_from_those_seen_in_part() -> None:
    position = torch.arange(300)
    counts, blocks, full_counts, full_blocks = find_blocks((position[None, :] <= position[:, None])[None])
    assert [[[1, 1, 1]]] == counts.tolist()
    assert [0, 1, 2] == blocks[0, 0, :, 0].tolist()
    assert [[[0, 1, 2]]] == full_counts.tolist()
    assert [0, 1] == full_blocks[0, 0, 2, :2].tolist()


def test_rows_after_a_single_query_change_no_block() -> None:
    visible = torch.ones(1, 1, 256, dtype=torch.bool)
    visible[..., -1] = False
    counts, blocks, full_counts, full_blocks = find_blocks(visible)
    assert (1, 1) == (counts[0, 0, 0], blocks[0, 0, 0, 0])
    assert (1, 0) == (full_counts[0, 0, 0], full_blocks[0, 0, 0, 0])
    assert (0, 0) == (counts[0, 0, 1], full_counts[0, 0, 1])


# --- the compiler -----------------------------------------------------------------------------------------------------


def test_without_a_compiler_one_line_says_so_and_the_result_is_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel, "missing_compiler", lambda device: "no C++ compiler was found")
    with caplog.at_level(logging.WARNING, logger="kvframe"):
        check_backend(AsItComes, CASES["full-block=16-decode"])
    assert 1 == len(caplog.messages)
    assert caplog.messages[0].endswith("without being compiled, which is slow (no C++ compiler was found)")
    with pytest.raises(BackendError, match="cannot be compiled here: no C\\+\\+ compiler was found"):
        Compiled([layer_of()], CPU, FlexOptions(compile="always"))


def test_a_kernel_that_cannot_be_compiled_falls_back_only_if_it_may(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(function: Any, **_: Any) -> Any:
        def call(*_: Any) -> Any:
            raise RuntimeError("the linker is gone")

        return call

    monkeypatch.setattr(kernel, "missing_compiler", lambda device: "")
    monkeypatch.setattr(torch, "compile", failing)
    with caplog.at_level(logging.WARNING, logger="kvframe"):
        check_backend(AsItComes, CASES["full-block=16-mixed"])
    assert 1 == len(caplog.messages)
    assert "RuntimeError: the linker is gone" in caplog.messages[0]
    with pytest.raises(ConformanceError, match="compiling FlexAttention failed: RuntimeError: the linker is gone"):
        check_backend(Compiled, CASES["full-block=16-mixed"])


def attend_to(backend: FlexBackend, requests: list[Request]) -> tuple[Any, torch.Tensor]:
    """Return a step's first dense batch, and its output."""
    builder = backend.make_builder()
    built = builder.finish(builder.build(make_metadata(requests, 16)))
    pages = {name: torch.zeros(64, 16, 1, 8) for name in "kv"}
    query = torch.zeros(sum(request.num_new for request in requests), 1, 8)
    return built.dense_batches[0], backend.attend(backend.layers[0], query, pages, built)


def always_compiled() -> FlexBackend:
    layer = layer_of(num_heads=1, num_kv_heads=1, head_size=8)
    return FlexBackend([layer], CPU, FlexOptions(compile="always"))


@pytest.mark.usefixtures("traced_only")
def test_the_wait_for_the_compiler_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    backend = always_compiled()
    with caplog.at_level(logging.INFO, logger="kvframe"):
        for num_requests in (1, 2, 1):
            attend_to(backend, [Request(20, 1)] * num_requests)
    (message,) = caplog.messages
    assert message.startswith("kvframe-flex: compiling FlexAttention for this mask, up to a minute")


@pytest.mark.usefixtures("traced_only")
def test_every_kind_of_batch_is_compiled_however_many_come(monkeypatch: pytest.MonkeyPatch) -> None:
    uncompiled, functions = [], kernel.Kernel._functions

    def spy(self: kernel.Kernel, *arguments: Any) -> Any:
        if not torch.compiler.is_compiling():
            uncompiled.append(arguments)
        return functions(self, *arguments)

    monkeypatch.setattr(kernel.Kernel, "_functions", spy)
    monkeypatch.setattr(flex_builder, "MIN_CAPACITY", 32)
    backend, kinds = always_compiled(), set()
    with dynamo_config.patch(recompile_limit=2):
        for num_computed, num_requests in itertools.product((20, 400), (1, 2)):
            dense, _ = attend_to(backend, [Request(num_computed, 1)] * num_requests)
            kinds.add((num_requests, len(dense.places.positions)))
    assert 4 == len(kinds)
    assert [] == uncompiled


@pytest.mark.usefixtures("traced_only")
def test_a_known_kind_that_is_compiled_once_more_is_compiled_as_the_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def note(graph: Any, inputs: Any) -> Any:
        compiled.append((shapes_config.use_duck_shape, dynamo_config.specialize_int, dynamo_config.specialize_float))
        return graph

    monkeypatch.setattr(kernel, "COMPILER", note)
    backend = always_compiled()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad, torch.no_grad):
        with mode():
            attend_to(backend, [Request(20, 1), Request(40, 1)])
    assert [(False, True, True)] * 3 == compiled
    assert 1 == len(backend._kernel._compiled)


def test_the_stack_says_whether_to_compile() -> None:
    def choose(**options: Any) -> Any:
        rule = {"layers": "*", "backend": {"name": "flex", **options}}
        return select_backends([layer_of()], Stack.from_mapping({"rules": [rule]}), load_plugins().registry, "cpu")[0]

    assert FlexOptions() == choose().backend_options
    assert "never" == choose(compile="never").backend_options.compile
    with pytest.raises(StackError, match=r"backend 'flex': 'compile' must be in .*; its options: compile"):
        choose(compile="sometimes")
