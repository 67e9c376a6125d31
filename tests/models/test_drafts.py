"""Draft tokens with models of every kind: the tokens, texts and seeds are those of a run without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvframe import Engine, Prompt, SamplingParams
from kvframe.contract import StackError
from tests.covering import cover_values, keep
from tests.models import encoder_decoder
from tests.models.knowing import ANSWERS, make_manifest
from tests.models.serving import NUM_NEW_TOKENS, PROMPTS, TinyModel, held_pages, ids
from tests.support.commands import run
from tests.support.drafts import generated, models_with, shown

FAMILIES = (
    "llama",
    "gemma3_text",
    "gpt_oss",
    "llama4_text",
    "deepseek_v3",
    "gemma3n_text",
    "mixtral",
    "mamba",
    "mamba2",
    "jamba",
    "falcon_h1",
    "qwen3_next",
    "lfm2",
)
STATES = ("mamba2", "jamba", "qwen3_next", "lfm2")


def forget_layers(model: TinyModel) -> None:
    for parameter, values in model.loaded.model.named_parameters():  # type: ignore[attr-defined]
        if parameter.endswith(("o_proj.weight", "down_proj.weight")):
            values.data.zero_()
    model.loaded.model.save_pretrained(model.path)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return models_with(tmp_path_factory.mktemp("models"), make_manifest())


@pytest.fixture(scope="module")
def circling(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A model whose tokens each depend on the one before it alone, so that they soon repeat."""
    return models_with(tmp_path_factory.mktemp("circling"), make_manifest(), forget_layers)("llama")


def greedy(model: TinyModel) -> SamplingParams:
    """Return parameters for as many tokens as no rounding changes (``test_greedy_margins``)."""
    return SamplingParams(max_new_tokens=24 if model.dtype == "float64" else NUM_NEW_TOKENS)


def check_same(
    model: TinyModel,
    params: SamplingParams,
    prompts: Sequence[Any] = PROMPTS,
    *,
    drafts: Any = "knowing",
    **options: Any,
) -> tuple[Any, Any]:
    """Check that drafts and options change no output; return the statistics without both, and with them.

    A format of fewer bits changes outputs, so they are compared with those of the format without drafts.
    """
    format_option = {key: value for key, value in options.items() if key == "format"}
    expected, without = generated(model, params, prompts, **format_option)
    ANSWERS[:] = [[*output.prompt_token_ids, *output.token_ids] for output in expected]
    with model.engine(drafts=drafts, **options) as engine:
        outputs = engine.generate(prompts, params)
        assert 0 == held_pages(engine)
        with_drafts = engine.stats()
    assert shown(expected) == shown(outputs)
    assert 0 < with_drafts.accepted_draft_tokens <= with_drafts.draft_tokens
    assert without.generated_tokens == with_drafts.generated_tokens
    return without, with_drafts


# The others keep what these keep.
@pytest.mark.parametrize(
    "family",
    keep(FAMILIES, "gemma3n_text", "falcon_h1"),
)
def test_greedy_tokens_are_the_same_in_fewer_steps(models: Any, family: str) -> None:
    model = models(family)
    without, with_drafts = check_same(model, greedy(model))
    assert with_drafts.steps < without.steps
    assert with_drafts.accepted_draft_tokens < with_drafts.draft_tokens


SETTINGS: dict[str, dict[str, Any]] = {
    "audited": {"audit": True, "max_num_batched_tokens": 16},
    "blocks of 4": {"block_size": 4},
    "without prefix caching": {"prefix_caching": False},
    "without checkpoints": {"states": {"checkpoints": "none"}},
    "a state at every block": {"states": {"checkpoints": "all"}},
    "8 bits": {"format": "int8_token_head"},
}


