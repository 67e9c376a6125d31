"""Log-probabilities of a prompt: they equal the plain model's, for any treatment of the request and its neighbours."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from kvframe_engine.requests.output import RequestOutput
from kvframe_engine.requests.request import SamplingParams

from kvframe import Engine
from kvframe.contract.errors import RequestError
from tests.covering import cover_values
from tests.engine.scripted_model import ScriptedModel
from tests.models.serving import GREEDY, PROMPTS, TinyModel, ids
from tests.support.commands import run

WITH_LOGPROBS = attrs.evolve(GREEDY, prompt_logprobs=True)
LONGEST = max(len(prompt) for prompt in PROMPTS) + GREEDY.max_new_tokens


def plain_logprobs(model: Any, prompt: Sequence[int]) -> torch.Tensor:
    """Return the plain model's log-probabilities of all tokens after each prompt token but the last."""
    with torch.inference_mode():
        logprobs: torch.Tensor = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(dim=-1)
    return logprobs


ROUNDING = 1e-5
"""What float32 may change in a log-probability: ten times the largest difference seen, 1.0e-6."""


@attrs.frozen
class Checked:
    """A tiny model with its tokens after each of ``PROMPTS``, and its log-probabilities there, in float64."""

    model: TinyModel
    tokens: list[tuple[int, ...]]
    logprobs: list[torch.Tensor]

    @classmethod
    def save(cls, path: Path, family: str) -> Checked:
        model = TinyModel.save(path, family)
        plain: Any = model.loaded
        exact_model = copy.deepcopy(plain.model).double()
        exact = [plain_logprobs(exact_model, prompt) for prompt in PROMPTS]
        return cls(model, [model.reference(prompt) for prompt in PROMPTS], exact)

    def assert_top_right(self, index: int, found: tuple[Mapping[int, float] | None, ...] | None, count: int) -> None:
        """Check the log-probabilities of the most likely tokens in the positions of one of ``PROMPTS``."""
        assert found is not None
        assert (None, len(PROMPTS[index])) == (found[0], len(found))
        for exact, likely in zip(self.logprobs[index], found[1:], strict=True):
            assert likely is not None
            values = torch.tensor(list(likely.values()), dtype=torch.float64)
            torch.testing.assert_close(values, exact.topk(count).values, rtol=0, atol=ROUNDING)
            torch.testing.assert_close(values, exact[list(likely)], rtol=0, atol=ROUNDING)

    def assert_right(self, index: int, found: tuple[float | None, ...] | None) -> None:
        """Check the log-probabilities of one of ``PROMPTS``."""
        assert found is not None
        assert (None, len(PROMPTS[index])) == (found[0], len(found))
        found_rest = torch.tensor([value for value in found[1:] if value is not None], dtype=torch.float64)
        following = torch.tensor(PROMPTS[index][1:]).unsqueeze(1)
        torch.testing.assert_close(found_rest, self.logprobs[index].gather(1, following)[:, 0], rtol=0, atol=ROUNDING)


FAMILIES = ("gemma3_text", "gemma3n_text", "cohere2")


@pytest.fixture(scope="module", params=FAMILIES)
def checked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checked:
    return Checked.save(tmp_path_factory.mktemp(request.param), request.param)


# --- what is reported -------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "at once": {},
    "in chunks": {"max_num_batched_tokens": 7, "block_size": 4},
    "hybrid off": {"max_num_batched_tokens": 24, "hybrid": False},
    "few at a time": {"max_num_seqs": 2},
    "skipping": {"max_num_batched_tokens": 24, "prefill_skipping": "decode_only"},
}


@pytest.mark.parametrize(("checked", "options"), cover_values(FAMILIES, OPTIONS), indirect=["checked"])
def test_they_and_those_of_the_most_likely_tokens_are_those_of_the_plain_model(checked: Checked, options: str) -> None:
    params = [attrs.evolve(WITH_LOGPROBS, top_logprobs=index % 4) for index in range(len(PROMPTS))]
    with checked.model.engine(**OPTIONS[options]) as engine:
        outputs = engine.generate(PROMPTS, params)
    assert checked.tokens == [output.token_ids for output in outputs]
    for index, output in enumerate(outputs):
        checked.assert_right(index, output.prompt_logprobs)
        if index % 4:
            checked.assert_top_right(index, output.prompt_top_logprobs, index % 4)
        else:
            assert output.prompt_top_logprobs is None


