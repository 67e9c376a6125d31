"""The backend computes attention on every kind of batch and mask in its capabilities."""

from __future__ import annotations

import pytest
import torch
from kvframe_kernels.jit import plan
from kvframe_numba.backend import NumbaBackend
from kvframe_testing.case import Case
from kvframe_testing.conformance import check_backend
from kvframe_testing.grid import make_cases
from kvframe_testing.sample import sample
from kvframe_testing.suites import BackendTests

CASES = make_cases(NumbaBackend.capabilities)
FEW = sample(CASES)
"""A sample of the cases with every trait of the grid."""


def check_in_parts(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a case with work split over threads and tokens, as usually only large cases have it."""
    monkeypatch.setattr(plan, "SMALL", 0)
    monkeypatch.setattr(plan, "MIN_PART_TOKENS", 3)
    torch.set_num_threads(3)
    try:
        check_backend(NumbaBackend, case, poison=1e4)
    finally:
        torch.set_num_threads(1)


class TestNumba(BackendTests):
    backend = "numba"
    writes_out = True


@pytest.mark.parametrize("case", FEW[::4], ids=lambda case: case.name)
def test_split_over_threads_and_tokens_it_computes_the_same(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check_in_parts(case, monkeypatch)


@pytest.mark.whole
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_split_it_computes_the_whole_grid(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check_in_parts(case, monkeypatch)
