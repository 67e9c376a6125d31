"""The backend computes attention on every kind of batch, mask and format in its capabilities."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from kvframe_kernels.triton.launch import Launch
from kvframe_testing.case import Case, Request
from kvframe_testing.checks import Checks
from kvframe_testing.conformance import check_backend
from kvframe_testing.framework import Staging, pad_metadata
from kvframe_testing.grid import make_cases, make_layer
from kvframe_testing.hosts import LAYOUTS
from kvframe_testing.laws import ConformanceError
from kvframe_testing.metadata import make_metadata, on_device
from kvframe_testing.refusals import find_refusals
from kvframe_testing.runs import make_runs, sample_runs
from kvframe_testing.sample import sample
from kvframe_testing.staging import check_staging
from kvframe_testing.suites import BackendTests
from kvframe_triton.backend import TritonBackend
from kvframe_triton.builder import TritonMetadata
from triton import knobs

from kvframe import load_plugins
from kvframe.contract import ChosenTokens, GraphCapture, LayerSpec, MoreInputs
from tests.covering import cover_values

CASES = make_cases(TritonBackend.capabilities, "cuda")
TOGETHER = (
    ("batch", "visible"),
    ("batch", "is_padded"),
    ("is_long", "dtype"),
    ("block_size", "visible"),
    ("format", "dtype"),
    ("has_sinks", "dtype"),
    ("has_sinks", "soft_cap"),
    ("bias", "num_heads"),
)
BESIDES = (
    "int4_token_head-full-head_size=40-decode-padded",
    "bidirectional-multi_head-cross_decode-padded",
    "bidirectional-multi_query-cross_decode-padded",
    "bidirectional-short_values-cross_decode-padded",
    "bidirectional-bfloat16-cross_mixed-padded",
    "bidirectional-everything-cross_prefill",
)
"""Cases with variants of the kernels that no case of the sample has."""

LARGE = ("many_decodes", "many_mixed", "long_prompts", "long_extend", "long_decodes")
"""Batches that take up to twenty seconds under the interpreter."""

CHEAP = [case for case in CASES if not case.name.endswith(("block=1-long_ranges", *LARGE))]
"""Of these cases, none takes more than a second under the interpreter."""

FEW = (*sample(CHEAP, TOGETHER), *(case for case in CASES if case.name in BESIDES))
"""Cases with every trait of the grid and every variant of the kernels."""

FEW_RUNS = sample_runs(
    [
        run
        for run in make_runs(TritonBackend.capabilities, "cuda")
        if "num_kv_heads=8" not in run.name and run.feature == "full"
    ],
    ["head_size"],
)
"""A run takes seconds for each of its KV heads."""

USUAL = (
    *(case.name for case in FEW),
    *(f"{name}-large_values" for name in [case.name for case in FEW if not case.name.startswith("served-")][6::24]),
    *(f"run-{run.name}" for run in FEW_RUNS),
)
"""The checks of usual runs, by name."""

interpreted = pytest.mark.skipif(
    not knobs.runtime.interpret, reason="a CUDA device is there, on which all cases are run"
)


@interpreted
class TestTriton(BackendTests):
    backend = "triton"
    device = "cuda"
    runs_on = "cpu"
    writes_out = True

    def keeps(self, case: Case) -> bool:
        """Return whether a case is interpreted: the large batches with two of the layers that serving makes."""
        return not case.name.endswith(LARGE) or case.name.startswith(("served-group=3-", "served-group=5-"))

    def make_checks(self, *, whole: bool) -> Checks:
        """Return all checks, or those of usual runs: another host has one case in each of its layouts."""
        checks = super().make_checks(whole=True)
        if whole:
            return checks
        hosts = {
            check.name.rpartition("=")[2]: check.name
            for check in reversed(checks.checks)
            if "-host=" in check.name and "long_ranges" not in check.name
        }
        selection = tuple(check for check in checks.checks if check.name in (*USUAL, *hosts.values()))
        assert len(selection) == len(USUAL) + len(LAYOUTS)
        return attrs.evolve(checks, checks=selection)


@pytest.mark.gpu
class TestTritonOnAGpu(BackendTests):
    backend = "triton"
    device = "cuda"
    always_whole = True
    writes_out = True

    def make_checks(self, *, whole: bool) -> Checks:
        """Return every case and run, and large values where nothing is live in a sample of the cases."""
        checks = super().make_checks(whole=whole)
        large = {f"{case.name}-large_values" for case in FEW}
        selection = [
            check for check in checks.checks if check.name in large or not check.name.endswith("-large_values")
        ]
        return attrs.evolve(checks, checks=tuple(selection))


@pytest.mark.whole
def test_what_is_always_computed_of_the_grid_has_every_variant_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: set[object] = set()

    def note(launch: Launch) -> None:
        name, arguments = launch.kernel.__name__, launch.arguments
        launches.update((name, constant, str(arguments[constant])) for constant in arguments if constant.isupper())
        if "query" in arguments:
            launches.add((name, arguments["FORMAT"], arguments["query"].dtype))

    def variants(cases: Sequence[Case]) -> set[object]:
        launches.clear()
        for case in cases:
            with contextlib.suppress(ConformanceError):  # no kernel runs
                check_backend(TritonBackend, case, poison=0.0)
        return set(launches)

    monkeypatch.setattr(Launch, "run", note)
    assert variants(CASES) == variants(FEW)


class _WithoutLastPart(TritonBackend):
    def make_builder(self) -> object:  # type: ignore[override]
        builder = super().make_builder()
        build = builder.build

        def build_wrongly(metadata: object) -> TritonMetadata:
            built: TritonMetadata = build(metadata)  # type: ignore[arg-type]
            for programs in built.programs:
                first = programs.first_split + 3
                built.numbers[first : first + 4 * programs.num_splits : 4] = 1
            return built

        vars(builder)["build"] = build_wrongly
        return builder


@interpreted
def test_the_grid_sees_a_part_that_is_left_out() -> None:
    case = next(case for case in CASES if case.name == "full-block=16-uneven")
    with pytest.raises(ConformanceError, match="queries are wrong"):
        check_backend(_WithoutLastPart, case)


# --- metadata ---------------------------------------------------------------------------------------------------------


def layer(**options: Any) -> LayerSpec:
    return make_layer(TritonBackend.capabilities, **options)


def build(requests: Sequence[Request], device: str = "cpu") -> TritonMetadata:
    built: TritonMetadata = (
        TritonBackend([layer()], torch.device(device)).make_builder().build(make_metadata(requests, 16))
    )
    return built


def test_what_a_step_needs_is_in_its_one_copy_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Launch] = []
    monkeypatch.setattr(Launch, "run", lambda launch: launched.append(launch))
    check_staging(TritonBackend)
    assert {"attend", "_write"} <= {launch.kernel.__name__ for launch in launched}


def test_building_never_waits_for_the_device() -> None:
    builder = TritonBackend([layer()], torch.device("cpu")).make_builder()
    requests = [Request(40, 1), Request(0, 19), Request(4000, 7), Request(16, 1), Request(0, 1), Request(4, 0, 0)]
    assert 2 == len(builder.build(on_device(make_metadata(requests, 16))).programs)


@pytest.mark.parametrize("requests", [[Request(5000, 1)] * 3, [Request(41, 1), Request(3000, 700)]])
def test_work_is_cut_on_the_host_for_the_steps_one_copy(requests: list[Request]) -> None:
    assert TritonBackend([layer()], torch.device("meta")).make_builder().on_host is not None
    built = build(requests, "meta")
    assert {"cpu"} == {tensor.device.type for tensor in (built.block_table, built.numbers)}


def test_a_graph_of_any_batch_finds_work_of_the_same_shapes() -> None:
    builder = TritonBackend([layer()], torch.device("cpu")).make_builder()
    assert GraphCapture.ALWAYS == builder.capture
    shapes = set()
    for requests in ([Request(9, 1)] * 4, [Request(8000, 1), Request(3, 20), Request(500, 9)], [Request(0, 24)]):
        padded = pad_metadata(
            make_metadata(requests, 16), num_reqs=4, num_tokens=32, num_generating=4, max_query_len=24, max_seq_len=8192
        )
        built = builder.build(padded)
        shapes.add((built.numbers.shape, built.programs))
    assert 1 == len(shapes)


def test_layers_that_differ_in_what_does_not_cut_a_step_share_their_metadata() -> None:
    def key(**options: object) -> object:
        return TritonBackend([layer(**options)], torch.device("cpu")).make_builder().reuse_key

    assert key() == key(soft_cap=2.0) == key(has_sinks=True)
    assert key() != key(window=5)
    assert key() != key(num_heads=2)


# --- chosen tokens ----------------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize(
    ("kv_format", "choice"),
    cover_values(
        ["fp8_tensor", "int8_token_head", "int4_token_head"],
        [{"max_chosen": 5, "num_choosers": 2}, {"max_chosen": 2, "block_size": 4}],
    ),
)
def test_chosen_tokens_are_read_in_every_format(kv_format: str, choice: dict[str, int]) -> None:
    stored_format = load_plugins().registry.formats.load(kv_format)()
    choosing_layer = layer(choice=choice, format=stored_format)
    check_backend(TritonBackend, Case(name=kv_format, layer=choosing_layer, requests=(Request(20, 1), Request(3, 6))))


@interpreted
def test_many_chosen_tokens_are_divided_over_programs_and_fewer_may_be_given() -> None:
    spec = layer(choice={"max_chosen": 600})
    served = TritonBackend([spec], torch.device("cpu"))
    built = served.make_builder().build(make_metadata([Request(39, 1), Request(18, 1)], 16))
    assert all(programs.num_splits for programs in built.programs)
    generator = torch.Generator().manual_seed(0)
    cache = {name: torch.randn(9, 16, 2, 8, generator=generator) for name in ("k", "v")}
    query = torch.randn(2, 4, 8, generator=generator)
    few = torch.tensor([[[38, 4, 17]], [[2, 18, 9]]], dtype=torch.int32)
    results = []
    for indices in (few, torch.nn.functional.pad(few, (297, 300), value=-1)):
        lse, more = torch.empty(2, 4), MoreInputs(chosen=ChosenTokens(indices))
        results.append((served.attend(spec, query, cache, built, lse=lse, more=more), lse))
    for narrow, wide in zip(*results, strict=True):
        torch.testing.assert_close(narrow, wide)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_it_runs_on_cuda_devices_only_and_says_so() -> None:
    assert ["device"] == [refusal.code for refusal in find_refusals(TritonBackend.capabilities, layer(), "cpu")]
    assert load_plugins().registry.backends.load("triton") is TritonBackend
    expected = None if torch.cuda.is_available() else "needs a CUDA device; torch sees none"
    assert expected == TritonBackend.unusable_reason()


def test_a_mask_that_only_live_ranges_say_is_refused() -> None:
    refused = find_refusals(TritonBackend.capabilities, layer(stride=6), "cuda")
    assert ["mask_live_range"] == [refusal.code for refusal in refused]


def test_queries_that_lie_apart_are_read_as_they_are() -> None:
    served = TritonBackend([layer()], torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    built = Staging(served.device).to_device(build([Request(0, 3)], served.device.type))
    cache = {name: torch.ones(9, 16, 2, 8, device=served.device) for name in ("k", "v")}
    query = torch.ones(3, 8, 4, device=served.device).transpose(1, 2)
    assert torch.equal(torch.ones_like(query), served.attend(layer(), query, cache, built))


@pytest.mark.parametrize(
    "options",
    [
        {"window": 2**31},
        {"window": 2**40, "num_sink_tokens": 2**31},
        {"window": 5, "num_sink_tokens": 2**31},
        {"chunk": 2**31},
        {"scale": 0.0},
        {"scale": 0.0, "window": 3},
        {"scale": 0.0, "soft_cap": 2.0},
        {"scale": -0.5, "soft_cap": 2.0, "has_sinks": True},
    ],
    ids=str,
)
def test_masks_longer_than_any_sequence_and_scales_of_any_sign_are_served(options: dict[str, Any]) -> None:
    layer = make_layer(TritonBackend.capabilities, **options)
    check_backend(TritonBackend, Case(name="edge", layer=layer, requests=(Request(20, 1), Request(3, 6))))
