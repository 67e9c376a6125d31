"""A request's parameters: every value is refused in one sentence, or served to its end beside any other requests."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kvframe_engine.requests.stops import StopStrings
from kvframe_engine.running.next_tokens import draw_truncated, sample

from kvframe import Engine, Prompt, SamplingParams
from kvframe.contract.errors import KVFrameError, ModelError, RequestError
from tests.engine.scripted_model import MAX_MODEL_LEN, ScriptedModel
from tests.engine.test_sampling import column, probabilities, request

SCRIPT = "the quick brown fox jumps"
HUGE = 10**400
MANY_DIGITS = 10**5000
"""A number with more digits than Python turns into text."""


# --- wrong values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        {"max_new_tokens": 2.5},
        {"max_new_tokens": -MANY_DIGITS},
        {"temperature": HUGE},
        {"temperature": MANY_DIGITS},
        {"temperature": math.inf},
        {"temperature": True},
        {"temperature": -math.ulp(0.0)},
        {"temperature": -0.5},
        {"temperature": None},
        {"top_k": 1.0},
        {"top_k": None},
        {"top_p": -HUGE},
        {"top_p": "all"},
        {"top_p": 0},
        {"top_p": math.nextafter(1.0, 2.0)},
        {"top_k": -1},
        {"seed": 1.5},
        {"seed": "x"},
        {"seed": -1},
        {"stop": 5},
        {"stop": None},
        {"stop": b"end"},
        {"stop": [b"end"]},
        {"stop": ["end", ""]},
        {"stop_token_ids": 5},
        {"stop_token_ids": None},
        {"stop_token_ids": "5"},
        {"stop_token_ids": [[5]]},
        {"stop_token_ids": [True]},
        {"ignore_eos": 1},
        {"n": 0},
        {"n": "2"},
        {"prompt_logprobs": "yes"},
        {"min_p": 1.5},
        {"min_p": -0.1},
        {"typical_p": 0},
        {"repetition_penalty": 0},
        {"repetition_penalty": math.inf},
        {"frequency_penalty": 2.5},
        {"presence_penalty": "1"},
        {"presence_penalty": math.nan},
        {"logit_bias": [5]},
        {"logit_bias": {"5": 1}},
        {"logit_bias": {5: 101}},
        {"logit_bias": {5: math.nan}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
        {"no_repeat_ngram_size": -1},
        {"bad_words_ids": [5]},
        {"bad_words_ids": [[]]},
        {"bad_words_ids": [["5"]]},
        {"bad_words_ids": "word"},
        {"suppress_tokens": 5},
        {"begin_suppress_tokens": "5"},
        {"min_new_tokens": -1},
    ],
    ids=lambda params: f"{next(iter(params))}-{type(next(iter(params.values()))).__name__!s}",
)
def test_a_value_that_is_none_is_refused_by_its_name(params: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"^{next(iter(params))} ") as refusal:
        SamplingParams(**params)
    assert "bad_params" == refusal.value.code
    assert len(str(refusal.value)) < 400


def test_the_least_and_the_largest_values_are_taken() -> None:
    least = SamplingParams(max_new_tokens=1, temperature=0, top_k=0, top_p=math.ulp(0.0), seed=0, n=1)
    assert (1, 0.0, 0, 0, 1) == (least.max_new_tokens, least.temperature, least.top_k, least.seed, least.n)
    assert 1.0 == SamplingParams(top_p=1).top_p


def test_numbers_of_other_kinds_are_taken_as_they_are() -> None:
    params = SamplingParams(
        max_new_tokens=np.int32(3), temperature=np.float32(0.5), top_k=np.int64(2), stop_token_ids=np.array([3, 4])
    )
    assert SamplingParams(max_new_tokens=3, temperature=0.5, top_k=2, stop_token_ids={3, 4}) == params


@pytest.mark.parametrize("params", [{}, [], "greedy", 5, object(), {"temperature": 1.0}], ids=range(6))
def test_what_are_no_params_are_refused(params: Any) -> None:
    with ScriptedModel(SCRIPT).engine() as engine:
        for ask in (lambda: engine.add_request("the", params), lambda: engine.stream("the", params)):
            with pytest.raises(RequestError, match="params must be a SamplingParams or None") as refusal:
                ask()
            assert "bad_params" == refusal.value.code
        with pytest.raises(RequestError, match="params") as refusal:
            engine.generate(["the"], params)
        assert "bad_params" == refusal.value.code
        assert not engine.has_unfinished


def test_one_of_several_params_that_are_none_is_refused_alone() -> None:
    params: list[Any] = [None, {}, SamplingParams(max_new_tokens=6)]
    with ScriptedModel(SCRIPT).engine() as engine:
        outputs = engine.generate(["the"] * 3, params)
    assert ["stop", "refused", "length"] == [output.finish_reason for output in outputs]
    assert " quick" == outputs[2].text


@pytest.mark.parametrize("request_id", [[], "", 5, b"a", "x" * 2000, {}], ids=range(6))
def test_what_is_no_id_is_refused(request_id: Any) -> None:
    with ScriptedModel(SCRIPT).engine() as engine:
        for ask in (lambda: engine.add_request("the", request_id=request_id), lambda: engine.abort(request_id)):
            with pytest.raises(RequestError, match="a request's id is a string of 1 to 1,024 characters") as refusal:
                ask()
            assert "bad_id" == refusal.value.code
            assert len(str(refusal.value)) < 400


@pytest.mark.parametrize("salt", [None, 5, b"anna", "\ud800", "x" * 5000, ["anna"]], ids=range(6))
def test_what_is_no_salt_is_refused(salt: Any) -> None:
    with ScriptedModel(SCRIPT).engine() as engine:
        for ask in (
            lambda: engine.add_request("the", cache_salt=salt),
            lambda: engine.stream("the", cache_salt=salt),
            lambda: engine.pin_prefix("the quick", cache_salt=salt),
        ):
            with pytest.raises(RequestError, match="cache_salt") as refusal:
                ask()
            assert "bad_salt" == refusal.value.code
        assert not engine.has_unfinished


@pytest.mark.parametrize("prompts", ["the quick", b"the", None, 5, {"the"}, {"a": "the"}], ids=range(6))
def test_what_is_no_batch_of_prompts_is_refused(prompts: Any) -> None:
    with ScriptedModel(SCRIPT).engine() as engine, pytest.raises(RequestError, match="must be a list") as refusal:
        engine.generate(prompts)
    assert "bad_prompts" == refusal.value.code


@pytest.mark.parametrize("boundaries", [[0], [-1, 2], [4], [1.0], "12", {1}, None, [True]], ids=range(8))
def test_boundaries_that_are_not_in_the_prompt_are_refused(boundaries: Any) -> None:
    with ScriptedModel(SCRIPT).engine() as engine:
        with pytest.raises(RequestError, match="from 1 to its number of tokens, 3, not") as refusal:
            engine.add_request(Prompt(decoder=[1, 2, 3], boundaries=boundaries))
        assert "bad_boundaries" == refusal.value.code
        assert not engine.has_unfinished


def test_prompts_may_come_from_a_generator_or_an_array() -> None:
    with ScriptedModel(SCRIPT).engine() as engine:
        params = SamplingParams(max_new_tokens=6)
        for prompts in ((text for text in ["the", "the"]), np.array([list(b"the")] * 2)):
            assert [" quick"] * 2 == [output.text for output in engine.generate(prompts, params)]  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [5, "show", []])
def test_progress_is_something_to_call(wrong: Any) -> None:
    with ScriptedModel(SCRIPT).engine() as engine:
        with pytest.raises(RequestError, match="on_progress must be a callable"):
            engine.generate(["the"], on_progress=wrong)
        with pytest.raises(RequestError, match="on_cache_events must be a callable"):
            engine.on_cache_events = wrong
        assert not engine.has_unfinished


def test_unpin_takes_a_pin() -> None:
    with ScriptedModel(SCRIPT).engine() as engine, pytest.raises(RequestError, match="unpin takes what pin_prefix"):
        engine.unpin("pin")  # type: ignore[arg-type]


class Hostile(Sequence[int]):
    """A sequence that raises when it is read."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: Any) -> Any:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    "prompt",
    [[2**70], [-(10**400)], [MANY_DIGITS], np.array([[1, 2]]), np.array([1.0]), torch.tensor([1.5]), Hostile()],
    ids=lambda value: type(value).__name__,
)
def test_a_prompt_of_other_things_is_refused_alone(prompt: Any) -> None:
    with ScriptedModel(SCRIPT).engine() as engine:
        refused, served = engine.generate([prompt, "the"], SamplingParams(max_new_tokens=6))
        assert ("refused", " quick") == (refused.finish_reason, served.text)


