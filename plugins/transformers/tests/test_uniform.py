"""Tensors without data that are filled with one number are known, and what changes one of them makes it unknown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from kvframe_transformers.uniform import AnyIndex, UniformTensors
from torch.utils._python_dispatch import TorchDispatchMode


class Noting(TorchDispatchMode):
    """Records every operation."""

    def __init__(self, uniform: UniformTensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._uniform = uniform

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._uniform.note(func, args, kwargs or {}, result)
        return result


def number_of(make: Callable[[], torch.Tensor]) -> Any:
    uniform = UniformTensors()
    with Noting(uniform), torch.device("meta"):
        tensor = make()
    number = uniform.number_of(tensor)
    return None if number is None else number.item()


def changed_in_place() -> torch.Tensor:
    tensor = torch.zeros(2, 3)
    tensor[:, 0] = 1
    return tensor


def unchanged_in_place() -> torch.Tensor:
    tensor = torch.zeros(2, 3, dtype=torch.bool)
    tensor[..., 0] = False
    return tensor


@pytest.mark.parametrize(
    ("expected", "make"),
    [
        (-1, lambda: torch.full([1, 4], -1)),
        (0, lambda: torch.zeros_like(torch.empty(1, 4, 2), dtype=torch.int32)[..., 0].unsqueeze(0).expand(3, 1, 4)),
        (-1, lambda: torch.where(torch.zeros(4) == 1, 0, -1)),
        (True, lambda: (torch.ones(4) * 3 > 2).clone()),
        (2.0, lambda: torch.full((4,), 2).to(torch.float32)),
        (False, unchanged_in_place),
        (None, changed_in_place),
        (None, lambda: torch.empty(4)),
        (None, lambda: torch.arange(4)),
        (None, lambda: torch.zeros(4) + torch.empty(4)),
        (None, lambda: torch.zeros(4).add_(torch.empty(4))),
        (None, lambda: torch.zeros(4).add_(1)),
        (None, lambda: torch.zeros(4).view(torch.int32)),
        (None, lambda: torch.add(torch.ones(4), torch.ones(4), out=torch.zeros(4))),
    ],
)
def test_a_number_is_known_only_if_all_numbers_are_the_same(expected: Any, make: Callable[[], torch.Tensor]) -> None:
    assert expected == number_of(make)


def test_a_known_number_is_found_at_any_index() -> None:
    uniform = UniformTensors()
    with Noting(uniform), torch.device("meta"):
        uniform_tensor, unknown = torch.full([1, 4], -1), torch.empty(1, 4)
    zero, far = torch.tensor(0), torch.arange(100, 103)
    with AnyIndex(uniform):
        assert [-1, -1, -1] == uniform_tensor[zero, far].tolist()
        assert unknown[zero, far].is_meta
