"""Both built-in backends on everything that they declare, and the conformance kit on backends that are wrong."""

from __future__ import annotations

import pytest
import torch

from kvframe.attention.backend import AttentionBackend
from kvframe.builtin.torch_backend import TorchBackend
from kvframe.builtin.torch_reference import TorchReferenceBackend
from kvframe.testing.conformance import check_backend
from kvframe.testing.grid import Case, make_cases

BACKENDS = (TorchBackend, TorchReferenceBackend)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        pytest.param(backend, case, id=f"{backend.__name__}-{case.name}")
        for backend in BACKENDS
        for case in make_cases(backend.capabilities)
    ],
)
def test_a_backend_computes_what_it_declares(backend: type[AttentionBackend], case: Case) -> None:
    check_backend(backend, case)