def test_a_prompt_that_is_far_too_long_is_not_gone_through() -> None:
    class Long(Sequence[int]):
        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, index: Any) -> Any:
            raise AssertionError("it is read")

    with ScriptedModel(SCRIPT).engine() as engine, pytest.raises(RequestError, match="the prompt has 1000000000 token"):
        engine.add_request(Long())


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [129, 100_000, 10**9, MANY_DIGITS], ids=range(4))
def test_more_samples_than_the_stack_allows_are_refused_alone(n: int) -> None:
    params = [SamplingParams(n=n), SamplingParams(max_new_tokens=6)]
    with ScriptedModel(SCRIPT).engine() as engine:
        refused, served = engine.generate(["the", "the"], params)
        assert ("refused", " quick") == (refused.finish_reason, served.text)
        assert "n must be at most 128" in (refused.error or "")


def test_the_stack_says_how_many_samples_there_may_be() -> None:
    with ScriptedModel(SCRIPT).engine(max_samples=2) as engine:
        assert 2 == len(engine.generate(["the"], SamplingParams(n=2)))
        with pytest.raises(RequestError, match=r"raise max_samples in the stack's \[engine\]"):
            engine.add_request("the", SamplingParams(n=3))


def test_the_stack_says_how_long_stop_strings_may_be() -> None:
    with ScriptedModel(SCRIPT).engine(max_stop_chars=8) as engine:
        assert " quick " == engine.generate(["the"], SamplingParams(stop=["brow", "fox!"]))[0].text
        with pytest.raises(RequestError, match=r"have 9 characters altogether, and may have 8; raise max_stop_chars"):
            engine.add_request("the", SamplingParams(stop=["brown", "fox!"]))


