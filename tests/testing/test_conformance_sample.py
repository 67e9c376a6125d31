"""A sample of the grid is small, and contains every trait of the grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from kvframe_testing.case import Case
from kvframe_testing.grid import make_cases
from kvframe_testing.laws import ConformanceError
from kvframe_testing.runs import SERVED, make_runs, make_steps, run_traits, sample_runs
from kvframe_testing.sample import TOGETHER, sample, traits

from kvframe.contract.capabilities import Capabilities
from kvframe.selection.refusals import find_refusals

CASES = make_cases(
    Capabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({"float32", "bfloat16"}),
        masks=frozenset({"causal", "bidirectional", "window", "sink_tokens", "chunk"}),
        soft_cap=True,
        sinks=True,
        relative_bias=True,
        alibi=True,
    )
)
SAMPLE = sample(CASES)


def come_up(names: Sequence[str], cases: Sequence[Case]) -> set[object]:
    return {tuple(traits(case)[name] for name in names) for case in cases}


def test_few_of_the_cases_are_enough() -> None:
    assert len(SAMPLE) <= len(CASES) / 6
    assert [*SAMPLE] == sorted(SAMPLE, key=CASES.index)


@pytest.mark.parametrize("name", traits(CASES[0]))
def test_whatever_comes_up_in_the_grid_comes_up_in_a_sample(name: str) -> None:
    assert come_up([name], CASES) == come_up([name], SAMPLE)


@pytest.mark.parametrize("names", TOGETHER, ids="-".join)
def test_what_kernels_treat_together_comes_up_together(names: tuple[str, str]) -> None:
    assert come_up(names, CASES) == come_up(names, SAMPLE)


def test_other_pairs_may_be_asked_for() -> None:
    names = "bias", "dtype"
    assert come_up(names, CASES) == come_up(names, sample(CASES, [names]))
    assert 4 < len(come_up(names, CASES))


def test_batches_are_told_apart_by_what_requests_do() -> None:
    start = "bidirectional-block=16-"
    batches = {case.name.removeprefix(start): traits(case)["batch"] for case in CASES if case.name.startswith(start)}
    kinds = [batches[name] for name in ("prefill", "extend", "decode", "mixed", "cross_decode", "cross_without_keys")]
    assert 6 == len(set(kinds))


# --- runs -------------------------------------------------------------------------------------------------------------

CAPABILITIES = Capabilities(
    devices=frozenset({"cpu"}),
    dtypes=frozenset({"float32", "bfloat16"}),
    masks=frozenset({"causal", "bidirectional", "window", "sink_tokens", "chunk"}),
    soft_cap=True,
    sinks=True,
)
RUNS = [run for run in make_runs(CAPABILITIES) if run.kind not in SERVED]


@pytest.mark.parametrize("name", run_traits(RUNS[0]))
def test_whatever_comes_up_in_the_runs_comes_up_in_a_sample_of_them(name: str) -> None:
    assert {run_traits(run)[name] for run in RUNS} == {run_traits(run)[name] for run in sample_runs(RUNS)}
    assert len(sample_runs(RUNS)) <= 10


def test_runs_have_the_sizes_of_real_models() -> None:
    assert {64, 128, 256} == {run_traits(run)["head_size"] for run in RUNS}
    assert {1, 4, 8} == {run_traits(run)["num_kv_heads"] for run in RUNS}
    assert {(32, 17, 17)} == {(run.case(run.layers[0], 0).query.num_heads, *map(len, run.steps)) for run in RUNS}


def test_a_second_step_goes_on_with_most_of_the_requests_of_the_first_and_has_others() -> None:
    for first, second in make_steps(16).values():
        stayed = first.keys() & second.keys()
        assert (14, 3) == (len(stayed), len(second.keys() - first.keys()))
        assert all(first[name].seq_len == second[name].num_computed for name in stayed)


@pytest.mark.parametrize("limits", [{"head_sizes": frozenset({80, 96})}, {"block_size_multiple": 256}])
def test_runs_keep_to_what_a_backend_is_limited_to(limits: dict[str, Any]) -> None:
    limited = attrs.evolve(CAPABILITIES, **limits)
    for run in make_runs(limited):
        assert [[] for _ in run.layers] == [find_refusals(limited, layer, "cpu") for layer in run.layers]


def test_a_backend_that_no_run_is_for_is_refused() -> None:
    with pytest.raises(ConformanceError, match="serves no layer of the runs"):
        make_runs(CAPABILITIES, "cuda")
