"""Owners of an engine's requests: every verb takes them, and they change when a request runs, but not its tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvframe import Engine, SamplingParams
from kvframe.contract.errors import RequestError
from tests.engine.scripted_model import ScriptedModel

SCRIPT = "the quick brown fox jumps over the lazy dog"
PARAMS = SamplingParams(max_new_tokens=8)


def test_an_owner_does_not_wait_for_the_samples_of_another_one() -> None:
    with ScriptedModel(SCRIPT).engine(max_num_seqs=4) as engine:
        for _ in range(2):
            engine.add_request("the ", SamplingParams(max_new_tokens=30, n=8), owner="many")
        engine.step()
        engine.step()
        engine.add_request("the ", SamplingParams(max_new_tokens=5), "few", owner="few")
        outputs = [output for _ in range(5) for output in engine.step() if output.request_id == "few"]
    assert ["q", "u", "i", "c", "k"] == [output.new_text for output in outputs]
    assert "length" == outputs[-1].finish_reason


def test_a_preempted_request_has_the_tokens_that_it_has_alone() -> None:
    with ScriptedModel(SCRIPT).engine(max_num_seqs=3) as engine:
        (expected,) = engine.generate(["the "], PARAMS)
        outputs = engine.generate(["the "] * 9, PARAMS, owner=["a"] * 6 + ["b"] * 2 + ["c"])
    assert [expected.text] * 9 == [output.text for output in outputs]


def test_a_stream_has_an_owner() -> None:
    with ScriptedModel(SCRIPT).engine(max_num_seqs=2) as engine:
        engine.add_request("the ", SamplingParams(max_new_tokens=30, n=4), owner="many")
        engine.step()
        stream = engine.stream("the ", SamplingParams(max_new_tokens=1), owner="few")
        before = engine.stats().steps
        assert ["q"] == [output.text for output in stream]
        assert 1 == engine.stats().steps - before


@pytest.mark.parametrize("owner", [None, 5, b"anna", "x" * 2000], ids=range(4))
@pytest.mark.parametrize(
    "ask",
    [
        lambda engine, owner: engine.add_request("the", owner=owner),
        lambda engine, owner: engine.stream("the", owner=owner),
    ],
    ids=["add_request", "stream"],
)
def test_what_is_no_owner_is_refused(ask: Callable[[Engine, Any], object], owner: Any) -> None:
    with ScriptedModel(SCRIPT).engine() as engine:
        with pytest.raises(RequestError, match="owner must be a string of at most 1,024 characters") as refusal:
            ask(engine, owner)
        assert "bad_owner" == refusal.value.code
        assert not engine.has_unfinished


def test_a_batch_has_one_owner_or_one_for_each() -> None:
    with ScriptedModel(SCRIPT).engine() as engine:
        with pytest.raises(RequestError, match="3 requests have 2 values of owner") as refusal:
            engine.generate(["the"] * 3, owner=["a", "b"])
        assert "bad_owner" == refusal.value.code
        assert ["length"] * 2 == [output.finish_reason for output in engine.generate(["the"] * 2, PARAMS, owner="a")]
