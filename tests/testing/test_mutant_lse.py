"""The kit finds every bug in a backend's log-sum-exp, and none in a correct one."""

from __future__ import annotations

import itertools

import pytest

from kvframe.testing.conformance import check_backend
from kvframe.testing.grid import make_cases
from kvframe.testing.laws import ConformanceError
from kvframe.testing.sample import sample
from tests.testing.lse_backends import MISTAKES, LseBackend

CASES = {case.name: case for case in make_cases(LseBackend.capabilities)}
SAMPLED = sample([*CASES.values()])


def first(where: str) -> str:
    """Return the first case that finds a bug: it runs first, so that the others need not run."""
    return next(name for name in CASES if where in name)


def check_sample(backend: type[LseBackend]) -> None:
    for case in SAMPLED:
        check_backend(backend, case)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_kit_finds_a_mistake(mistake: str) -> None:
    wrong, where, message = MISTAKES[mistake]
    with pytest.raises(ConformanceError, match=message):
        check_backend(wrong, CASES[first(where)])


@pytest.mark.parametrize(
    "name", sorted({*(first(where) for _, where, _ in MISTAKES.values()), *itertools.islice(CASES, 0, None, 50)})
)
def test_the_kit_finds_nothing_in_the_backend_without_a_mistake(name: str) -> None:
    check_backend(LseBackend, CASES[name])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_sample_of_the_cases_finds_a_mistake_too(mistake: str) -> None:
    wrong, _, message = MISTAKES[mistake]
    with pytest.raises(ConformanceError, match=message):
        check_sample(wrong)
