"""Outputs of requests: each stores what is new, and no later step changes what an earlier one says."""

from __future__ import annotations

import pickle
import tracemalloc
from typing import Any

import attrs
import pytest
from kvframe_engine.requests.request import Request
from kvframe_engine.requests.text import TextStream

from kvframe import RequestOutput, SamplingParams
from tests.engine.scripted_model import ScriptedModel

SCRIPT = "the quick brown fox"


def streamed(prompt: str, **params: Any) -> list[RequestOutput]:
    """Return all outputs of a request for the rest of the script, read after its end."""
    with ScriptedModel(SCRIPT).engine() as engine:
        return list(engine.stream(prompt, SamplingParams(max_new_tokens=len(SCRIPT) - len(prompt), **params)))


def test_outputs_read_after_the_end_show_their_own_time() -> None:
    outputs = streamed("the quick brown ", logprobs=True, top_logprobs=2)
    assert ["f", "fo", "fox"] == [output.text for output in outputs]
    assert [(102,), (102, 111), (102, 111, 120)] == [output.token_ids for output in outputs]
    assert [1, 2, 3] == [len(output.logprobs or ()) for output in outputs]
    assert [[102], [102, 111], [102, 111, 120]] == [
        [next(iter(top)) for top in output.top_logprobs or ()] for output in outputs
    ]


def test_the_new_parts_add_up_to_the_whole() -> None:
    outputs = streamed("the ", logprobs=True, top_logprobs=2)
    assert outputs[-1].text == "".join(output.new_text for output in outputs)
    assert outputs[-1].token_ids == tuple(token for output in outputs for token in output.new_token_ids)
    assert outputs[-1].logprobs == tuple(value for output in outputs for value in output.new_logprobs or ())
    assert outputs[-1].top_logprobs == tuple(top for output in outputs for top in output.new_top_logprobs or ())


def test_nothing_is_reported_that_was_not_asked_for() -> None:
    (output,) = streamed("the quick brown fo")
    assert [None] * 4 == [output.logprobs, output.top_logprobs, output.new_logprobs, output.new_top_logprobs]
    (output,) = streamed("the quick brown fo", logprobs=True)
    assert [1, None, 1, None] == [
        None if values is None else len(values)
        for values in (output.logprobs, output.top_logprobs, output.new_logprobs, output.new_top_logprobs)
    ]


def test_an_output_that_did_not_reach_its_owner_is_reported_again() -> None:
    request = request_with_text()
    request.take(ord("a"))
    request.read_text()
    request.report()
    request.take(ord("b"))
    request.read_text()
    request.take_back(request.report())
    request.take(ord("c"))
    request.read_text()
    output = request.report()
    assert ("bc", (98, 99), "abc") == (output.new_text, output.new_token_ids, output.text)


@pytest.mark.parametrize("copy", [attrs.evolve, lambda output: pickle.loads(pickle.dumps(output))])
def test_a_copy_says_the_same(copy: Any) -> None:
    for output in streamed("the quick brown ", logprobs=True, top_logprobs=2):
        assert repr(output) == repr(copy(output))


def test_the_text_of_an_output_shows_what_it_has() -> None:
    outputs = streamed("the quick brown ")
    assert "new_token_ids=(111,), text='fo', new_text='o', finish_reason=None" in repr(outputs[1])


def request_with_text(**params: Any) -> Request:
    return Request.create(
        "a",
        [ord("x")],
        SamplingParams(max_new_tokens=10_000, **params),
        eos_token_ids=frozenset(),
        max_model_len=20_000,
        text_stream=TextStream(ScriptedModel(SCRIPT).decode_stream, [ord("x")]),
    )


def bytes_of_outputs(count: int) -> int:
    """Return the memory of that many queued outputs of one request, its own lists included."""
    request = request_with_text(logprobs=True, top_logprobs=20)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    queued = []
    for index in range(count):
        request.take(97 + index % 26)
        request.read_text()
        request.transcript.logprobs.append(-0.5)
        request.transcript.top_logprobs.append({token: -0.5 - token for token in range(20)})
        queued.append(request.report())
    size = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert count == len(queued[-1].text)
    return size


def test_the_memory_of_queued_outputs_grows_with_their_number_only() -> None:
    assert 4 == pytest.approx(bytes_of_outputs(4000) / bytes_of_outputs(1000), rel=0.1)