def test_two_hundred_thousand_stop_strings_are_refused() -> None:
    params = SamplingParams(stop=[f"stop {index}" for index in range(200_000)])
    with ScriptedModel(SCRIPT).engine() as engine, pytest.raises(RequestError, match="max_stop_chars") as refusal:
        engine.add_request("the", params)
    assert "bad_params" == refusal.value.code


@pytest.mark.parametrize("wrong", [256, -1, MANY_DIGITS], ids=range(3))
def test_a_stop_token_that_the_model_has_not_is_refused(wrong: int) -> None:
    with ScriptedModel(SCRIPT).engine() as engine, pytest.raises(RequestError, match="stop_token_ids holds"):
        engine.add_request("the", SamplingParams(stop_token_ids=[97, wrong]))


# --- stop strings -----------------------------------------------------------------------------------------------------

LETTERS = st.text("ab", min_size=1, max_size=6)


@example(["aa", "baab"], ["baab"])  # the string that is complete first begins after another one
@given(st.lists(LETTERS, max_size=5), st.lists(st.text("ab", max_size=5), max_size=8))
def test_the_stop_string_that_is_complete_first_is_found_in_whatever_pieces_it_comes(
    strings: list[str], pieces: list[str]
) -> None:
    stops, state, text = StopStrings(strings), 0, ""
    for piece in pieces:
        before, text = len(text), text + piece
        # By end, and then by start: of several strings that end together, the longest.
        found = sorted((at + len(string), at) for string in strings if (at := text.find(string)) >= 0)
        reading = stops.read(state, piece)
        assert (found[0][1] - before if found else None) == reading.found_at
        if found:
            return
        held = [
            length
            for length in range(len(text) + 1)
            if any(each.startswith(text[len(text) - length :]) for each in strings)
        ]
        assert max(held, default=0) == reading.num_held
        state = reading.state


class Counting(list[int]):
    """Counts how often its items are read."""

    count = 0

    def __getitem__(self, index: Any) -> Any:
        self.count += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(
    "strings", [["b"], ["a" * 4000 + "b"], ["a" * index + "b" for index in range(90)]], ids=["short", "long", "many"]
)
def test_no_stop_string_makes_a_text_longer_to_read(strings: list[str]) -> None:
    stops = StopStrings(strings)
    stops._shorter = steps_back = Counting(stops._shorter)
    assert None is stops.read(0, "a" * 5000 + "c").found_at
    assert steps_back.count <= 5001


# --- sampling ---------------------------------------------------------------------------------------------------------


HOSTILE = [
    SamplingParams(max_new_tokens=6, temperature=1.0, top_k=HUGE, seed=1),
    SamplingParams(max_new_tokens=6, temperature=1.0, top_k=1, top_p=5e-324, seed=1),
    SamplingParams(max_new_tokens=6, temperature=5e-324, top_p=5e-324, seed=1),
    SamplingParams(max_new_tokens=6, temperature=1e308, top_k=2, seed=HUGE),
    SamplingParams(max_new_tokens=HUGE, temperature=1e-320, n=3, seed=MANY_DIGITS),
    SamplingParams(max_new_tokens=6, stop=["a" * 8000]),
    SamplingParams(max_new_tokens=6, stop_token_ids=range(1, 60), prompt_logprobs=True),
]


