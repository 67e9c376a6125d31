"""The kit finds every mistake of a list in what the documented loop runs, and finds none in the right backend."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch

from kvframe.contract.backend import AttentionBackend
from kvframe.testing.conformance import check_backend
from kvframe.testing.grid import make_cases
from kvframe.testing.laws import ConformanceError
from kvframe.testing.runs import make_runs, sample_runs
from kvframe.testing.serving import check_run
from tests.testing.mutant_backends import MISTAKES
from tests.testing.plain_backend import PlainBackend

Check = Callable[[type[AttentionBackend]], None]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def loop(backend: type[AttentionBackend] = PlainBackend) -> dict[str, Check]:
    """Everything that docs/write_a_backend.md says to run for a backend, by name."""
    cases: dict[str, Check] = {
        case.name: partial(check_backend, case=case) for case in make_cases(backend.capabilities)
    }
    runs = sample_runs(make_runs(backend.capabilities))
    return {**cases, **{run.name: partial(check_run, run=run) for run in runs}}


LOOP = loop()
FIRST = {mistake: next(name for name in LOOP if where in name) for mistake, (_, where, _) in MISTAKES.items()}
"""The part of the loop that shows a mistake: run first, so that it is found without the others."""


def test_the_list_is_long() -> None:
    assert 40 <= len(MISTAKES)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_loop_finds_a_mistake(mistake: str) -> None:
    wrong, _, message = MISTAKES[mistake]
    with pytest.raises(ConformanceError, match=message):
        LOOP[FIRST[mistake]](wrong)


@pytest.mark.parametrize("name", sorted({*FIRST.values(), *itertools.islice(LOOP, 0, None, 25)}))
def test_the_loop_finds_nothing_in_the_backend_without_a_mistake(name: str) -> None:
    LOOP[name](PlainBackend)
