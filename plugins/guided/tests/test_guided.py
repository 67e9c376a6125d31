"""Answers that follow a grammar: what is banned, drafts, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from kvframe_engine.contract import ProcessedRequest, Vocabulary
from kvframe_engine.testing.logits_processors import check_logits_processor
from kvframe_guided.processor import Guided
from kvframe_transformers.testing import save_tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import kvframe
from kvframe import Engine, SamplingParams, Stack
from kvframe.contract import RequestError

END = 256
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def byte_tokenizer() -> Any:
    """Return a tokenizer of 256 bytes and an end token."""
    vocabulary = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


TOKENIZER = byte_tokenizer()
VOCABULARY = Vocabulary(size=257, eos_token_ids=frozenset({END}), tokenizer_json=TOKENIZER.to_str())


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def allowed(state: Any, answer: str, *drafts: int) -> list[set[str]]:
    """Return the texts of the tokens that may follow an answer, and of those that may follow each draft."""
    logits = torch.zeros(1 + len(drafts), 260)
    GUIDED.process(logits, [ProcessedRequest([1, 2, *ids(answer)], 2, drafts, state)])
    assert {0.0, -torch.inf} >= set(logits.flatten().tolist())
    rows = [row.nonzero().flatten().tolist() for row in torch.isfinite(logits)]
    return [{TOKENIZER.decode([token], skip_special_tokens=False) for token in row} for row in rows]


GUIDED = Guided(VOCABULARY)
PHONE = {"regex": "[0-9]{2}-[0-9]"}


@pytest.mark.parametrize(
    "options",
    [PHONE, {"json_schema": SCHEMA}, {"json_object": True}, {"lark": 'start: "yes" | "no"'}],
    ids=["regex", "schema", "object", "lark"],
)
def test_the_laws_of_logits_processors_hold(options: dict[str, Any]) -> None:
    check_logits_processor(Guided, VOCABULARY, options)


def test_it_is_registered() -> None:
    assert kvframe.load_plugins().registry.logits_processors.load("guided") is Guided


def rows(state: Any, answer: list[int], *drafts: int) -> list[list[int]]:
    """Return the tokens that may follow an answer, and those that may follow each draft."""
    logits = torch.zeros(1 + len(drafts), 260)
    GUIDED.process(logits, [ProcessedRequest([1, 2, *answer], 2, drafts, state)])
    return [row.nonzero().flatten().tolist() for row in torch.isfinite(logits)]


def test_after_an_end_token_only_end_tokens_follow_as_drafts_too() -> None:
    digits = sorted(ids("0123456789"))
    state = GUIDED.start(PHONE)
    assert [digits, [END], [END], [END], []] == rows(state, ids("42-"), *ids("1"), END, END, 7)
    # The drafts were rejected: the answer goes on from where it was.
    assert [[END], [END], []] == rows(state, ids("42-3"), END, 7)
    for num_ends in (1, 2, 3):
        assert [[END], [END]] == rows(state, [*ids("42-3"), *[END] * num_ends], END)


def test_only_tokens_that_follow_are_left() -> None:
    state = GUIDED.start(PHONE)
    digits = set("0123456789")
    assert [digits] == allowed(state, "")
    assert [digits] == allowed(state, "4")
    assert [{"-"}] == allowed(state, "42")
    assert [digits] == allowed(state, "42-")
    assert [{"</s>"}] == allowed(state, "42-7")


def test_a_step_may_bring_several_tokens() -> None:
    assert [{"-"}] == allowed(GUIDED.start(PHONE), "42")


def test_drafts_are_followed_as_far_as_they_follow() -> None:
    state = GUIDED.start(PHONE)
    digits = set("0123456789")
    (two,), (dash,), (letter,) = ids("2"), ids("-"), ids("x")
    assert [digits, {"-"}, digits] == allowed(state, "4", two, dash)
    # After a draft that is rejected, nothing is read.
    assert [digits, set(), set()] == allowed(state, "4", letter, dash)
    assert [{"-"}] == allowed(state, "42")


def test_an_answer_that_was_not_followed_ends() -> None:
    assert [set()] == allowed(GUIDED.start(PHONE), "x")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "takes one of json_schema, json_object, regex, lark"),
        ({**PHONE, "json_object": True}, "takes one of"),
        ({"grammar": "x"}, "takes one of"),
        ({"regex": 5}, "guided.regex must be a text, not 5"),
        ({"json_schema": "x"}, "guided.json_schema must be an object"),
        ({"json_object": False}, "guided.json_object must be true"),
        ({"regex": "("}, "guided.regex cannot be followed"),
        ({"lark": "start: other"}, "guided.lark cannot be followed"),
        ({"json_schema": {"type": "thing"}}, "guided.json_schema cannot be followed"),
        ({"json_schema": {"const": {1, 2}}}, "guided.json_schema is no JSON"),
        ({"regex": "a" * 70_000}, "has 70,002 bytes, and may have 65,536"),
    ],
    ids=range(11),
)
def test_what_cannot_be_followed_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=re.escape(says)) as refusal:
        GUIDED.start(options)
    assert "bad_params" == refusal.value.code
    assert "\n" not in str(refusal.value)


def test_a_model_without_a_fast_tokenizer_is_refused() -> None:
    with pytest.raises(RequestError, match="no fast tokenizer"):
        Guided(Vocabulary(size=5))


# --- served -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("guided") / "tiny"
    save_tiny(path, "llama", vocab_size=300, eos_token_id=END, max_position_embeddings=256)
    PreTrainedTokenizerFast(tokenizer_object=TOKENIZER, eos_token="</s>").save_pretrained(path)
    return path


def answers(folder: Path, params: SamplingParams, **options: Any) -> list[str]:
    stack = Stack.from_mapping({"cache": {"memory": "4MiB"}, "model": {"device": "cpu", **options}})
    with Engine.from_pretrained(folder, stack=stack) as engine:
        outputs = engine.generate(["person: ", "the next one: "], params)
        assert [None] * len(outputs) == [output.error for output in outputs]
        return [output.text for output in outputs if output.finish_reason == "stop"]


@pytest.mark.parametrize("drafts", [{}, {"drafts": {"name": "ngram", "max_drafts": 4}}], ids=["plain", "drafts"])
def test_an_answer_that_ignores_its_end_has_nothing_but_ends_after_it(folder: Path, drafts: dict[str, Any]) -> None:
    stack = Stack.from_mapping({"cache": {"memory": "4MiB"}, "model": {"device": "cpu", **drafts}})
    params = SamplingParams(max_new_tokens=16, ignore_eos=True, temperature=0.0, processors={"guided": PHONE})
    with Engine.from_pretrained(folder, stack=stack) as engine:
        (output,) = engine.generate(["person: "], params)
        assert bool(drafts) == (engine.stats().draft_tokens > 0)
    assert (None, "length") == (output.error, output.finish_reason)
    assert re.fullmatch("[0-9]{2}-[0-9]", TOKENIZER.decode(output.token_ids[:4]))
    assert [END] * 12 == list(output.token_ids[4:])


@pytest.mark.parametrize("drafts", [{}, {"drafts": {"name": "ngram", "max_drafts": 4}}], ids=["plain", "drafts"])
def test_every_answer_is_of_the_schema(folder: Path, drafts: dict[str, Any]) -> None:
    params = SamplingParams(
        temperature=1, seed=5, n=4, max_new_tokens=200, processors={"guided": {"json_schema": SCHEMA}}
    )
    texts = answers(folder, params, **drafts)
    assert len(texts) >= 4
    for text in texts:
        value = json.loads(text)
        assert {"name", "age"} == value.keys()
        assert isinstance(value["name"], str)
        assert 0 <= value["age"] <= 99


def test_drafts_change_no_token(folder: Path) -> None:
    params = SamplingParams(max_new_tokens=40, processors={"guided": {"regex": "(ab){3,9}!"}})
    plain = answers(folder, params)
    assert 2 == len(plain)
    assert plain == answers(folder, params, drafts={"name": "ngram", "max_drafts": 4})
    assert all(re.fullmatch("(ab){3,9}!", text) for text in plain)


def test_requests_with_and_without_a_grammar_run_together(folder: Path) -> None:
    stack = Stack.from_mapping({"cache": {"memory": "4MiB"}, "model": {"device": "cpu"}})
    plain = SamplingParams(max_new_tokens=8)
    guided = SamplingParams(max_new_tokens=8, processors={"guided": PHONE})
    with Engine.from_pretrained(folder, stack=stack) as engine:
        alone = engine.generate(["a"], plain)[0].token_ids
        outputs = engine.generate(["a", "b", "a"], [plain, guided, plain])
        assert [alone, alone] == [outputs[0].token_ids, outputs[2].token_ids]
        assert re.fullmatch("[0-9]{2}-[0-9]", outputs[1].text)
        with pytest.raises(RequestError, match="guided takes one of"):
            engine.add_request("a", SamplingParams(processors={"guided": {}}))
        with pytest.raises(RequestError, match=r"no logits processor named 'guide'; .*did you mean 'guided'"):
            engine.add_request("a", SamplingParams(processors={"guide": {}}))
        assert not engine.has_unfinished
