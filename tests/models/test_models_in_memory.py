"""An engine for a model in memory: the model stays its owner's, and its weights may change between steps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from kvframe_engine.contract import EngineError
from kvframe_transformers.testing import save_tiny
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from kvframe import Embedder, Engine, Prompt, SamplingParams, Stack
from kvframe.contract import ModelError, RequestError
from tests.covering import cover_pairs, cover_values, few, keep
from tests.models.serving import GREEDY, PROMPTS, ids
from tests.support.engines import runner_of, scheduler_of

STACK = Stack.from_mapping({"cache": {"memory": "2MiB"}, "limits": {"max_num_batched_tokens": 64}})
PROMPT = ids(3, 24)
FAMILIES = ["llama", "gemma3_text", "llama4_text", "deepseek_v3", "gpt_oss", "jamba", "qwen3_next", "lfm2"]


def tiny(path: Path, family: str, kind: Any = AutoModelForCausalLM) -> Any:
    """Return a tiny random model in float64, in which no rounding changes a token."""
    save_tiny(path, family)
    # torch's product for many experts takes no float64.
    return kind.from_pretrained(path, dtype=torch.float64, experts_implementation="eager").eval()


def generated(model: Any, prompt: list[int], count: int = GREEDY.max_new_tokens) -> tuple[int, ...]:
    """Return the tokens of the model's own ``generate``."""
    input_ids = torch.tensor([prompt])
    sequence = model.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=count, do_sample=False
    )
    return tuple(sequence[0, len(prompt) :].tolist())