@pytest.mark.parametrize("hostile", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_request_changes_none_of_its_neighbours(hostile: SamplingParams) -> None:
    drawn = SamplingParams(max_new_tokens=8, temperature=1.0, top_p=0.9, seed=3, ignore_eos=True)
    innocent = [drawn, attrs.evolve(drawn, top_k=7), attrs.evolve(drawn, top_p=1.0), attrs.evolve(drawn, temperature=0)]
    with ScriptedModel(SCRIPT).engine() as engine:
        alone = [output.token_ids for output in engine.generate(["the"] * 4, innocent)]
        together = engine.generate(["the"] * 5, [*innocent, hostile])
        assert alone == [output.token_ids for output in together[:4]]
        assert {None} == {output.error for output in together}


@given(
    st.lists(st.floats(1e-300, 1), min_size=1, max_size=8),
    st.floats(0, 1 - 2**-53),
    st.integers(1, 9),
    st.floats(5e-324, 1, exclude_min=False),
    st.floats(0, 1),
    st.floats(5e-324, 1),
)
def test_there_is_always_a_token_to_draw(
    masses: list[float], uniform: float, top_k: int, top_p: float, min_p: float, typical_p: float
) -> None:
    row = torch.tensor(masses, dtype=torch.float64)
    row = row / row.sum()
    limits = map(column, (top_k, top_p, min_p, typical_p))
    (token,) = draw_truncated(probabilities(row.tolist()), column(uniform), *limits)
    assert row[token] > 0
    assert (row > row[token]).sum() < top_k


def test_the_smallest_temperature_is_greedy() -> None:
    # The logits divided by it are infinite.
    logits = torch.tensor([[1.0, 1.5, 0.5]])
    assert [1, 1] == sample(logits.repeat(2, 1), [request(temperature=5e-324), request(temperature=5e-324, top_k=2)])


# --- any values -------------------------------------------------------------------------------------------------------

ANYTHING: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 130),
    st.sampled_from([HUGE, -HUGE, MANY_DIGITS, 2**31, 2**63, 2**64]),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=2),
    st.lists(st.one_of(st.integers(-1, 300), st.text(max_size=2), st.none()), max_size=3),
    st.builds(object),
    st.dictionaries(st.text(max_size=1), st.integers(), max_size=1),
)
GOOD: dict[str, st.SearchStrategy[Any]] = {
    "max_new_tokens": st.integers(1, HUGE),
    "temperature": st.floats(0, allow_infinity=False),
    "top_k": st.integers(0, HUGE),
    "top_p": st.floats(0, 1, exclude_min=True),
    "seed": st.none() | st.integers(0, HUGE),
    "stop": st.lists(st.text(min_size=1, max_size=4), max_size=3) | st.text(min_size=1),
    "stop_token_ids": st.frozensets(st.integers(0, 255), max_size=3),
    "ignore_eos": st.booleans(),
    "n": st.integers(1, 3),
    "prompt_logprobs": st.booleans(),
    "min_p": st.floats(0, 1),
    "typical_p": st.floats(0, 1, exclude_min=True),
    "repetition_penalty": st.floats(0.01, 100),
    "frequency_penalty": st.floats(-2, 2),
    "presence_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(st.integers(0, 255), st.floats(-100, 100), max_size=3),
    "no_repeat_ngram_size": st.integers(0, 5) | st.just(HUGE),
    "bad_words_ids": st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=3), max_size=3),
    "suppress_tokens": st.frozensets(st.integers(0, 255), max_size=3),
    "begin_suppress_tokens": st.frozensets(st.integers(0, 255), max_size=3),
    "min_new_tokens": st.integers(0, HUGE),
}
PROMPTS: st.SearchStrategy[Any] = st.one_of(
    st.text(max_size=70), st.lists(st.integers(0, 255), max_size=MAX_MODEL_LEN + 2), ANYTHING
)


@pytest.fixture(scope="module")
def served() -> Any:
    with ScriptedModel(SCRIPT).engine(self_check=False) as engine:
        yield engine