def test_their_neighbours_are_not_touched(checked: Checked) -> None:
    params = [WITH_LOGPROBS, GREEDY] * (len(PROMPTS) // 2)
    with checked.model.engine(max_num_batched_tokens=30) as engine:
        outputs = engine.generate(PROMPTS, params)
    assert checked.tokens == [output.token_ids for output in outputs]
    for index, output in enumerate(outputs):
        if index % 2:
            assert output.prompt_logprobs is None
        else:
            checked.assert_right(index, output.prompt_logprobs)


def test_preemption_does_not_change_them(checked: Checked) -> None:
    # A prompt that is computed in chunks is preempted by an earlier request that grows.
    options: dict[str, Any] = {"max_num_batched_tokens": 11, "block_size": 4, "prefix_caching": False}
    memory = checked.model.tight_memory(LONGEST + 8, **options)
    with checked.model.engine(memory=memory, **options) as engine:
        outputs = engine.generate(PROMPTS, attrs.evolve(WITH_LOGPROBS, top_logprobs=2))
        assert engine.stats().preemptions > 0
    assert checked.tokens == [output.token_ids for output in outputs]
    for index, output in enumerate(outputs):
        checked.assert_right(index, output.prompt_logprobs)
        checked.assert_top_right(index, output.prompt_top_logprobs, 2)


def test_a_request_that_wants_them_takes_no_cached_prefix_and_leaves_one(checked: Checked) -> None:
    prompt = PROMPTS[3]
    with checked.model.engine(block_size=4) as engine:
        hits = []
        for params in (WITH_LOGPROBS, WITH_LOGPROBS, GREEDY):
            before = engine.stats().cached_prompt_tokens
            (output,) = engine.generate([prompt], params)
            assert checked.tokens[3] == output.token_ids
            hits.append(engine.stats().cached_prompt_tokens - before)
            if params is WITH_LOGPROBS:
                checked.assert_right(3, output.prompt_logprobs)
    assert [0, 0, 60] == hits


# --- when -------------------------------------------------------------------------------------------------------------

SCRIPT = "the quick brown fox"
LIKELY = 2 - math.log(math.e**2 + 255)
UNLIKELY = -math.log(math.e**2 + 255)


def scripted_logprobs(prompt: str) -> tuple[Any, ...]:
    """Return the scripted model's log-probabilities: its script is likely, all other tokens are not."""
    rest = [LIKELY if SCRIPT[index] == prompt[index] else UNLIKELY for index in range(1, len(prompt))]
    return (None, *(pytest.approx(value, abs=ROUNDING) for value in rest))


def steps(engine: Engine) -> list[dict[str, RequestOutput]]:
    """Serve the remaining requests; return the reports of each step."""
    seen = []
    while engine.has_unfinished:
        seen.append({output.request_id: output for output in engine.step()})
    return seen


def test_temperature_and_seed_do_not_change_them() -> None:
    with ScriptedModel(SCRIPT).engine() as engine:
        params = SamplingParams(prompt_logprobs=True, temperature=3.0, top_k=2, seed=1)
        (output,) = engine.generate(["the quack"], params)
    assert scripted_logprobs("the quack") == output.prompt_logprobs


def test_every_output_since_the_first_token_has_them() -> None:
    with ScriptedModel(SCRIPT).engine(max_num_batched_tokens=3) as engine:
        outputs = list(engine.stream("the quack", SamplingParams(max_new_tokens=3, prompt_logprobs=True)))
    assert [scripted_logprobs("the quack")] * 3 == [output.prompt_logprobs for output in outputs]


def test_a_prompt_of_one_token_has_none_to_compute() -> None:
    with ScriptedModel(SCRIPT).engine() as engine:
        (output,) = engine.generate(["t"], SamplingParams(max_new_tokens=2, prompt_logprobs=True))
    assert ("he", (None,)) == (output.text, output.prompt_logprobs)


@pytest.mark.parametrize(("num_steps", "is_complete"), [(0, False), (2, False), (3, True)])
def test_an_aborted_request_has_them_once_its_prompt_is_computed(num_steps: int, is_complete: bool) -> None:
    with ScriptedModel(SCRIPT).engine(max_num_batched_tokens=3) as engine:
        name = engine.add_request("the quack", SamplingParams(prompt_logprobs=True))
        for _ in range(num_steps):
            engine.step()
        engine.abort(name)
        (output,) = engine.step()
    assert "aborted" == output.finish_reason
    assert (scripted_logprobs("the quack") if is_complete else None) == output.prompt_logprobs


def test_samples_share_those_of_the_most_likely_tokens() -> None:
    with ScriptedModel(SCRIPT).engine() as engine:
        params = SamplingParams(max_new_tokens=2, prompt_logprobs=True, top_logprobs=1, n=2, temperature=1.0, seed=3)
        outputs = engine.generate(["the "], params)
    likely = [None, *({ord(letter): pytest.approx(LIKELY, abs=ROUNDING)} for letter in "he ")]
    assert [likely, likely] == [list(output.prompt_top_logprobs or ()) for output in outputs]


def test_the_most_likely_tokens_of_the_prompt_alone_may_be_asked_for() -> None:
    with ScriptedModel(SCRIPT).engine() as engine:
        (output,) = engine.generate(["the "], SamplingParams(max_new_tokens=2, prompt_logprobs=True, top_logprobs=1))
    assert (None, None, 4) == (output.logprobs, output.top_logprobs, len(output.prompt_top_logprobs or ()))


def test_a_refused_prompt_has_none() -> None:
    with ScriptedModel(SCRIPT).engine() as engine:
        output, _ = engine.generate(["", "q"], SamplingParams(prompt_logprobs=True))
    assert ("refused", None) == (output.finish_reason, output.prompt_logprobs)


def test_logits_that_are_not_numbers_show_where_they_are() -> None:
    model = ScriptedModel(SCRIPT)

    def spoil(last: torch.Tensor, logits: torch.Tensor) -> None:
        logits[last == ord("q"), 5] = torch.nan

    model.spoil = spoil
    with model.engine() as engine:
        (output,) = engine.generate(["the qu"], SamplingParams(max_new_tokens=1, prompt_logprobs=True))
    assert ("length", "i") == (output.finish_reason, output.text)
    assert output.prompt_logprobs is not None
    assert [False] * 4 + [True] == [math.isnan(value) for value in output.prompt_logprobs[1:] if value is not None]


def test_it_does_not_wait_for_a_prefix_that_it_would_not_take() -> None:
    prompt = "the quick brown"
    with ScriptedModel(SCRIPT).engine() as engine:
        for name, wanted in (("first", False), ("shares", False), ("computes", True)):
            engine.add_request(prompt, SamplingParams(max_new_tokens=1, prompt_logprobs=wanted), name)
        waiting_first = [list(step) for step in steps(engine)]
        for name, wanted in (("first", False), ("computes", True), ("shares", False)):
            engine.add_request(prompt + "!", SamplingParams(max_new_tokens=1, prompt_logprobs=wanted), name)
        engine.reset_prefix_cache()
        not_waiting = [list(step) for step in steps(engine)]
    assert [["first"], ["shares", "computes"]] == waiting_first
    assert [["first", "computes"], ["shares"]] == not_waiting


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_it_is_asked_for_by_a_truth_value(value: Any) -> None:
    with pytest.raises(RequestError, match=f"prompt_logprobs must be True or False, not {value!r}"):
        SamplingParams(prompt_logprobs=value)


# --- on the command line ----------------------------------------------------------------------------------------------


def test_the_command_line_reports_them_in_json(checked: Checked, tmp_path: Path) -> None:
    prompts = [[1], ids(2, 9)]
    file = tmp_path / "ids.json"
    file.write_text(json.dumps(prompts))
    arguments = ["generate", str(checked.model.path), "--prompt-token-ids", str(file), "--max-new-tokens", "1"]
    result = run(*arguments, "--prompt-logprobs", "--json")
    assert 0 == result.exit_code, result.output
    found = [output["prompt_logprobs"] for output in json.loads(result.stdout)["outputs"]]
    assert [None] == found[0]
    checked.assert_right(1, tuple(found[1]))
    result = run(*arguments, "--prompt-logprobs")
    assert (2, True) == (result.exit_code, "add --json" in result.output)