def change_weights(model: Any, seed: int = 1) -> None:
    """Change all weights in place, as an optimizer does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.3 * weight.std().nan_to_num(0.0) * torch.randn(weight.shape, generator=generator).to(weight)


@pytest.mark.parametrize("family", keep(FAMILIES, "llama", "deepseek_v3"))
def test_its_tokens_are_those_of_generate(family: str, tmp_path: Path) -> None:
    model = tiny(tmp_path, family)
    expected = [generated(model, prompt) for prompt in PROMPTS]
    with Engine.from_model(model, stack=STACK) as engine:
        assert ("cpu", "float64") == (engine.stack.model.device, engine.stack.model.dtype)
        assert expected == [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("family", keep(FAMILIES, "gpt_oss", "jamba"))
def test_between_steps_the_model_runs_trains_and_generates_as_before(family: str, tmp_path: Path) -> None:
    model = tiny(tmp_path, family)
    alone, batch = copy.deepcopy(model), torch.tensor([PROMPT])
    with Engine.from_model(model, stack=STACK) as engine:
        engine.add_request(PROMPT, GREEDY)
        engine.step()
        for module in (model, alone):
            module.train()
            module(batch, labels=batch).loss.backward()
            module.eval()
        assert torch.equal(alone(batch).logits, model(batch).logits)
        for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), name
            assert ours.grad is None or torch.equal(theirs.grad, ours.grad), name
        assert generated(alone, PROMPT) == generated(model, PROMPT)
        outputs = [output for _ in range(GREEDY.max_new_tokens) for output in engine.step()]
    assert generated(alone, PROMPT) == outputs[-1].token_ids


@pytest.mark.parametrize(
    ("family", "host_memory"),
    keep(cover_values(FAMILIES, [None, "1MiB"]), "gemma3_text", "jamba"),
)
def test_nothing_of_the_old_weights_is_used_after_they_changed(
    family: str, host_memory: str | None, tmp_path: Path
) -> None:
    model = tiny(tmp_path, family)
    stack = attrs.evolve(STACK, cache=attrs.evolve(STACK.cache, host_memory=host_memory))
    with Engine.from_model(model, stack=stack) as engine:
        engine.generate([PROMPT], GREEDY)  # leaves a cached prefix
        engine.add_request(PROMPT, GREEDY, "a")
        engine.add_request(PROMPTS[3], GREEDY, "b")
        prompts = {"a": PROMPT, "b": PROMPTS[3]}
        for _ in range(4):
            outputs = engine.step()
        before = {output.request_id: output.token_ids for output in outputs}
        scheduler_of(engine).preempt_last()
        change_weights(model)
        engine.weights_changed()
        rest = {
            name: tokens + generated(model, prompts[name] + list(tokens), GREEDY.max_new_tokens - len(tokens))
            for name, tokens in before.items()
        }
        ended = {}
        while engine.has_unfinished:
            ended |= {output.request_id: output.token_ids for output in engine.step()}
        assert rest == ended
        hits = engine.stats().cached_prompt_tokens
        assert generated(model, PROMPT) == engine.generate([PROMPT], GREEDY)[0].token_ids
        assert engine.stats().cached_prompt_tokens > hits  # of what was computed with the new weights


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_running_requests_can_fail_instead(family: str, tmp_path: Path) -> None:
    model = tiny(tmp_path, family)
    with Engine.from_model(model, stack=STACK) as engine:
        engine.add_request(PROMPT, GREEDY, "started")
        engine.step()
        engine.add_request(PROMPT, GREEDY, "waiting")
        change_weights(model)
        engine.weights_changed(running="fail")
        first = engine.step()
        assert [("started", "error", "the model's weights changed before it had ended")] == [
            (output.request_id, output.finish_reason, output.error) for output in first if output.finish_reason
        ]
        outputs = [output for _ in range(GREEDY.max_new_tokens) for output in engine.step()]
        assert ("waiting", generated(model, PROMPT)) == (outputs[-1].request_id, outputs[-1].token_ids)


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_the_states_of_an_encoder_are_computed_again(family: str, tmp_path: Path) -> None:
    model = tiny(tmp_path, family, AutoModelForSeq2SeqLM)
    request = Prompt(encoder=ids(5, 20))
    params = SamplingParams(max_new_tokens=8, ignore_eos=True, logprobs=True)

    def right(output: Any) -> None:
        start = engine.model.start_token_ids()
        with torch.no_grad():
            logits = model(
                input_ids=torch.tensor([ids(5, 20)]), decoder_input_ids=torch.tensor([[*start, *output.token_ids]])
            ).logits[0, len(start) - 1 : -1]
        assert output.token_ids == tuple(logits.argmax(-1).tolist())

    with Engine.from_model(model, stack=STACK) as engine:
        right(engine.generate([request], params)[0])
        change_weights(model)
        engine.weights_changed()
        right(engine.generate([request], params)[0])


def test_an_embedder_pools_all_tokens_with_the_new_weights(tmp_path: Path) -> None:
    model = tiny(tmp_path, "llama", AutoModel)
    stack = Stack.from_mapping({"cache": {"memory": "2MiB"}, "limits": {"max_num_batched_tokens": 16}})
    with Embedder.from_model(model, stack=stack, pooling="mean") as embedder:
        embedder.add_request(PROMPT)
        embedder.step()  # pools 16 of its tokens
        change_weights(model)
        embedder.weights_changed()
        outputs = embedder.step() or embedder.step()
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).last_hidden_state[0].mean(0)
    np.testing.assert_allclose(expected.numpy(), outputs[0].embedding, rtol=1e-5, atol=1e-6)


def test_packed_weights_are_packed_again(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    stack = Stack.from_mapping({"cache": {"memory": "2MiB"}, "plugin": {"transformers": {"pack_weights": True}}})
    params = attrs.evolve(GREEDY, logprobs=True)
    with Engine.from_model(model, stack=stack) as engine:
        old = engine.generate([PROMPT], params)[0]
        change_weights(model)
        engine.weights_changed()
        new = engine.generate([PROMPT], params)[0]
        assert_right_logprobs(model, PROMPT, new, 1e-4)
    assert old.logprobs != new.logprobs


def test_captured_graphs_are_captured_again(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    stack = Stack.from_mapping(
        {
            "cache": {"memory": "2MiB"},
            "model": {"graphs": [1, 2]},
            "rules": [{"layers": "*", "backend": "cpu"}],
        }
    )
    with Engine.from_model(model, stack=stack) as engine:
        graphs: Any = runner_of(engine).graphs
        engine.generate([PROMPT], GREEDY)
        assert graphs.num_graphs
        change_weights(model)
        engine.weights_changed()
        assert 0 == graphs.num_graphs
        assert generated(model, PROMPT) == engine.generate([PROMPT], GREEDY)[0].token_ids
        assert graphs.num_graphs


def warned(caplog: pytest.LogCaptureFixture) -> int:
    """Return how many warnings say that the weights were changed without a word."""
    return sum("were changed, and weights_changed() was not called" in record.getMessage() for record in caplog.records)


def test_weights_that_change_without_a_word_are_warned_about_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny(tmp_path, "llama")
    with Engine.from_model(model, stack=STACK) as engine:
        engine.generate([PROMPT], GREEDY)
        model(torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
        model.train().eval()
        engine.generate([PROMPT], GREEDY)
        assert 0 == warned(caplog)
        change_weights(model)
        engine.weights_changed()
        engine.generate([PROMPT], GREEDY)
        assert 0 == warned(caplog)
        for seed in range(2):
            change_weights(model, seed)
            engine.generate([PROMPT], GREEDY)
        assert 1 == warned(caplog)
        engine.weights_changed()
        model.lm_head.weight.data = 2 * model.lm_head.weight.data
        engine.generate([PROMPT], GREEDY)
        assert 2 == warned(caplog)


def test_the_weights_are_looked_at_when_the_engine_begins_to_serve_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(tmp_path, "llama")
    calls: list[int] = []
    with Engine.from_model(model, stack=STACK) as engine:
        version = engine.model.weights_version()
        monkeypatch.setattr(engine.model, "weights_version", lambda: calls.append(1) or version)
        engine.generate([PROMPT, *PROMPTS], GREEDY)
        assert 1 == len(calls)
        engine.generate([PROMPT], GREEDY)
        assert 2 == len(calls)


def test_weights_without_a_count_of_changes_are_not_watched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny(tmp_path, "llama")
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        for name, weight in [*model.named_parameters()]:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, nn.Parameter(weight.clone(), requires_grad=False))
        with Engine.from_model(model, stack=STACK) as engine:
            assert engine.model.weights_version() is None
            engine.generate([PROMPT], GREEDY)
    with Engine.from_pretrained(tmp_path, stack=STACK) as engine:
        assert engine.model.weights_version() is None
    assert 0 == warned(caplog)


def test_two_engines_cannot_serve_one_model(tmp_path: Path) -> None:
    model = tiny(tmp_path, "llama")
    refused = pytest.raises(ModelError, match="serves another engine already; close that engine first")
    with Engine.from_model(model, stack=STACK), refused:
        Engine.from_model(model, stack=STACK)
    with Engine.from_model(model, stack=STACK) as engine:
        assert generated(model, PROMPT) == engine.generate([PROMPT], GREEDY)[0].token_ids


def test_what_cannot_be_served_is_refused_in_a_sentence(tmp_path: Path) -> None:
    model = tiny(tmp_path, "llama")
    with pytest.raises(ModelError, match=r"no plugin serves a torch.nn.modules.linear.Linear in memory \(asked: tran"):
        Engine.from_model(nn.Linear(2, 2), stack=STACK)
    with pytest.raises(ModelError, match="has no weights: it is on the device 'meta'"):
        Engine.from_model(copy.deepcopy(model).to("meta"), stack=STACK)
    model.lm_head.to("meta")
    with pytest.raises(ModelError, match="are on cpu and meta; put them on one device"):
        Engine.from_model(model, stack=STACK)


def test_another_word_for_running_requests_is_refused(tmp_path: Path) -> None:
    model = tiny(tmp_path, "llama")
    with Engine.from_model(model, stack=STACK) as engine:
        engine.add_request(PROMPT, GREEDY)
        engine.step()
        wrong: Any = "restart"
        with pytest.raises(RequestError, match='must be "recompute" or "fail", not'):
            engine.weights_changed(running=wrong)
        assert 1 == len(scheduler_of(engine).running)
    with pytest.raises(EngineError, match="the engine is closed"):
        engine.weights_changed()


# --- log-probabilities of generated tokens ----------------------------------------------------------------------------


def assert_right_logprobs(model: Any, prompt: list[int], output: Any, tolerance: float) -> None:
    """Check an output's log-probabilities against a dense forward of the model."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *output.token_ids]])).logits[0, len(prompt) - 1 : -1]
    exact = logits.double().log_softmax(-1)
    places = range(len(output.token_ids))
    np.testing.assert_allclose(exact[places, output.token_ids].numpy(), output.logprobs, rtol=0, atol=tolerance)
    if output.top_logprobs is not None:
        for row, top in zip(exact, output.top_logprobs, strict=True):
            np.testing.assert_allclose(row[list(top)].numpy(), list(top.values()), rtol=0, atol=tolerance)
            assert list(top.values()) == sorted(top.values(), reverse=True)
            assert min(top.values()) >= row.topk(len(top)).values.min() - tolerance


