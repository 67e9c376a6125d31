"""The kit, run as documented, finds every bug of a list of backends, and none in the correct backend."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
from kvframe_testing.conformance import check_backend
from kvframe_testing.grid import make_cases
from kvframe_testing.laws import ConformanceError
from kvframe_testing.runs import make_runs, sample_runs
from kvframe_testing.serving import check_run

from kvframe.contract.backend import AttentionBackend
from tests.testing.mutant_backends import MISTAKES
from tests.testing.plain_backend import PlainBackend

Check = Callable[[type[AttentionBackend]], None]


def loop(backend: type[AttentionBackend] = PlainBackend) -> dict[str, Check]:
    """Return the checks that docs/write_a_backend.md tells authors to run, by name."""
    cases: dict[str, Check] = {
        case.name: partial(check_backend, case=case) for case in make_cases(backend.capabilities)
    }
    runs = sample_runs(make_runs(backend.capabilities))
    return {**cases, **{run.name: partial(check_run, run=run) for run in runs}}


LOOP = loop()
FIRST = {mistake: next(name for name in LOOP if where in name) for mistake, (_, where, _) in MISTAKES.items()}
"""The check that finds a bug: it runs first, so that the others need not run."""


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
