"""A packed step: the wanted rows of its logits and their use, compared with a token-by-token definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvframe_engine.requests.request import Request, SamplingParams
from kvframe_engine.running.model_runner import are_last_tokens
from kvframe_engine.scheduling.step import PackedStep, ScheduledStep

from kvframe import Engine, Setup, Stack, load_plugins
from kvframe.attention.batch_metadata import StepBatch
from tests.engine.scripted_model import ScriptedModel
from tests.support.backends import DecodesFirst
from tests.support.plugins import plugin


@st.composite
def scheduled_steps(draw: Any) -> ScheduledStep[Request]:
    """Steps of requests within or after their prompts, including preempted ones."""
    requests = []
    for row in draw(st.permutations(range(draw(st.integers(1, 5))))):
        num_prompt, num_generated = draw(st.integers(1, 8)), draw(st.integers(0, 3))
        params = SamplingParams(prompt_logprobs=draw(st.booleans()))
        request = Request.create(
            str(row), list(range(num_prompt)), params, eos_token_ids=frozenset(), max_model_len=100
        )
        if params.prompt_logprobs:
            known = num_prompt - 1 if num_generated else draw(st.integers(0, num_prompt - 1))
            request.add_prompt_logprobs([-1.0] * known)
        request.token_ids.extend(range(num_generated))
        # Known tokens were computed before, and may have to be computed again.
        last = len(request.known_logprobs) - 1 if request.wants_prompt_rows else len(request.token_ids) - 1
        request.num_computed = draw(st.integers(0, last))
        request.row = row
        requests.append(request)
    num_computed = np.array([request.num_computed for request in requests])
    num_known = np.array([len(request.token_ids) for request in requests])
    num_scheduled = np.array([draw(st.integers(1, left)) for left in (num_known - num_computed).tolist()])
    rows = np.array([request.row for request in requests])
    return ScheduledStep(requests, [], rows, num_computed, num_known, num_scheduled, int(num_scheduled.sum()))


@given(scheduled_steps(), st.data())
def test_each_wanted_row_is_sampled_from_or_tells_of_the_next_prompt_token(
    step: ScheduledStep[Request], data: st.DataObject
) -> None:
    requests = step.requests
    order = data.draw(st.one_of(st.none(), st.permutations(range(len(requests)))))
    packed = PackedStep.of(step, lambda _: None if order is None else np.array(order))

    in_order = [requests[index] for index in (order or range(len(requests)))]
    wanted: list[int] = []
    sampled: dict[str, int] = {}
    prompt_rows: list[tuple[int, int, int]] = []
    token = 0
    for index, request in enumerate(in_order):
        num_scheduled = int(step.num_scheduled[requests.index(request)])
        for position in range(request.num_computed, request.num_computed + num_scheduled):
            if position == len(request.token_ids) - 1:
                sampled[request.request_id] = len(wanted)
                wanted.append(token)
            elif request.wants_prompt_rows and position >= len(request.known_logprobs) - 1:
                prompt_rows.append((len(wanted), index, position))
                wanted.append(token)
            token += 1
    assert in_order == list(packed.requests)
    assert [request.row for request in in_order] == packed.rows.tolist()
    assert wanted == packed.generating_indices.tolist()
    assert prompt_rows == list(zip(*packed.prompt_rows(), strict=True))
    generating = [request for request in in_order if request.request_id in sampled]
    assert [sampled[request.request_id] for request in generating] == packed.sampled.tolist()
    assert [request.request_id in sampled for request in in_order] == packed.is_sampled.tolist()
    as_given = [request for request in requests if request.request_id in sampled]
    places = range(len(generating)) if packed.sampled_order is None else packed.sampled_order
    assert as_given == [generating[place] for place in places]
    assert are_last_tokens(step_batch(packed.query_lens.tolist(), wanted))


def step_batch(query_lens: list[int], generating: list[int]) -> StepBatch:
    zeros = np.zeros(len(query_lens), dtype=np.int64)
    return StepBatch(
        rows=zeros,
        num_computed=zeros,
        query_lens=np.array(query_lens, dtype=np.int64),
        generating_indices=np.array(generating, dtype=np.int64),
    )


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_last_tokens_are_told_from_others(query_lens: list[int], data: st.DataObject) -> None:
    generates = data.draw(st.lists(st.booleans(), min_size=sum(query_lens), max_size=sum(query_lens)))
    expected, start = True, 0
    for query_len in query_lens:
        of_request = generates[start : start + query_len]
        expected &= of_request == sorted(of_request)
        start += query_len
    generating = [token for token, each in enumerate(generates) if each]
    assert expected == are_last_tokens(step_batch(query_lens, generating))


def test_last_tokens_out_of_order_or_twice_are_none() -> None:
    assert not are_last_tokens(step_batch([3], [2, 1]))
    assert not are_last_tokens(step_batch([3], [2, 2]))


# --- the order of the batch -------------------------------------------------------------------------------------------


class NotingModel(ScriptedModel):
    """Records the positions of every packed batch."""

    def __init__(self, script: str) -> None:
        super().__init__(script)
        self.packed: list[list[int]] = []

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        self.packed.append(positions.tolist())
        return super().forward(input_ids, positions, logits_indices)


def test_a_batch_is_packed_as_a_backend_asks_and_its_tokens_find_their_requests() -> None:
    registry = load_plugins(plugins=[plugin("my_plugin", backends={"decodes_first": DecodesFirst})]).registry
    model = NotingModel("the quick")
    stack = Stack.from_mapping(
        {
            "cache": {"memory": "64KiB"},
            "rules": [{"layers": "*", "backend": "decodes_first"}],
            "limits": {"max_num_batched_tokens": 9},
        }
    )
    params = [SamplingParams(max_new_tokens=2, prompt_logprobs=wanted) for wanted in (False, False, True, False)]
    with Engine(model, Setup.of(model.description, stack, registry, dtype="float32")) as engine:
        model.packed.clear()
        outputs = engine.generate(["the", "t", "the", "the qu"], params)
    assert [" q", "he", " q", "ic"] == [output.text for output in outputs]
    assert [None, None, 3, None] == [output.prompt_logprobs and len(output.prompt_logprobs) for output in outputs]
    assert [[0, 0, 1, 2, 0, 1, 2, 0, 1]] == model.packed[:1]