@pytest.mark.parametrize(
    ("family", "setting"),
    keep(cover_values(FAMILIES, SETTINGS), "gemma3n_text", "mamba", "mamba2", "jamba", "falcon_h1", "lfm2"),
)
def test_settings_of_the_cache_and_the_backend_change_nothing(models: Any, family: str, setting: str) -> None:
    model = models(family)
    check_same(model, greedy(model), **SETTINGS[setting])


SAMPLING: dict[str, dict[str, Any]] = {
    "all": {"temperature": 0.8, "seed": 5},
    "likely ones": {"temperature": 0.9, "seed": 6, "top_k": 20, "top_p": 0.9},
    "three samples": {"temperature": 0.9, "seed": 7, "n": 3},
    "stop tokens": {"temperature": 1.5, "seed": 8, "stop_token_ids": tuple(range(0, 128, 9))},
}


@pytest.mark.parametrize(
    ("family", "sampling"), cover_values(["llama", "gemma3n_text", "mamba2", "falcon_h1"], SAMPLING)
)
def test_sampled_tokens_follow_the_same_seeds(models: Any, family: str, sampling: str) -> None:
    check_same(models(family), SamplingParams(max_new_tokens=24, **SAMPLING[sampling]))


@pytest.mark.parametrize("family", keep(["llama", "falcon_h1", "lfm2", "bamba", "minicpm3"], "falcon_h1", "lfm2"))
def test_preempted_requests_give_the_same_tokens(models: Any, family: str) -> None:
    model = models(family)
    memory = model.tight_memory(100, drafts="knowing")
    options = {"memory": memory, "host_memory": "1MiB", "audit": True}
    _, with_drafts = check_same(model, greedy(model), **options)
    assert with_drafts.preemptions > 0


@pytest.mark.parametrize("family", keep(["gemma3n_text", "gemma4_text"], "gemma4_text"))
def test_layers_that_skip_prompt_tokens_compute_drafts(models: Any, family: str) -> None:
    model = models(family)
    check_same(model, greedy(model), prefill_skipping="decode_only")


@pytest.mark.parametrize("query_lens", [(1,), (1, 3, 5)])
def test_steps_with_drafts_run_with_graphs_or_without(models: Any, query_lens: tuple[int, ...]) -> None:
    options = {"graphs": (4, 8), "graph_query_lens": query_lens}
    model = models("gemma3_text", "float32")
    check_same(model, greedy(model), **options)


@pytest.mark.parametrize("family", keep(["bart", "t5", "whisper"], "t5"))
def test_decoders_with_an_encoder_get_drafts(models: Any, family: str) -> None:
    prompts: list[Prompt] = encoder_decoder.prompts(family)
    check_same(models(family), SamplingParams(max_new_tokens=16, ignore_eos=True), prompts)


def test_log_probabilities_of_prompts_are_the_same(models: Any) -> None:
    model, params = models("llama"), SamplingParams(max_new_tokens=12, prompt_logprobs=True)
    # Some requests generate while the prompts of others are computed.
    budget = {"max_num_batched_tokens": 24}
    with model.engine(**budget) as engine:
        expected = engine.generate(PROMPTS, params)
    ANSWERS[:] = [[*output.prompt_token_ids, *output.token_ids] for output in expected]
    with model.engine(drafts="knowing", **budget) as engine:
        outputs = engine.generate(PROMPTS, params)
        assert engine.stats().accepted_draft_tokens > 0
    for output, other in zip(expected, outputs, strict=True):
        assert output.token_ids == other.token_ids
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[1:] == pytest.approx(other.prompt_logprobs[1:], abs=1e-4)  # type: ignore[index]


def test_ngram_needs_fewer_steps_for_what_repeats_itself(circling: TinyModel) -> None:
    without, with_drafts = check_same(circling, SamplingParams(max_new_tokens=120), drafts="ngram")
    assert with_drafts.steps < 0.7 * without.steps


