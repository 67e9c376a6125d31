"""The kit finds every bug in a backend's log-sum-exp, and none in a correct one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from kvframe_testing.conformance import check_backend
from kvframe_testing.grid import make_cases
from kvframe_testing.laws import ConformanceError
from kvframe_testing.runs import make_runs
from kvframe_testing.sample import sample
from kvframe_testing.serving import check_run
from kvframe_testing.staging import check_staging
from kvframe_torch.backend import TorchBackend

from tests.covering import few
from tests.testing.lse_backends import MISTAKES, LseBackend

CASES = {case.name: case for case in make_cases(LseBackend.capabilities)}
RUNS = {run.name: run for run in make_runs(LseBackend.capabilities)}
SAMPLED = sample([*CASES.values()])

LOOP: dict[str, Callable[..., None]] = {
    **{name: partial(check_backend, case=case) for name, case in CASES.items()},
    **{name: partial(check_run, run=run) for name, run in RUNS.items()},
}
FIRST = {mistake: next(name for name in LOOP if where in name) for mistake, (_, where, _) in MISTAKES.items()}
"""The first check that finds a bug: it runs first, so that the others need not run."""


def check_sample(backend: type[LseBackend]) -> None:
    for case in SAMPLED:
        check_backend(backend, case)


def test_the_list_is_long() -> None:
    assert 24 <= len(MISTAKES)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_kit_finds_a_mistake(mistake: str) -> None:
    wrong, _, message = MISTAKES[mistake]
    with pytest.raises(ConformanceError, match=message):
        LOOP[FIRST[mistake]](wrong)


@pytest.mark.parametrize("name", sorted({*FIRST.values(), *itertools.islice(CASES, 0, None, 50)}))
def test_the_kit_finds_nothing_in_the_backend_without_a_mistake(name: str) -> None:
    LOOP[name](LseBackend)


IN_CASES = [mistake for mistake, name in FIRST.items() if name in CASES]


@pytest.mark.parametrize("mistake", few(4, IN_CASES))
def test_a_sample_of_the_cases_finds_a_mistake_too(mistake: str) -> None:
    wrong, _, message = MISTAKES[mistake]
    with pytest.raises(ConformanceError, match=message):
        check_sample(wrong)


# --- a device that must not be waited for -----------------------------------------------------------------------------


class Waits(TorchBackend):
    def attend(self, *arguments: Any, lse: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        output = super().attend(*arguments, lse=lse, **options)
        return output if lse is None or lse.isfinite().all() else output.nan_to_num()


class CopiesItself(TorchBackend):
    def attend(self, *arguments: Any, lse: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        output = super().attend(*arguments, lse=lse, **options)
        return output if lse is None else output + torch.zeros(1).to(lse.device)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Waits, "Waits on decodes, stored as plain, asks the device for a value"),
        (CopiesItself, r"CopiesItself on decodes, stored as plain, makes [0-9]+ copies to the device"),
    ],
)
def test_a_step_with_the_log_sum_exp_is_staged_as_one_without(wrong: type[TorchBackend], message: str) -> None:
    with pytest.raises(ConformanceError, match=message):
        check_staging(wrong)
