"""A draft model beside the served one: the tokens stay the same, and its state follows requests everywhere.

A draft model that is the served model itself would generate the same tokens. So every continuation that it gives shows
whether its state was right.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from kvframe_draft_model.proposer import DraftModelProposer
from kvframe_engine.assembly import _load_draft
from kvframe_engine.contract import DraftRequest, PrefixFileError
from kvframe_engine.ranks.follower import Follower
from kvframe_engine.ranks.leader import Leader
from kvframe_transformers.testing import save_tiny

from kvframe import Embedder, Prompt, RequestOutput, SamplingParams, Setup, Stack
from kvframe.contract import StackError
from kvframe.planning.recognise import FoundAdapter
from tests.covering import cover_values, few
from tests.models import encoder_decoder
from tests.models.serving import NUM_NEW_TOKENS, PROMPTS, TinyModel, held_pages, make_stack
from tests.support.commands import run, run_json
from tests.support.drafts import generated, models_with, shown
from tests.support.engines import draft_of, runner_of
from tests.support.plugins import plugin

OTHERS = (
    "llama",
    "gemma3_text",
    "gemma3n_text",
    "llama4_text",
    "mamba",
    "mamba2",
    "jamba",
    "lfm2",
    "deepseek_v3",
    "qwen3_next",
)
FAMILIES = ("falcon_h1", *(pytest.param(family, marks=pytest.mark.whole) for family in OTHERS))
SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "seed": 5}

SOME = PROMPTS[2:6]
"""A prompt shorter than a block, long ones, and one with the beginning of another one."""
CONTINUED: list[list[int]] = []
"""The tokens of requests that were continued, each with its continuation."""


@attrs.define(kw_only=True, eq=False)
class Meddling(DraftModelProposer):
    """Proposes the continuation with wrong tokens in some places, a part of it, more than it, or nothing of it."""

    name = "meddling"

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self.drafts_of(request) for request in requests]

    def drafts_of(self, request: DraftRequest) -> list[int]:
        context, tokens = list(request.token_ids), list(request.continuation)
        assert request.max_drafts == len(tokens)
        CONTINUED.append([*context, *tokens])
        chance = random.Random(sum(context) + len(context))
        match chance.randrange(6):
            case 0:
                return []
            case 1:
                return tokens[:1]
            case 2:
                return [token if chance.random() < 0.6 else (token + 1) % 128 for token in tokens]
        return tokens


ANSWERS: list[list[int]] = []
"""The tokens of requests, prompt and answer, that ``Informed`` knows."""


@attrs.define(kw_only=True, eq=False)
class Informed(DraftModelProposer):
    """Proposes the right tokens, whatever the draft model generates."""

    name = "informed"

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        drafts = []
        for request in requests:
            context = list(request.token_ids)
            CONTINUED.append([*context, *request.continuation])
            answer = next(candidate for candidate in ANSWERS if candidate[: len(context)] == context)
            drafts.append(answer[len(context) :][: request.max_drafts])
        return drafts


Models = Callable[..., TinyModel]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    proposers = {"meddling": Meddling, "informed": Informed}
    return models_with(tmp_path_factory.mktemp("models"), plugin("meddling_plugin", proposers=proposers))


def greedy(model: TinyModel) -> SamplingParams:
    """Return parameters for as many tokens as no rounding changes (``test_greedy_margins``)."""
    return SamplingParams(max_new_tokens=16 if model.dtype == "float64" else NUM_NEW_TOKENS)


def by(path: Path, **options: Any) -> dict[str, Any]:
    return {"name": "draft_model", "model": str(path), **options}


def check_same(
    model: TinyModel,
    drafts: Any,
    params: SamplingParams,
    prompts: Sequence[Any] = SOME,
    *,
    plain: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[list[RequestOutput], Any]:
    """Check that drafts change no output, without and then with cached prefixes; return outputs and statistics.

    Args:
        model: The served model.
        drafts: The proposer.
        params: How to sample.
        prompts: The prompts.
        plain: Options of the engine without drafts.
        options: Options of the engine with drafts.
    """
    expected = generated(model, params, prompts, **(plain or {}))[0]
    with model.engine(drafts=drafts, **options) as engine:
        outputs = [*engine.generate(prompts, params), *engine.generate(prompts, params)]
        assert 0 == held_pages(engine)
        stats = engine.stats()
    assert [*shown(expected), *shown(expected)] == shown(outputs)
    return outputs, stats


def check_twin(model: TinyModel, params: SamplingParams, prompts: Sequence[Any] = SOME, **options: Any) -> Any:
    """Let a model be its own draft model, and check that everything it continued is what was generated."""
    CONTINUED.clear()
    outputs, stats = check_same(model, {**by(model.path), "name": "meddling"}, params, prompts, **options)
    answers = [[*output.prompt_token_ids, *output.token_ids] for output in outputs]
    assert len(CONTINUED) > len(prompts)
    assert [] == [tokens for tokens in CONTINUED if not any(answer[: len(tokens)] == tokens for answer in answers)]
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
    return stats


# --- the tokens -------------------------------------------------------------------------------------------------------


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "all": {"temperature": 0.8, "seed": 5},
    "likely ones": {"temperature": 0.9, "seed": 6, "top_k": 20, "top_p": 0.9},
}
PAIRS = [
    ("llama", "llama"),
    ("gemma3_text", "llama"),
    ("falcon_h1", "llama"),
    ("llama", "mamba2"),
]


@pytest.mark.parametrize(("family", "draft", "sampling"), few(3, cover_values(PAIRS, SAMPLING)))
def test_a_smaller_model_changes_no_token(
    models: Models, tmp_path: Path, family: str, draft: str, sampling: str
) -> None:
    save_tiny(tmp_path, draft, **(SMALL if draft == "llama" else {"num_hidden_layers": 1, "seed": 5}))
    params = SamplingParams(max_new_tokens=12, **SAMPLING[sampling])
    _, stats = check_same(models(family), by(tmp_path), params, SOME[:3])
    assert stats.draft_tokens > 0


def test_a_model_that_is_almost_the_same_gets_some_drafts_right(models: Models, tmp_path: Path) -> None:
    model = models("llama")
    saved = save_tiny(tmp_path, "llama")
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.mul_(1 + 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    saved.save_pretrained(tmp_path)
    _, stats = check_same(model, by(tmp_path), greedy(model))
    assert 0.2 * stats.draft_tokens < stats.accepted_draft_tokens < 0.95 * stats.draft_tokens


# --- the draft model's state ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_model_accepts_all_of_its_own_drafts(models: Models, sampling: str) -> None:
    model = models("llama")
    with model.engine(drafts=by(model.path)) as engine:
        engine.generate(PROMPTS, SamplingParams(max_new_tokens=24, **SAMPLING[sampling]))
        stats = engine.stats()
    # The prompt's step samples one of 24 tokens, and five further steps one each; the others are drafts.
    assert (8 * (24 - 6), 8 * (24 - 6)) == (stats.draft_tokens, stats.accepted_draft_tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_its_state_is_right_after_rejections_and_hits(models: Models, family: str) -> None:
    model = models(family)
    check_twin(model, greedy(model))


def test_its_state_is_right_after_drafts_that_are_not_its_own(models: Models, tmp_path: Path) -> None:
    model, params = models("llama"), SamplingParams(max_new_tokens=16)
    draft = attrs.evolve(TinyModel.save(tmp_path, "llama", seed=7), registry=model.registry).in_dtype("float64")
    CONTINUED.clear()
    ANSWERS[:] = [[*output.prompt_token_ids, *output.token_ids] for output in generated(model, params, SOME[:2])[0]]
    _, stats = check_same(model, {**by(tmp_path), "name": "informed"}, params, SOME[:2])
    assert stats.draft_tokens == stats.accepted_draft_tokens > 0
    # Alone, the draft model goes on after the same tokens with the same ones.
    alone = generated(draft, SamplingParams(max_new_tokens=1), [tokens[:-1] for tokens in CONTINUED])[0]
    assert [tokens[-1:] for tokens in CONTINUED] == [list(output.token_ids) for output in alone]


SETTINGS: dict[str, dict[str, Any]] = {
    "chunked prompts": {"max_num_batched_tokens": 16, "audit": True},
    "blocks of 4": {"block_size": 4},
}
OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "without prefix caching": {"prefix_caching": False},
    "a state at every block": {"states": {"checkpoints": "all"}},
    "every past token": {"hybrid": False},
    "one request at a time": {"max_num_seqs": 1},
}


@pytest.mark.parametrize(("family", "setting"), few(1, cover_values(["gemma3_text", "lfm2"], SETTINGS)))
def test_settings_change_nothing(models: Models, family: str, setting: str) -> None:
    model = models(family)
    check_twin(model, greedy(model), **SETTINGS[setting])


@pytest.mark.whole
@pytest.mark.parametrize("setting", OTHER_SETTINGS)
@pytest.mark.parametrize("family", ["gemma3_text", "llama4_text", "lfm2"])
def test_other_settings_change_nothing(models: Models, family: str, setting: str) -> None:
    model = models(family)
    check_twin(model, greedy(model), **OTHER_SETTINGS[setting])


@pytest.mark.parametrize("family", few(1, ["llama", "lfm2"]))
def test_its_state_is_right_after_preemption(models: Models, family: str) -> None:
    model = models(family)
    memory = model.tight_memory(81, drafts=by(model.path))
    options = {"memory": memory, "host_memory": "1MiB", "audit": True}
    stats = check_twin(model, greedy(model), **options)
    assert stats.preemptions > 0


@pytest.mark.parametrize("family", ["lfm2", pytest.param("gemma3_text", marks=pytest.mark.whole)])
def test_samples_fork_its_state_too(models: Models, family: str) -> None:
    check_twin(models(family), SamplingParams(max_new_tokens=12, temperature=0.9, seed=7, n=3), SOME[:2])


def test_stops_and_log_probabilities_are_the_same(models: Models) -> None:
    model = models("llama")
    params = SamplingParams(max_new_tokens=12, temperature=1.5, seed=8, stop_token_ids=tuple(range(0, 128, 9)))
    check_same(model, by(model.path), params)
    params = SamplingParams(max_new_tokens=12, logprobs=True, prompt_logprobs=True)
    expected = generated(model, params, SOME)[0]
    with model.engine(drafts=by(model.path), max_num_batched_tokens=24) as engine:
        outputs = engine.generate(SOME, params)
        assert engine.stats().accepted_draft_tokens == engine.stats().draft_tokens > 0
    for output, other in zip(expected, outputs, strict=True):
        assert output.token_ids == other.token_ids
        assert output.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.whole
@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"])
def test_the_served_model_skips_prompt_tokens_and_the_draft_model_does_not(models: Models, family: str) -> None:
    model = models(family)
    check_twin(model, greedy(model), prefill_skipping="decode_only")


@pytest.mark.parametrize("family", ["mamba2", pytest.param("gemma3_text", marks=pytest.mark.whole)])
def test_both_models_run_in_graphs(models: Models, family: str) -> None:
    model = models(family, "float32")
    expected = generated(model, greedy(model), SOME)[0]
    with model.engine(drafts=by(model.path), graphs=(4, 8)) as engine:
        draft = runner_of(engine).draft
        runners: list[Any] = [runner_of(engine), draft.runner]
        captured = [model_runner.graphs.num_graphs for model_runner in runners]
        for _ in range(2):
            assert shown(expected) == shown(engine.generate(SOME, greedy(model)))
        # No request waited for a capture.
        assert captured == [model_runner.graphs.num_graphs for model_runner in runners]
        assert runner_of(engine).graphs.num_replays > 0
        assert draft.runner.graphs.num_replays > 0
        # It follows in graphs too: no logits are wanted then.
        assert {True, False} == {sizes.num_wanted > 0 for sizes in draft.runner.graphs._graphs}


@pytest.mark.whole
def test_pages_of_fewer_bits_hold_both_models(models: Models) -> None:
    model = models("llama")
    check_twin(model, greedy(model), format="int8_token_head", plain={"format": "int8_token_head"})


@pytest.mark.whole
def test_a_decoder_drafts_for_a_decoder_with_an_encoder(models: Models, tmp_path: Path) -> None:
    model = models("t5")
    save_tiny(tmp_path, "llama", vocab_size=model.loaded.description.vocab_size, max_position_embeddings=4096)
    prompts: list[Prompt] = encoder_decoder.prompts("t5")
    _, stats = check_same(
        model, by(tmp_path), SamplingParams(max_new_tokens=8, ignore_eos=True), prompts[:3], max_model_len=128
    )
    assert stats.draft_tokens > 0


def test_a_saved_prefix_holds_both_models_and_is_refused_for_another_draft_model(
    models: Models, tmp_path: Path
) -> None:
    model, params = models("gemma3_text"), SamplingParams(max_new_tokens=12)
    with model.engine(drafts=by(model.path)) as engine:
        engine.save_prefixes(tmp_path / "saved", [PROMPTS[3]])
        expected = engine.generate([[*PROMPTS[3], 1, 2]], params)
    with model.engine(drafts=by(model.path)) as engine:
        assert [True] == [saved_prefix.is_cached for saved_prefix in engine.load_prefixes(tmp_path / "saved")]
        assert shown(expected) == shown(engine.generate([[*PROMPTS[3], 1, 2]], params))
        stats = engine.stats()
        assert stats.cached_prompt_tokens > 0
        assert stats.accepted_draft_tokens == stats.draft_tokens > 0
    save_tiny(tmp_path / "other", "gemma3_text", seed=1)
    for drafts in (by(tmp_path / "other"), "ngram"):
        with model.engine(drafts=drafts) as engine, pytest.raises(PrefixFileError) as refused:
            engine.load_prefixes(tmp_path / "saved")
        assert "other_model" == refused.value.code


# --- what is refused, and what fails ----------------------------------------------------------------------------------


def test_a_draft_model_that_fails_is_set_aside(
    models: Models, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, params = models("llama"), SamplingParams(max_new_tokens=12)
    expected = generated(model, params, SOME)[0]
    for failing_call, kind in ((1, SystemExit), (2, KeyboardInterrupt), (5, RuntimeError)):
        caplog.clear()
        with model.engine(drafts=by(model.path)) as engine:
            draft, calls = draft_of(engine), []
            assert draft is not None
            forward = draft.forward

            def fail(*inputs: torch.Tensor, at: int = failing_call, forward: Any = forward, calls: Any = calls) -> Any:
                calls.append(1)
                if len(calls) >= at:
                    raise kind("no more memory")  # noqa: B023
                return forward(*inputs)

            monkeypatch.setattr(draft, "forward", fail)
            assert shown(expected) == shown(engine.generate(SOME, params))
            assert 0 == held_pages(engine)
            assert failing_call == len(calls)
        monkeypatch.undo()
        assert [
            f"the draft model failed, and is set aside: it continues no more requests: {kind.__name__}: no more memory"
        ] == [record.message for record in caplog.records]


def test_a_draft_model_whose_logits_are_not_numbers_continues_nothing(models: Models, tmp_path: Path) -> None:
    model = models("llama")
    saved = save_tiny(tmp_path, "llama", **SMALL)
    with torch.no_grad():
        saved.lm_head.weight.fill_(torch.nan)
    saved.save_pretrained(tmp_path)
    CONTINUED.clear()
    ANSWERS[:] = [
        [*output.prompt_token_ids, *output.token_ids] for output in generated(model, greedy(model), SOME[:2])[0]
    ]
    _, stats = check_same(model, {**by(tmp_path), "name": "informed"}, greedy(model), SOME[:2])
    assert stats.accepted_draft_tokens == stats.draft_tokens > 0
    # What was continued is what was known, without a token after it.
    assert [] == [tokens for tokens in CONTINUED if min(tokens) < 0]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "another vocabulary": ("llama", {"vocab_size": 100}, "has a vocabulary of 100 tokens and .* one of 128"),
    "shorter requests": ("llama", {"max_position_embeddings": 99}, "takes 99 tokens, and a request may have 512"),
    "an encoder": ("t5", {"vocab_size": 128}, "takes inputs beside tokens"),
    "no text": ("bert", {"vocab_size": 128}, "does not generate text"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_draft_model_that_cannot_continue_requests_is_refused(models: Models, tmp_path: Path, why: str) -> None:
    family, changes, message = REFUSED[why]
    save_tiny(tmp_path, family, **changes)
    with pytest.raises(StackError, match=message):
        models("llama").engine(drafts=by(tmp_path))


@pytest.mark.parametrize(
    ("drafts", "message"),
    [
        ({"name": "draft_model"}, "'model' must be given"),
        ({"name": "draft_model", "model": 3}, "model must be the path of a model's folder, not 3"),
        ({"name": "draft_model", "model": "no/such"}, "the draft model: there is no file or folder no/such"),
    ],
)
def test_a_wrong_choice_is_refused_in_one_sentence(models: Models, drafts: Any, message: str) -> None:
    with pytest.raises(StackError, match=message):
        models("llama").engine(drafts=drafts)


def test_a_closed_engine_gives_its_draft_model_free(models: Models) -> None:
    model = models("llama")
    with model.engine(drafts=by(model.path)) as engine:
        draft = draft_of(engine)
    assert draft is not None
    with attrs.evolve(model, loaded=draft).engine() as engine:
        assert 1 == len(engine.generate(PROMPTS[:1], greedy(model)))


def test_of_several_ranks_the_first_one_loads_the_draft_model_whole(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, loaded = models("llama"), []
    load = FoundAdapter.load

    def noting(adapter: FoundAdapter, path: Path, **options: Any) -> Any:
        loaded.append(options)
        return load(adapter, path, **options)

    monkeypatch.setattr(FoundAdapter, "load", noting)
    stack = make_stack(drafts=by(model.path))
    stack = attrs.evolve(stack, model=attrs.evolve(stack.model, device="cpu", dtype="bfloat16"))
    setup = Setup.of(model.loaded.description, stack, model.registry)
    for ranks, is_loaded in ((None, True), (object.__new__(Leader), True), (object.__new__(Follower), False)):
        draft = _load_draft(model.loaded, setup, ranks)
        assert (draft is not None) == is_loaded
    assert [{"device": "cpu", "dtype": "bfloat16", "whole": True}] * 2 == loaded


# --- what is said about it --------------------------------------------------------------------------------------------


def test_the_plan_shows_its_layers_in_the_groups_of_layers_that_keep_the_same_tokens(
    models: Models, tmp_path: Path
) -> None:
    save_tiny(tmp_path, "llama", **SMALL)
    model = models("gemma3_text")
    with model.engine() as engine:
        alone = engine.plan
    with model.engine(drafts=by(tmp_path)) as engine:
        plan = engine.plan
    windows, full = plan.groups
    assert alone.groups[0].layers == windows.layers
    assert (*alone.groups[1].layers, "draft:model.layers.0.self_attn") == full.layers
    # One layer with two heads of 8 numbers of 8 bytes, keys and values, for 16 tokens.
    assert alone.groups[1].page_bytes + 2 * 2 * 8 * 8 * 16 == full.page_bytes


def test_the_command_line_plans_explains_and_generates_with_it(models: Models, tmp_path: Path) -> None:
    save_tiny(tmp_path / "small", "llama", **SMALL)
    model, prompts, stack = models("gemma3_text"), tmp_path / "prompts.json", tmp_path / "stack.toml"
    rules = '[[rules]]\nlayers = "draft:*"\nbackend = "torch_reference"\n'
    drafts = {"name": "draft_model", "model": str(tmp_path / "small"), "max_drafts": 2}
    stack.write_text(f"[model]\ndrafts = {{ name = 'draft_model', model = '{tmp_path / 'small'}' }}\n{rules}")
    prompts.write_text(json.dumps([PROMPTS[2]]))

    path, name = str(model.path), "draft:model.layers.0.self_attn"
    assert name in run_json("plan", path, "--stack", str(stack), "--cache-memory", "4MiB")["groups"][1]["layers"]
    explained = {layer["layer"]: layer for layer in run_json("explain", path, "--stack", str(stack))["layers"]}
    assert "kvframe:torch_reference" == explained[name]["backend"] != explained["model.layers.3.self_attn"]["backend"]
    command = ("generate", path, "--prompt-token-ids", str(prompts), "--max-new-tokens", "12", "--memory", "4MiB")
    plain, drafted = run_json(*command), run_json(*command, "--drafts", json.dumps(drafts))
    assert plain["outputs"] == drafted["outputs"]
    assert drafted["stats"]["draft_tokens"] > 0 == plain["stats"]["draft_tokens"]
    wrong = run(*command, "--drafts", '{"model": "small"}')
    assert 2 == wrong.exit_code
    assert 'is no JSON object with a "name" and options' in wrong.output


def test_an_embedder_refuses_a_draft_model(models: Models) -> None:
    path = models("llama").path
    stack = Stack.from_mapping({"cache": {"memory": "4MiB"}, "model": {"drafts": by(path)}})
    with pytest.raises(StackError) as refused:
        Embedder.from_pretrained(path, stack=stack)
    assert "nothing_generated" == refused.value.code
