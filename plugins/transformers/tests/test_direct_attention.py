"""Attention that a module computes itself becomes one call, and what else it computes of its scores is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kvframe_transformers.direct_attention import DirectAttention, replacing
from torch import nn
from torch.nn.functional import dropout, softmax

from kvframe.contract import ModelError

QUERY, KEY, VALUE = torch.randn(3, 1, 2, 5, 4, generator=torch.Generator().manual_seed(0)).unbind()
HIDDEN = torch.ones(5, 5, dtype=torch.bool).triu(1)
BIAS = torch.arange(25.0).view(1, 1, 5, 5)


def by_operators(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    scores = query @ key.transpose(2, 3)
    scores = scores / 2
    scores += BIAS
    scores.masked_fill_(HIDDEN.expand_as(scores), float("-inf"))
    return dropout(nn.Softmax(dim=-1)(scores).type_as(value), 0.1, training=False) @ value


def by_functions(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    scores = torch.mul(torch.matmul(query, key.transpose(2, 3)), 0.5)
    scores = torch.where(~HIDDEN, torch.add(scores, BIAS), torch.tensor(float("-inf")))
    return torch.matmul(softmax(scores.float(), dim=-1).to(value.dtype), value)


def test_a_sum_with_products_is_a_scale_and_what_is_added() -> None:
    slopes = torch.ones(2, 1, 5)
    calls: list[DirectAttention] = []

    def attend(of: DirectAttention, value: torch.Tensor) -> torch.Tensor:
        calls.append(of)
        return value + 1

    def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        scores = slopes.baddbmm(batch1=query, batch2=key.mT, beta=1.0, alpha=0.5)
        return torch.bmm(softmax(scores.view(1, 2, 5, 5) + BIAS, dim=-1).view(2, 5, 5), value)

    assert torch.equal(VALUE[0] + 1, replacing(forward, attend)(QUERY[0], KEY[0], VALUE[0]))
    (of,) = calls
    assert torch.equal(QUERY, of.query)
    assert torch.equal(KEY, of.key)
    assert 0.5 == of.scale
    assert of.added[0] is slopes
    assert of.added[1] is BIAS


def test_a_sum_with_zeros_adds_nothing() -> None:
    calls: list[DirectAttention] = []

    def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        scores = torch.baddbmm(torch.zeros(2, 5, 5), query, key.mT, beta=1.0, alpha=0.5)
        return torch.bmm(softmax(scores, dim=-1), value)

    replacing(forward, lambda of, value: (calls.append(of), value)[1])(QUERY[0], KEY[0], VALUE[0])  # type: ignore[func-returns-value]
    assert [(0.5, ())] == [(of.scale, of.added) for of in calls]


def test_a_scale_after_a_sum_is_a_factor_on_what_was_added_too() -> None:
    calls: list[DirectAttention] = []

    def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.matmul(((torch.matmul(query, key.mT) + BIAS) / 2).softmax(-1), value)

    replacing(forward, lambda of, value: (calls.append(of), value)[1])(QUERY, KEY, VALUE)  # type: ignore[func-returns-value]
    assert [(0.5, True)] == [(of.scale, of.scales_added) for of in calls]


@pytest.mark.parametrize("forward", [by_operators, by_functions])
def test_the_call_has_what_the_module_computed(forward: Callable[..., torch.Tensor]) -> None:
    calls: list[tuple[DirectAttention, torch.Tensor]] = []

    def attend(of: DirectAttention, value: torch.Tensor) -> torch.Tensor:
        calls.append((of, value))
        return value + 1

    assert torch.equal(VALUE + 1, replacing(forward, attend)(QUERY, KEY, VALUE))
    ((of, value),) = calls
    assert of.query is QUERY
    assert value is VALUE
    assert torch.equal(KEY, of.key)
    assert (0.5, 2, True) == (of.scale, len(of.added), of.is_normalized)
    assert of.added[0] is BIAS


@pytest.mark.parametrize(
    ("what", "compute"),
    [
        ("topk", lambda scores: scores.topk(2).values),
        ("mul", lambda scores: scores.softmax(-1) * 2),
        ("add", lambda scores: scores.softmax(-1) + BIAS),
        ("matmul", lambda scores: scores @ VALUE),
    ],
)
def test_another_operation_is_refused(what: str, compute: Callable[[torch.Tensor], Any]) -> None:
    forward = replacing(lambda: compute(QUERY @ KEY.transpose(2, 3)), lambda of, value: value)
    with pytest.raises(ModelError, match=f"computes '{what}' of its attention scores"):
        forward()
