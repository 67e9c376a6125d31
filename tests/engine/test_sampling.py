"""Sampling: greedy and drawn tokens, each row independent of the others."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvframe_engine.requests.request import Request, SamplingParams
from kvframe_engine.running.next_tokens import FAILED, draw_full, draw_truncated, sample

from kvframe.contract.errors import RequestError

LARGEST_UNIFORM = 1 - 2**-53


def request(**params: Any) -> Request:
    return Request.create("r", [1], SamplingParams(**params), eos_token_ids=frozenset(), max_model_len=1000)


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


def probabilities(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def truncated(
    row: list[float], uniform: float, top_k: int = 1000, top_p: float = 1.0, min_p: float = 0.0, typical_p: float = 1.0
) -> int:
    limits = map(column, (top_k, top_p, min_p, typical_p))
    token_id: int = draw_truncated(probabilities(row), column(uniform), *limits).item()  # type: ignore[assignment]
    return token_id


def next_token(logits: torch.Tensor, drawn: Request) -> int:
    (token_id,) = sample(logits, [drawn])
    drawn.take(token_id)
    return token_id


LOGITS = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=12)
UNIFORMS = st.floats(0, LARGEST_UNIFORM)


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 1.0, 2.0]])
    assert [1, 0] == sample(logits, [request(), request()])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_greedy_tokens_are_those_of_torch_in_every_dtype(dtype: torch.dtype) -> None:
    logits = torch.randn(24, 333, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[3, [7, 300]] = 50.0
    logits[5, 332] = math.nan
    logits[6, [0, 40]] = math.inf
    expected = logits.argmax(dim=-1).tolist()
    assert 7 == expected[3]
    expected[5] = expected[6] = FAILED
    assert expected == sample(logits, [request()] * 24)


def test_a_uniform_number_is_looked_up_in_the_cumulative_distribution() -> None:
    row = [0.25, 0.5, 0.25]
    assert [0, 1, 1, 2] == draw_full(probabilities(row, row, row, row), column(0.2, 0.25, 0.7, 0.75)).tolist()


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    row = [0.0, 1.0, 0.0]
    assert [1, 1] == draw_full(probabilities(row, row), column(0.0, LARGEST_UNIFORM)).tolist()


def test_top_k_keeps_the_most_likely_and_the_earlier_of_equals() -> None:
    row = [0.1, 0.3, 0.3, 0.3]
    assert {1, 2} == {truncated(row, uniform, top_k=2) for uniform in (0.0, 0.3, 0.6, LARGEST_UNIFORM)}


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    row = [0.125, 0.5, 0.25, 0.125]
    assert [1, 1] == [truncated(row, uniform, top_p=0.5) for uniform in (0.0, LARGEST_UNIFORM)]
    assert [1, 2] == [truncated(row, uniform, top_p=0.51) for uniform in (0.0, LARGEST_UNIFORM)]


def test_top_p_is_of_what_top_k_leaves() -> None:
    # Of 0.4 and 0.3, the first has 57 %.
    row = [0.4, 0.3, 0.2, 0.1]
    assert 0 == truncated(row, LARGEST_UNIFORM, top_k=2, top_p=0.5)


def test_frequencies_follow_the_probabilities() -> None:
    drawn = request(temperature=0.5, seed=0)
    logits = torch.tensor([[0.0, 0.5 * math.log(3.0)]])
    ones = sum(next_token(logits, drawn) for _ in range(4000))
    assert 0.75 == pytest.approx(ones / 4000, abs=0.02)


@pytest.mark.parametrize("params", [{"top_k": 2}, {"top_p": 0.6}, {"top_k": 3, "top_p": 0.7}], ids=str)
def test_a_request_draws_only_among_what_its_parameters_keep(params: dict[str, Any]) -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    drawn = request(temperature=1.0, seed=0, **params)
    assert {1, 3} == {next_token(logits, drawn) for _ in range(100)}


@given(LOGITS)
def test_a_tiny_temperature_is_greedy(logits: list[float]) -> None:
    row = torch.tensor([logits])
    token_id = sample(row, [request(temperature=1e-320, seed=1)])[0]
    assert max(logits) == logits[token_id]


@given(LOGITS, UNIFORMS, st.integers(1, 12), st.floats(0.01, 1))
def test_a_drawn_token_is_among_those_kept(logits: list[float], uniform: float, top_k: int, top_p: float) -> None:
    row = torch.tensor(logits, dtype=torch.float64).softmax(-1)
    token_id = truncated(row.tolist(), uniform, top_k, top_p)
    more_likely = row[row > row[token_id]]
    assert row[token_id] > 0
    assert len(more_likely) < top_k
    kept = row.sort(descending=True).values[:top_k].sum()
    assert more_likely.sum() < top_p * kept + 1e-12


@given(st.lists(st.tuples(LOGITS, st.integers(0, 3), st.sampled_from([0.5, 1.0]), st.integers(0, 9)), max_size=5))
def test_a_row_does_not_depend_on_its_neighbours(rows: list[tuple[list[float], int, float, int]]) -> None:
    def requests() -> list[Request]:
        return [request(temperature=0.8, top_k=k, top_p=p, seed=seed) for _, k, p, seed in rows]

    logits = torch.full((len(rows) + 1, 12), -math.inf)
    logits[-1, 3] = 1.0
    for index, (values, *_) in enumerate(rows):
        logits[index, : len(values)] = torch.tensor(values)
    together = sample(logits, [*requests(), request()])
    alone = [sample(logits[index : index + 1], [one])[0] for index, one in enumerate(requests())]
    assert [*alone, 3] == together


def test_rows_that_are_not_numbers_fail_alone() -> None:
    logits = torch.tensor([[0.0, math.nan], [0.0, 1.0], [-math.inf, -math.inf], [math.inf, 0.0]])
    requests = [request(), request(), request(temperature=1.0), request(temperature=1.0, top_k=1)]
    assert [FAILED, 1, FAILED, FAILED] == sample(logits, requests)


@pytest.mark.parametrize(
    "params",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": True},
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": "hot"},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"seed": -1},
        {"stop": [""]},
        {"stop": [3]},
        {"stop_token_ids": ["x"]},
    ],
    ids=str,
)
def test_wrong_parameters_are_refused_by_name(params: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(params))) as refusal:
        SamplingParams(**params)
    assert "bad_params" == refusal.value.code


def test_one_stop_string_may_stand_alone() -> None:
    assert ("end",) == SamplingParams(stop="end").stop


def test_the_most_typical_tokens_are_those_nearest_to_the_entropy() -> None:
    # The entropy is 0.90; the information of the tokens is 0.47, 1.39 and 2.08.
    row = [0.625, 0.25, 0.125]
    assert [0] * 4 == [truncated(row, uniform, typical_p=0.625) for uniform in (0.0, 0.5, 0.9, LARGEST_UNIFORM)]
    assert [0, 1] == [truncated(row, uniform, typical_p=0.626) for uniform in (0.5, LARGEST_UNIFORM)]


def test_min_p_leaves_the_tokens_of_that_share_of_the_greatest() -> None:
    row = [0.5, 0.25, 0.125, 0.125]
    assert [0, 1, 1] == [truncated(row, uniform, min_p=0.5) for uniform in (0.5, 0.7, LARGEST_UNIFORM)]
    assert [0, 0] == [truncated(row, uniform, min_p=1.0) for uniform in (0.0, LARGEST_UNIFORM)]
