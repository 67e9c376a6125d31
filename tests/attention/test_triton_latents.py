"""The Triton backend for latents gives the output of attention over expanded latents; here under the interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import attrs
import pytest
import torch
from kvframe_kernels.triton.launch import Launch
from kvframe_kernels.triton.mla import LatentAttention
from kvframe_mla import MLASpec
from kvframe_mla.testing import Latents
from kvframe_testing.case import Case, Request
from kvframe_testing.conformance import check_backend
from kvframe_testing.grid import make_cases
from kvframe_testing.hosts import OtherHost
from kvframe_testing.metadata import make_metadata
from kvframe_testing.runs import Run, make_runs, sample_runs
from kvframe_testing.sample import sample
from kvframe_testing.serving import check_run
from kvframe_testing.staging import check_staging
from kvframe_triton import latents_builder
from kvframe_triton.latents import TritonMLABackend
from triton import knobs

from kvframe.contract import LayerSpec, QuerySpec
from tests.covering import few

CASES = make_cases(TritonMLABackend.capabilities, "cuda", form=Latents())
FEW = sample(CASES, ())
"""A part of the cases, because the interpreter is slow; every kind of batch and every size occurs."""

RUNS = make_runs(TritonMLABackend.capabilities, "cuda", form=Latents())

interpreted = pytest.mark.skipif(
    not knobs.runtime.interpret, reason="a CUDA device is there, on which all cases are run"
)


@interpreted
@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_it_computes_some_of_the_grid_under_the_interpreter(case: Case) -> None:
    check_backend(TritonMLABackend, case)


@interpreted
@pytest.mark.parametrize("layout", ["apart", "interleaved"])
def test_it_serves_another_host_under_the_interpreter(layout: str) -> None:
    host = OtherHost(layout)
    check_backend(TritonMLABackend, FEW[0] if layout == "apart" else FEW[-1], host=host)
    assert (0, True) == (host.num_copies, host.num_outputs > 0)


@interpreted
@pytest.mark.parametrize("run", few(1, sample_runs(RUNS, ["head_size"])), ids=lambda run: run.name)
def test_it_serves_two_layers_and_steps_at_real_sizes_under_the_interpreter(run: Run) -> None:
    check_run(TritonMLABackend, run)


@interpreted
@pytest.mark.whole
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_it_serves_every_run_under_the_interpreter(run: Run) -> None:
    check_run(TritonMLABackend, run)


@pytest.mark.gpu
def test_it_serves_every_run_on_a_gpu() -> None:
    for run in RUNS:
        check_run(TritonMLABackend, run, "cuda")


@interpreted
@pytest.mark.whole
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_computes_the_whole_grid_under_the_interpreter(case: Case) -> None:
    check_backend(TritonMLABackend, case)


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(8))
def test_it_computes_the_grid_on_a_gpu(part: int) -> None:
    for case in CASES[part::8]:
        check_backend(TritonMLABackend, case, "cuda")


@pytest.mark.gpu
def test_finite_values_where_nothing_is_live_change_nothing_on_a_gpu() -> None:
    for case in FEW:
        check_backend(TritonMLABackend, case, "cuda", poison=1e4)


@pytest.mark.parametrize("most", [1, None], ids=["expanded", "absorbed"])
def test_what_a_step_needs_is_in_its_one_copy_and_nobody_waits(
    most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Launch] = []
    monkeypatch.setattr(Launch, "run", lambda launch: launched.append(launch))
    monkeypatch.setattr(latents_builder.Forms, "most_absorbed", most)
    check_staging(TritonMLABackend)
    assert launched


def few_cases() -> list[Case]:
    return [case for case in CASES if case.name.startswith(("full-block=17", "full-long_values"))][::4]


@interpreted
@pytest.mark.parametrize("most", [1, None], ids=["expanded", "absorbed"])
def test_each_form_computes_what_the_other_does(most: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latents_builder.Forms, "most_absorbed", most)
    # One head's keys and values are in memory at a time.
    monkeypatch.setattr(latents_builder, "MAX_EXPANDED", 1)
    for case in few_cases():
        check_backend(TritonMLABackend, case)


@interpreted
def test_each_form_sees_to_the_ends_of_its_own_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first request is absorbed, and the second one is expanded and computed in several tiles.
    monkeypatch.setattr(latents_builder.Forms, "most_absorbed", 40)
    layer = next(case.layer for case in CASES if case.name.startswith("full-block=17"))
    requests = Request(3, 40, ranges=((5, 30),)), Request(2, 148, ranges=((50, 140),))
    check_backend(TritonMLABackend, attrs.evolve(CASES[0], name="ranges", layer=layer, requests=requests))


def test_up_to_170_queries_of_deepseek_v3_attend_to_latents() -> None:
    latents = LatentAttention(num_heads=128, latent_size=512, rope_size=64, block_size=16, scale=1.0)
    forms = latents_builder.Forms(latents=latents, nope_size=128, head_size_v=128)
    assert 170 == forms.most_absorbed
    assert [128, 32, 1] == [forms.heads_at_once(num_tokens) for num_tokens in (1000, 8192, 1 << 20)]
    small = latents_builder.Forms(latents=replace(latents, latent_size=128), nope_size=128, head_size_v=128)
    assert small.most_absorbed is None


def test_decodes_are_absorbed_and_prompts_are_expanded() -> None:
    builder = TritonMLABackend([layer()], torch.device("meta")).make_builder()
    assert builder.on_host is not None
    assert builder.batch_order is not None
    decodes = builder.build(make_metadata([Request(30, 1), Request(5, 2)], 4))
    assert (3, None) == (decodes.num_absorbed, decodes.expanded)
    mixed = builder.build(make_metadata([Request(30, 1), Request(9, 20), Request(0, 30)], 4))
    assert 1 == mixed.num_absorbed
    assert mixed.expanded is not None
    table = make_metadata([Request(30, 1), Request(9, 20), Request(0, 30)], 4).block_table
    assert [*table[1, :8].tolist(), *table[2, :8].tolist()] == mixed.expanded.pages.tolist()
    assert [[*range(8)], [*range(8, 16)]] == mixed.expanded.metadata.block_table.tolist()


def layer(**options: Any) -> LayerSpec:
    spec = MLASpec(block_size=4, latent_size=16, rope_size=4, head_size_v=8)
    return LayerSpec(
        name="layer", spec=spec, query=QuerySpec(**{"num_heads": 4, "head_size": 12, "scale": 1, **options})
    )
