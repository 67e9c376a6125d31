"""Biases, penalties and banned tokens: equal to transformers' own, row by row, with drafts and without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvframe_engine.requests.request import Request
from kvframe_engine.running.launched_steps import LastTokens, names_of
from kvframe_engine.running.logits_processors import changed_rows, process_logits
from kvframe_engine.running.next_tokens import accept_drafts, draw_truncated, sample
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from kvframe import Engine, SamplingParams
from kvframe.contract.errors import RequestError
from tests.engine.scripted_model import ScriptedModel
from tests.engine.test_sampling import column

VOCAB_SIZE, END = 12, 11
TOKENS = st.integers(0, VOCAB_SIZE - 1)
SCRIPT = "the quick brown fox jumps"


def request(prompt: list[int], output: list[int], **params: Any) -> Request:
    made = Request.create(
        "r", prompt, SamplingParams(**params), eos_token_ids=frozenset({END}), max_model_len=1_000_000
    )
    made.token_ids.extend(output)
    return made


def processed(logits: torch.Tensor, prompt: list[int], output: list[int], **params: Any) -> torch.Tensor:
    (row,) = process_logits(logits.unsqueeze(0), changed_rows([request(prompt, output, **params)]))
    return row


PROCESSORS: dict[str, tuple[st.SearchStrategy[Any], Any]] = {
    "logit_bias": (
        st.dictionaries(TOKENS, st.floats(-100, 100, width=32), min_size=1, max_size=4),
        lambda value, prompt: SequenceBiasLogitsProcessor({(token,): bias for token, bias in value.items()}),
    ),
    "repetition_penalty": (
        st.floats(0.25, 4, width=32),
        lambda value, prompt: RepetitionPenaltyLogitsProcessor(value),
    ),
    "no_repeat_ngram_size": (st.integers(1, 4), lambda value, prompt: NoRepeatNGramLogitsProcessor(value)),
    # transformers bans no sequence that is longer than what is known.
    "bad_words_ids": (
        st.lists(st.lists(TOKENS, min_size=1, max_size=2), min_size=1, max_size=3),
        lambda value, prompt: NoBadWordsLogitsProcessor(value),
    ),
    "min_new_tokens": (
        st.integers(1, 8),
        lambda value, prompt: MinNewTokensLengthLogitsProcessor(len(prompt), value, END),
    ),
    "suppress_tokens": (
        st.frozensets(TOKENS, min_size=1, max_size=5),
        lambda value, prompt: SuppressTokensLogitsProcessor([*value]),
    ),
    "begin_suppress_tokens": (
        st.frozensets(TOKENS, min_size=1, max_size=5),
        lambda value, prompt: SuppressTokensAtBeginLogitsProcessor([*value], len(prompt)),
    ),
}


@pytest.mark.parametrize("name", PROCESSORS)
@given(st.data())
def test_logits_are_those_of_transformers(name: str, data: st.DataObject) -> None:
    values, make = PROCESSORS[name]
    value = data.draw(values)
    prompt, output = data.draw(st.lists(TOKENS, min_size=2, max_size=12)), data.draw(st.lists(TOKENS, max_size=6))
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    expected = make(value, prompt)(torch.tensor([[*prompt, *output]]), logits.clone().unsqueeze(0))[0]
    torch.testing.assert_close(processed(logits, prompt, output, **{name: value}), expected, rtol=1e-6, atol=1e-6)


def test_all_of_them_are_applied_in_the_order_of_transformers() -> None:
    prompt, output = [1, 2, 3, 1], [2, 3, 4, 1]
    values: dict[str, Any] = {
        "logit_bias": {1: 3.0, 4: -2.0},
        "repetition_penalty": 1.7,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[1, 7], [8]],
        "min_new_tokens": 6,
        "suppress_tokens": [9],
    }
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    expected = logits.clone().unsqueeze(0)
    for name, value in values.items():
        expected = PROCESSORS[name][1](value, prompt)(torch.tensor([[*prompt, *output]]), expected)
    got = processed(logits, prompt, output, **values)
    torch.testing.assert_close(got, expected[0], rtol=1e-6, atol=1e-6)
    # 1 2 3 came twice, so that 2 cannot follow 3 1; 7 and 8 are bad, 9 is suppressed, 11 ends too early.
    assert [7, 8, 9, 11] == torch.isinf(got).nonzero().flatten().tolist()


def test_a_sequence_that_is_all_that_is_known_is_not_repeated() -> None:
    assert [3] == torch.isinf(processed(torch.zeros(VOCAB_SIZE), [3], [], no_repeat_ngram_size=1)).nonzero().tolist()[0]
    got = processed(torch.zeros(VOCAB_SIZE), [3, 3], [], no_repeat_ngram_size=2)
    assert [[3]] == torch.isinf(got).nonzero().tolist()


def test_penalties_of_the_openai_interface_count_generated_tokens_only() -> None:
    got = processed(torch.zeros(VOCAB_SIZE), [1, 1, 1], [2, 2, 3], frequency_penalty=0.5, presence_penalty=0.25)
    assert [0.0, 0.0, -1.25, -0.75, 0.0] == got[:5].tolist()


def test_logits_stay_as_they_are_for_requests_that_change_none() -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    plain = request([1], [], temperature=1.0, top_k=3)
    assert not plain.params.changes_logits
    changed = process_logits(logits, changed_rows([plain, request([1], [], logit_bias={3: 1.0})]))
    assert 0 == logits.abs().sum()
    assert [0.0, 1.0] == changed[:, 3].tolist()


def test_tokens_without_a_logit_change_nothing() -> None:
    far = VOCAB_SIZE + 5
    made = Request.create(
        "r",
        [1],
        SamplingParams(logit_bias={3: 2.0, far: 9.0}, suppress_tokens=[far, 4], min_new_tokens=1),
        eos_token_ids=frozenset({far}),
        max_model_len=100,
    )
    (row,) = process_logits(torch.zeros(1, VOCAB_SIZE), changed_rows([made]))
    assert [0.0, 2.0, -torch.inf, 0.0] == row[2:6].tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_16_bits_are_changed_in_float32(dtype: torch.dtype) -> None:
    logits = torch.full((1, VOCAB_SIZE), 1.0, dtype=dtype)
    changed = changed_rows([request([1], [], logit_bias={3: 0.001})])
    assert 1.001 == pytest.approx(process_logits(logits, changed)[0, 3].item())


@given(st.data())
def test_the_device_reads_a_last_token_that_the_host_does_not_know(data: st.DataObject) -> None:
    texts = data.draw(st.lists(st.lists(TOKENS, min_size=2, max_size=9), min_size=1, max_size=3))
    params = [
        {name: data.draw(values) for name, (values, _) in PROCESSORS.items() if data.draw(st.booleans())}
        | data.draw(st.sampled_from([{}, {"frequency_penalty": 0.5, "presence_penalty": -0.25}]))
        for _ in texts
    ]
    known = [request(text[:1], text[1:], **own) for text, own in zip(texts, params, strict=True)]
    behind = [request(text[:1], text[1:-1], **own) for text, own in zip(texts, params, strict=True)]
    last_tokens = LastTokens(len(texts), torch.device("cpu"))
    rows = np.arange(len(texts))[::-1].copy()
    last_tokens.store(rows, torch.tensor([text[-1] for text in texts]))
    logits = torch.randn(len(texts), VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    names = [[name] for name in names_of(rows).tolist()]
    changed = process_logits(logits, changed_rows(behind, names=names), last_tokens.read)
    assert torch.equal(process_logits(logits, changed_rows(known)), changed)


# --- drafts -----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 4), st.booleans(), st.integers(0, 99), st.booleans())
def test_each_draft_is_followed_by_what_follows_it_as_an_output(
    num_drafts: int, last_is_wrong: bool, seed: int, is_drawn: bool
) -> None:
    params: dict[str, Any] = {
        "repetition_penalty": 3.0,
        "frequency_penalty": 1.0,
        "no_repeat_ngram_size": 2,
        "begin_suppress_tokens": [5, 6],
        "min_new_tokens": 2,
        "seed": seed,
    }
    if is_drawn:
        params |= {"temperature": 1.0, "top_p": 0.9}
    # Two tokens are likely in each row, so that penalties decide which of them comes.
    logits = torch.randn(1 + num_drafts, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    logits[:, seed % 5 : seed % 5 + 2] += 3

    one = request([1, 2], [], **params)
    expected: list[int] = []
    for row in logits:
        (token,) = sample(process_logits(row.unsqueeze(0), changed_rows([one])), [one])
        one.take(token)
        expected.append(token)
    drafts = expected[:num_drafts]
    if last_is_wrong and drafts:
        drafts[-1] = (drafts[-1] + 1) % VOCAB_SIZE
        expected.pop()

    biased = {"logit_bias": {3: 50.0}}
    requests = [request([2], [], **biased), request([1, 2], [], **params), request([2], [], **biased)]
    rows = torch.cat([torch.zeros(3, VOCAB_SIZE), logits, torch.zeros(1, VOCAB_SIZE)])
    all_drafts = [[3, 3], drafts, []]
    owners = [each for each, own in zip(requests, all_drafts, strict=True) for _ in range(1 + len(own))]
    num_drawn = [index for own in all_drafts for index in range(1 + len(own))]
    token_ids = sample(process_logits(rows, changed_rows(requests, all_drafts)), owners, num_drawn)
    assert [[3, 3, 3], expected, [3]] == accept_drafts(token_ids, all_drafts)


# --- the part of the vocabulary that is left --------------------------------------------------------------------------


@given(
    st.floats(0.25, 1, width=32),
    st.floats(0, 0.875, width=32),
    st.floats(0.25, 0.984375, width=32),
    st.integers(0, 99),
)
def test_the_tokens_that_are_left_are_those_of_transformers(
    top_p: float, min_p: float, typical_p: float, seed: int
) -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    expected = logits.clone()
    ids = torch.tensor([[0]])
    for warper in (TopPLogitsWarper(top_p), MinPLogitsWarper(min_p), TypicalLogitsWarper(typical_p)):
        expected = warper(ids, expected)  # type: ignore[arg-type]
    left = set(torch.isfinite(expected[0]).nonzero().flatten().tolist())
    uniforms = torch.linspace(0, 1 - 2**-53, 4001, dtype=torch.float64).unsqueeze(1)
    rows = logits.softmax(dim=-1).expand(len(uniforms), -1)
    limits = (column(each).expand(len(uniforms), 1) for each in (30.0, top_p, min_p, typical_p))
    drawn = set(draw_truncated(rows, uniforms, *limits).tolist())
    # A token of less than 1/4,000 need not be among so many uniform numbers.
    likely = {token for token in left if expected.softmax(dim=-1)[0, token] > 0.001}
    assert likely <= drawn <= left


# --- served -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Any:
    with ScriptedModel(SCRIPT).engine(self_check=False) as engine:
        yield engine


def text_of(engine: Engine, **params: Any) -> str:
    (output,) = engine.generate(["the"], SamplingParams(**{"max_new_tokens": 6, **params}))
    assert output.error is None
    return output.text


def test_a_request_beside_others_is_served_as_alone(served: Engine) -> None:
    biased = SamplingParams(max_new_tokens=6, logit_bias={ord("q"): -50.0, ord("z"): 1.0})
    plain = SamplingParams(max_new_tokens=6)
    outputs = served.generate(["the"] * 3, [plain, biased, plain])
    assert [" quick", " zuick", " quick"] == [output.text for output in outputs]


def test_the_end_comes_after_the_least_number_of_tokens(served: Engine) -> None:
    early = served.generate(["the quick brown fox jump"], SamplingParams(max_new_tokens=5))[0]
    late = served.generate(["the quick brown fox jump"], SamplingParams(max_new_tokens=5, min_new_tokens=4))[0]
    assert (2, "stop") == (len(early.token_ids), early.finish_reason)
    assert (5, "stop") == (len(late.token_ids), late.finish_reason)


def test_log_probabilities_are_those_of_the_model(served: Engine) -> None:
    params = SamplingParams(max_new_tokens=1, logprobs=True, logit_bias={ord("z"): 50.0})
    (output,) = served.generate(["the"], params)
    (plain,) = served.generate(["the"], SamplingParams(max_new_tokens=1, logprobs=True, top_logprobs=5))
    assert output.logprobs is not None
    assert plain.logprobs is not None
    assert "z" == output.text
    assert 2.0 == pytest.approx(plain.logprobs[0] - output.logprobs[0])


def test_a_token_that_the_model_does_not_have_is_refused(served: Engine) -> None:
    for params in ({"logit_bias": {256: 1.0}}, {"bad_words_ids": [[1, 999]]}, {"suppress_tokens": [-1]}):
        with pytest.raises(RequestError, match=r"the model has the tokens \[0, 256\)") as refusal:
            served.add_request("the", SamplingParams(**params))  # type: ignore[arg-type]
        assert "bad_params" == refusal.value.code


def test_a_request_that_bans_every_token_ends_alone(served: Engine) -> None:
    outputs = served.generate(["the", "the"], [SamplingParams(suppress_tokens=range(256)), SamplingParams()])
    assert ["error", "stop"] == [output.finish_reason for output in outputs]
    assert "after token 3, no token is left: its parameters ban all, or the output is not numbers" == outputs[0].error