ROUNDING = 2e-4
"""What float32, in which they are computed, may change: seven times the largest difference seen, 2.9e-5."""


@pytest.mark.parametrize(
    ("family", "temperature", "drafts"),
    few(3, cover_pairs(["llama", "qwen3_next", "gemma3_text"], [0.0, 0.8], ["off", "ngram"])),
)
def test_they_are_those_of_a_dense_forward(family: str, temperature: float, drafts: str, tmp_path: Path) -> None:
    model = tiny(tmp_path, family)
    params = [
        SamplingParams(max_new_tokens=12, temperature=temperature, seed=seed, ignore_eos=True, **fields)
        for seed, fields in enumerate(
            ({"logprobs": True}, {}, {"logprobs": True, "top_logprobs": 5}, {"logprobs": True, "n": 3})
        )
    ]
    prompts = [PROMPTS[3], PROMPTS[1], PROMPTS[4], [3, 4, 5] * 9]
    stack = Stack.from_mapping({"cache": {"memory": "4MiB"}, "model": {} if drafts == "off" else {"drafts": drafts}})
    with Engine.from_model(model, stack=stack) as engine:
        outputs = engine.generate(prompts, params)
    assert [True, False, True, True, True, True] == [output.logprobs is not None for output in outputs]
    assert [None, None, 5, None, None, None] == [output.top_logprobs and 5 for output in outputs]
    for prompt, output in zip([*prompts, prompts[3], prompts[3]], outputs, strict=True):
        if output.logprobs is not None:
            assert 12 == len(output.token_ids)
            assert_right_logprobs(model, prompt, output, ROUNDING)


def test_they_end_with_the_tokens_when_a_stop_lies_within_drafts(tmp_path: Path) -> None:
    model = tiny(tmp_path, "llama")
    stack = Stack.from_mapping({"cache": {"memory": "2MiB"}, "model": {"drafts": "ngram"}})
    prompt = [3, 4, 5] * 9
    with Engine.from_model(model, stack=stack) as engine:
        tokens = engine.generate([prompt], SamplingParams(max_new_tokens=30, ignore_eos=True))[0].token_ids
        for stop in sorted(set(tokens)):
            params = SamplingParams(max_new_tokens=30, ignore_eos=True, stop_token_ids=[stop], logprobs=True)
            output = engine.generate([prompt], params)[0]
            assert_right_logprobs(model, prompt, output, ROUNDING)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"logprobs": 1}, "logprobs must be True or False, not 1"),
        ({"top_logprobs": 2}, "top_logprobs is given without logprobs=True or prompt_logprobs=True"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be at most 20, not 21"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs must be a whole number of at least 0"),
    ],
)
def test_wrong_params_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**wrong)
