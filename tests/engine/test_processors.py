"""Logits processors of plugins in an engine: who is changed, in which order, and what a failing one ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from kvframe_engine.contract import LogitsProcessor, ProcessedRequest, Vocabulary

from kvframe import Engine, SamplingParams, Setup, load_plugins
from kvframe.config.stack import Stack
from kvframe.contract import RequestError
from tests.engine.scripted_model import ScriptedModel
from tests.support.plugins import plugin

SCRIPT = "the quick brown fox jumps"
CALLS: list[tuple[str, list[int]]] = []


class Instead(LogitsProcessor):
    """Lets one token come in place of another."""

    name: ClassVar[str] = "instead"

    def start(self, options: Mapping[str, Any]) -> tuple[int, int]:
        if options.keys() != {"of", "comes"}:
            raise RequestError("instead takes of and comes", code="bad_params")
        return ord(options["of"]), ord(options["comes"])

    def process(self, logits: torch.Tensor, requests: Sequence[ProcessedRequest]) -> None:
        CALLS.append((self.name, [1 + len(request.drafts) for request in requests]))
        row = 0
        for request in requests:
            of, comes = request.state
            for _ in range(1 + len(request.drafts)):
                logits[row, comes] = logits[row, of]
                logits[row, of] = -torch.inf
                row += 1


class Another(Instead):
    name: ClassVar[str] = "another"


class Breaks(LogitsProcessor):
    """Fails after some tokens."""

    name: ClassVar[str] = "breaks"

    def start(self, options: Mapping[str, Any]) -> Any:
        if "at_start" in options:
            raise SystemExit(3)
        return options.get("after", 0)

    def process(self, logits: torch.Tensor, requests: Sequence[ProcessedRequest]) -> None:
        if any(len(request.token_ids) - request.num_prompt_tokens >= request.state for request in requests):
            raise SystemExit("it is broken")


class NeedsText(LogitsProcessor):
    name: ClassVar[str] = "needs_text"

    def __init__(self, vocabulary: Vocabulary) -> None:
        assert (256, frozenset({0}), None) == (vocabulary.size, vocabulary.eos_token_ids, vocabulary.tokenizer_json)
        raise RequestError("it needs a tokenizer", code="bad_params")

    def start(self, options: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def process(self, logits: torch.Tensor, requests: Sequence[ProcessedRequest]) -> None:
        raise NotImplementedError


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    processors = {each.name: each for each in (Instead, Another, Breaks, NeedsText)}
    registry = load_plugins(plugins=[plugin("processors_of_a_test", logits_processors=processors)]).registry
    model = ScriptedModel(SCRIPT)
    stack = Stack.from_mapping(
        {"cache": {"block_size": 4, "memory": 32 * 1024}, "model": {"device": "cpu"}, "engine": {"self_check": False}}
    )
    with Engine(model, Setup.of(model.description, stack, registry, dtype="float32")) as made:
        yield made


def params(**processors: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=6, processors=processors)


QUEEN = {"of": "q", "comes": "z"}


def test_only_the_requests_that_name_it_are_changed(engine: Engine) -> None:
    CALLS.clear()
    outputs = engine.generate(["the"] * 3, [params(), params(instead=QUEEN), params(instead={"of": "k", "comes": "!"})])
    assert [" quick", " zuick", " quic!"] == [output.text for output in outputs]
    assert [("instead", [1, 1])] * 6 == CALLS


def test_several_change_it_in_the_order_of_their_names(engine: Engine) -> None:
    chain = {"instead": {"of": "z", "comes": "y"}, "another": QUEEN}
    assert " yuick" == engine.generate(["the"], params(**chain))[0].text
    other = {"instead": QUEEN, "another": {"of": "z", "comes": "y"}}
    outputs = engine.generate(["the"] * 2, [params(**other), params(**chain)])
    assert [" zuick", " yuick"] == [output.text for output in outputs]
    # Whichever processor the first request of a step names.
    outputs = engine.generate(["the"] * 2, [params(instead=QUEEN), params(**chain)])
    assert [" zuick", " yuick"] == [output.text for output in outputs]


def test_other_parameters_come_first(engine: Engine) -> None:
    both = SamplingParams(max_new_tokens=6, logit_bias={ord("q"): 9.0, ord("z"): 8.0}, processors={"instead": QUEEN})
    assert "zzzzzz" == engine.generate(["the"], both)[0].text


def test_each_sample_has_a_state(engine: Engine) -> None:
    outputs = engine.generate(["the"], SamplingParams(max_new_tokens=6, n=3, processors={"instead": QUEEN}))
    assert [" zuick"] * 3 == [output.text for output in outputs]


@pytest.mark.parametrize(
    ("processors", "says"),
    [
        ({"instead": {}}, "instead takes of and comes"),
        ({"instead": {"of": 5, "comes": "z"}}, "instead': start() failed: TypeError"),
        ({"inside": {}}, "there is no logits processor named 'inside'"),
        ({"breaks": {"at_start": True}}, "breaks': start() failed: SystemExit"),
        ({"needs_text": {}}, "it needs a tokenizer"),
    ],
)
def test_what_cannot_be_started_is_refused(engine: Engine, processors: Any, says: str) -> None:
    for _ in range(2):
        with pytest.raises(RequestError) as refusal:
            engine.add_request("the", params(**processors))
        assert says in str(refusal.value)
        assert "bad_params" == refusal.value.code
    assert not engine.has_unfinished


def test_one_that_fails_ends_its_own_requests(engine: Engine) -> None:
    outputs = engine.generate(
        ["the"] * 4, [params(), params(breaks={"after": 3}), params(breaks={"after": 5}), params(instead=QUEEN)]
    )
    assert ["length", "error", "error", "length"] == [output.finish_reason for output in outputs]
    assert [" quick", " qu", " qu", " zuick"] == [output.text for output in outputs]
    (said,) = {output.error for output in outputs if output.error}
    assert said is not None
    assert said.endswith("breaks': process() failed: SystemExit: it is broken")
    assert 0 == sum(engine.stats().blocks_held)


def test_wrong_values_are_refused_by_name() -> None:
    for wrong in (5, ["guided"], {"guided": 5}, {5: {}}):
        with pytest.raises(RequestError, match=r"^processors must be"):
            SamplingParams(processors=wrong)  # type: ignore[arg-type]
