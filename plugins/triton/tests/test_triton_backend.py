"""The backend computes what attention is, on every kind of batch, mask and format that it declares."""

from __future__ import annotations

import pytest
import torch
from kvframe_triton.backend import TritonBackend
from triton import knobs

from kvframe.testing.case import Case
from kvframe.testing.conformance import check_backend
from kvframe.testing.grid import make_cases

CASES = make_cases(TritonBackend.capabilities, "cuda")
STRIDE = 7
"""The interpreter takes about a second for a case: each kind of mask and each kind of batch comes up several times."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.skipif(not knobs.runtime.interpret, reason="a CUDA device is there, on which all cases are run")
@pytest.mark.parametrize("case", CASES[::STRIDE], ids=lambda case: case.name)
def test_it_computes_the_grid_under_the_interpreter(case: Case) -> None:
    check_backend(TritonBackend, case)


@pytest.mark.gpu
@pytest.mark.parametrize("poison", [float("nan"), 1e4], ids=["nan", "large"])
def test_it_computes_the_grid_on_a_gpu(poison: float) -> None:
    for case in CASES:
        check_backend(TritonBackend, case, "cuda", poison=poison)