@given(st.data())
def test_any_request_is_refused_in_one_sentence_or_served_to_its_end(served: Engine, data: st.DataObject) -> None:
    names = data.draw(st.sets(st.sampled_from(sorted(GOOD))))
    values = {name: data.draw(GOOD[name] | ANYTHING if data.draw(st.booleans()) else GOOD[name]) for name in names}
    prompt, salt, request_id = data.draw(PROMPTS), data.draw(st.just("") | ANYTHING), data.draw(st.none() | ANYTHING)
    other_params = data.draw(ANYTHING) if data.draw(st.integers(0, 9)) == 0 else None
    known = served.add_request("the", SamplingParams(max_new_tokens=6), "innocent")
    refusals = []
    try:
        params = SamplingParams(**values) if other_params is None else other_params
        served.add_request(prompt, params, request_id, cache_salt=salt)
    except KVFrameError as error:
        refusals.append(str(error))
    assert all("\n" not in refusal and len(refusal) < 500 for refusal in refusals)
    last = {}
    while served.has_unfinished:
        last |= {(output.request_id, output.sample): output for output in served.step()}
    assert " quick" == last[known, 0].text
    assert {"stop", "length"} >= {output.finish_reason for output in last.values()}
    assert 0 == sum(served.stats().blocks_held)


VERBS: dict[str, Any] = {
    "abort": (1, ()),
    "add_request": (3, ("cache_salt",)),
    "generate": (2, ("cache_salt", "on_progress")),
    "load_prefixes": (1, ("cache_salt",)),
    "pin_prefix": (1, ("cache_salt",)),
    "resize_cache": (1, ()),
    "save_prefixes": (2, ("cache_salt",)),
    "stream": (2, ("cache_salt",)),
    "unpin": (1, ()),
}


@given(st.sampled_from(sorted(VERBS)), st.data())
def test_any_arguments_of_any_verb_are_refused_in_one_sentence_or_taken(
    served: Engine, verb: str, data: st.DataObject
) -> None:
    count, names = VERBS[verb]
    arguments = data.draw(st.lists(ANYTHING, min_size=count, max_size=count))
    named = {name: data.draw(ANYTHING) for name in data.draw(st.sets(st.sampled_from([*names, ""]))) if name}
    if verb == "save_prefixes" and isinstance(arguments[0], str | bytes):
        arguments[0] = "no such folder/" * 400 + "\0" * data.draw(st.integers(0, 1))
    with contextlib.suppress(KVFrameError):
        getattr(served, verb)(*arguments, **named)
    while served.has_unfinished:
        served.step()
    assert " quick" == served.generate(["the"], SamplingParams(max_new_tokens=6))[0].text


# --- tokenizers -------------------------------------------------------------------------------------------------------


class Exit(BaseException):
    """An exception that is not an ``Exception``."""


def read_by(tokenize: Any) -> ScriptedModel:
    """Return a model whose tokenizer misbehaves for a text with an ``x``."""

    class Broken(ScriptedModel):
        def encode(self, text: str) -> list[int]:
            return tokenize() if "x" in text else super().encode(text)

    return Broken(SCRIPT)


def raising(error: BaseException) -> Any:
    def tokenize() -> Any:
        raise error

    return tokenize


@pytest.mark.parametrize(
    "error", [KeyError("x"), RuntimeError(), MemoryError(), RecursionError(), SystemExit(3), Exit("no")], ids=repr
)
def test_a_tokenizer_that_raises_refuses_its_prompt_alone(error: BaseException) -> None:
    with read_by(raising(error)).engine() as engine:
        outputs = engine.generate(["the", "x", "the"], SamplingParams(max_new_tokens=6))
        assert [" quick", "", " quick"] == [output.text for output in outputs]
        assert ("refused", True) == (
            outputs[1].finish_reason,
            (outputs[1].error or "").startswith(f"the tokenizer failed: {type(error).__name__}"),
        )
        with pytest.raises(RequestError, match="the tokenizer failed"):
            engine.add_request("x")
        assert not engine.has_unfinished


@pytest.mark.parametrize(
    "junk", [None, 5, [1.5], ["a"], [None], "ab", [True], object(), {97}, [-1], [256]], ids=range(11)
)
def test_a_tokenizer_that_gives_no_token_ids_refuses_its_prompt_alone(junk: Any) -> None:
    with read_by(lambda: junk).engine() as engine:
        outputs = engine.generate(["the", "x", "the"], SamplingParams(max_new_tokens=6))
        assert [" quick", "", " quick"] == [output.text for output in outputs]
        assert "refused" == outputs[1].finish_reason


def test_ctrl_c_in_a_tokenizer_is_the_users() -> None:
    with read_by(raising(KeyboardInterrupt())).engine() as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.generate(["the", "x"])
        assert not engine.has_unfinished


def test_a_tokenizer_that_cannot_decode_is_named_when_the_engine_is_made() -> None:
    class Mute(ScriptedModel):
        def decode(self, token_ids: Sequence[int]) -> str | None:
            raise OSError("no vocabulary")

    with pytest.raises(ModelError, match="the tokenizer of scripted cannot decode: OSError: no vocabulary"):
        Mute(SCRIPT).engine()