def test_ngram_repeats_what_another_request_of_the_salt_generated(models: Any) -> None:
    model, params = models("llama"), SamplingParams(max_new_tokens=24)
    num_steps = {}
    for shared_tokens in (0, 1000):
        with model.engine(drafts={"name": "ngram", "shared_tokens": shared_tokens}) as engine:
            first = engine.generate(PROMPTS[3:4], params, cache_salt="one")
            for salt in ("other", "one"):
                before = engine.stats().steps
                assert shown(first) == shown(engine.generate(PROMPTS[3:4], params, cache_salt=salt))
                num_steps[shared_tokens, salt] = engine.stats().steps - before
    assert num_steps[0, "one"] == num_steps[0, "other"] == num_steps[1000, "other"] > 2 * num_steps[1000, "one"]


@pytest.mark.parametrize("family", STATES)
def test_states_that_drafts_need_are_planned(models: Any, family: str) -> None:
    with models(family).engine() as engine:
        num_groups = len(engine.plan.groups)
    with models(family).engine(drafts={"name": "knowing", "max_drafts": 3}) as engine:
        rollback = [group.spec for group in engine.plan.groups if group.spec.kind == "rollback"]
        assert {3} == {spec.num_states for spec in rollback}  # type: ignore[attr-defined]
        assert len(engine.plan.groups) == num_groups + len(rollback)


def test_a_state_that_cannot_go_back_is_refused(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvframe_mamba.spec import MambaSpec

    monkeypatch.setattr(MambaSpec, "with_drafts", lambda self, num_draft_tokens: self)
    with pytest.raises(StackError, match=r"computes up to 4 draft tokens .* 'mamba' keeps 0 states to go back to"):
        models("mamba2").engine(drafts="knowing")


@pytest.mark.parametrize(
    ("drafts", "message"),
    [
        ("no_such", "model.drafts: there is no proposer named 'no_such'"),
        ({"name": "ngram", "depth": 3}, "model.drafts: proposer 'ngram': there is no option 'depth'"),
        ({"name": "ngram", "max_drafts": 0}, "max_drafts must be a whole number"),
        ({"name": "knowing", "max_drafts": 65}, "max_drafts must be a whole number from 1 to 64, not 65"),
        ({"name": "knowing", "max_drafts": "4"}, "max_drafts must be a whole number from 1 to 64, not '4'"),
    ],
)
def test_a_wrong_choice_of_drafts_is_refused_in_one_sentence(models: Any, drafts: Any, message: str) -> None:
    with pytest.raises(StackError, match=message):
        models("llama").engine(drafts=drafts)


def test_the_command_line_takes_a_proposer(circling: TinyModel, tmp_path: Path) -> None:
    import json

    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([[*ids(3, 9), *ids(3, 9)]]))
    command = ["generate", str(circling.path), "--prompt-token-ids", str(prompts), "--max-new-tokens", "40", "--json"]
    plain = run(*command, "--memory", "4MiB")
    drafted = run(*command, "--memory", "4MiB", "--drafts", "ngram")
    assert (0, 0) == (plain.exit_code, drafted.exit_code), plain.output + drafted.output
    first, second = json.loads(plain.stdout), json.loads(drafted.stdout)
    assert first["outputs"] == second["outputs"]
    assert second["stats"]["accepted_draft_tokens"] > 0 == first["stats"]["draft_tokens"]


def test_an_engine_that_streams_reports_accepted_drafts_at_once(models: Any) -> None:
    model, params = models("llama"), SamplingParams(max_new_tokens=24)
    with model.engine() as engine:
        expected = engine.generate(PROMPTS[3:4], params)
    ANSWERS[:] = [[*expected[0].prompt_token_ids, *expected[0].token_ids]]
    drafting_engine: Engine = model.engine(drafts="knowing")
    with drafting_engine as engine:
        pieces = [piece.new_token_ids for piece in engine.stream(PROMPTS[3], params)]
    assert expected[0].token_ids == sum(pieces, ())
    assert max(map(len, pieces)) > 1
