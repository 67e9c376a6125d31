"""The prediction heads of a model: their drafts are those of transformers, wherever the cache has their state from.

``Meddling`` proposes right and wrong tokens beside the heads' drafts, so that drafts are rejected and accepted.
What the heads drafted is compared with what transformers' own candidate generator drafts after the same tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import attrs
import pytest
import torch
from kvframe_engine.contract import DraftRequest, PrefixFileError
from kvframe_engine.running.heads_runner import HeadsRunner
from kvframe_engine.running.model_runner import Compute, TokenRunner
from kvframe_mtp.proposer import MTPProposer
from kvframe_transformers import adapter
from kvframe_transformers.model import TransformersModel
from kvframe_transformers.prediction_heads import TransformersHeads
from safetensors.torch import load_file, save_file

from kvframe import Engine, SamplingParams, Stack, load_plugins
from kvframe.attention.batch_metadata import StepBatch
from kvframe.builtin.full_attention import FullAttentionSpec
from kvframe.builtin.torch_reference import TorchReferenceBackend
from kvframe.contract import LayerSpec, ModelDescription, ModelError, QuerySpec, StackError, WrapperError
from kvframe.planning.recognise import find_adapter
from kvframe.selection.refusals import find_refusals
from tests.covering import cover_values, few, keep
from tests.models.headed import HEADED, Reference, save_headed
from tests.models.serving import PROMPTS, TinyModel, held_pages
from tests.support.backends import DecodesFirst
from tests.support.commands import run
from tests.support.drafts import generated, shown
from tests.support.engines import draft_of, runner_of
from tests.support.plugins import plugin

MODELS = {"deepseek_v3": 2, "glm4_moe": 3, "mellum": 1}
"""The families, with their numbers of heads."""
SOME = PROMPTS[2:6]
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)

CONTINUED: list[tuple[list[int], list[int]]] = []
"""What the heads drafted, and after which tokens."""
TOO_FEW: list[DraftRequest] = []
"""The requests that got fewer drafts of the heads than were asked for."""
ANSWERS: list[list[int]] = []
"""The tokens of requests, prompt and answer, that are known to be right."""


@attrs.define(kw_only=True, eq=False)
class Meddling(MTPProposer):
    """Ignores what the heads drafted. Proposes all right tokens, only the first ones, or these and wrong ones."""

    name = "meddling"

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self.drafts_of(request) for request in requests]

    def drafts_of(self, request: DraftRequest) -> list[int]:
        context, drafted = list(request.token_ids), list(request.continuation)
        CONTINUED.append((context, drafted))
        if len(drafted) < request.max_drafts:
            TOO_FEW.append(request)
        answer = next((answer for answer in ANSWERS if answer[: len(context)] == context), context)
        right = answer[len(context) :][: len(drafted)]
        chance = random.Random(sum(context) + len(context))
        match chance.randrange(5):
            case 0:
                return []
            case 1:
                return drafted
            case 2:
                return right[:1]
            case 3:
                return [token if chance.random() < 0.6 else (token + 1) % 128 for token in right]
        return right


@attrs.frozen
class Headed:
    """A model, and transformers over the same checkpoint."""

    model: TinyModel
    reference: Reference


Models = Callable[[str], Headed]


def load(path: Path) -> TinyModel:
    registry = load_plugins(
        plugins=[plugin("meddling_plugin", proposers={"meddling": Meddling}, backends={"decodes_first": DecodesFirst})]
    ).registry
    return TinyModel(path, find_adapter(path, registry).load(path, device="cpu", dtype="float32"), registry)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")

    def headed(family: str) -> Headed:
        save_headed(folder / family, family, MODELS[family])
        return Headed(load(folder / family), Reference(folder / family))

    return cache(headed)


def check(
    headed: Headed,
    params: SamplingParams = GREEDY,
    prompts: Sequence[Any] = SOME,
    *,
    drafts: Any = "meddling",
    compares: bool = True,
    **options: Any,
) -> Any:
    """Check that drafts change no token and are those of transformers, without and with hits; return the statistics."""
    model = headed.model
    expected = generated(model, params, prompts)[0]
    ANSWERS[:] = [[*output.prompt_token_ids, *output.token_ids] for output in expected]
    CONTINUED.clear()
    TOO_FEW.clear()
    with model.engine(drafts=drafts, **options) as engine:
        for _ in range(2):
            assert shown(expected) == shown(engine.generate(prompts, params))
        assert 0 == held_pages(engine)
        assert not runner_of(engine).draft.is_set_aside
        stats = engine.stats()
    if compares:
        assert len(CONTINUED) > len(prompts)
        assert [] == TOO_FEW
        assert [] == [
            (len(context), draft_tokens)
            for context, draft_tokens in CONTINUED
            if draft_tokens != headed.reference.drafts_after(context)[: len(draft_tokens)]
        ]
        max_drafts = drafts["max_drafts"] if isinstance(drafts, dict) else MODELS[headed.model.path.name]
        assert max_drafts == max(len(draft_tokens) for _, draft_tokens in CONTINUED)
    return stats


# --- the drafts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", HEADED)
def test_the_drafts_are_those_of_transformers_after_rejections_and_hits(models: Models, family: str) -> None:
    stats = check(models(family))
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
    assert stats.cached_prompt_tokens > 0


@pytest.mark.parametrize("family", keep(HEADED, "glm4_moe"))
def test_a_head_begins_with_the_first_token_that_has_a_hidden_state_before_it(
    models: Models, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    firsts: dict[int, int] = {}
    forward = TransformersHeads.forward_head

    def noting(self: Any, head: int, input_ids: torch.Tensor, positions: torch.Tensor, *inputs: Any) -> Any:
        firsts[head] = min(firsts.get(head, 99), int(positions.min()))
        return forward(self, head, input_ids, positions, *inputs)

    monkeypatch.setattr(TransformersHeads, "forward_head", noting)
    check(models(family), prompts=[[5], [7, 9], [7, 9, 3]], block_size=1, audit=True)
    assert {head: head + 1 for head in range(MODELS[family])} == firsts


@pytest.mark.parametrize("family", HEADED)
def test_transformers_drafts_the_same_while_it_generates(models: Models, family: str) -> None:
    headed, prompt = models(family), PROMPTS[3]
    steps = headed.reference.generate(prompt, 8)
    assert len(steps) > 3
    for context, drafts in steps:
        assert drafts == headed.reference.drafts_after(context)
    CONTINUED.clear()
    with headed.model.engine(drafts="meddling") as engine:
        (output,) = engine.generate([prompt], SamplingParams(max_new_tokens=8, ignore_eos=True))
    for context, _ in steps:
        assert [*prompt, *output.token_ids][: len(context)] == context
    both = [
        (drafts, draft_tokens) for context, drafts in steps for other, draft_tokens in CONTINUED if other == context
    ]
    assert both
    assert [drafts[: len(draft_tokens)] for drafts, draft_tokens in both] == [draft_tokens for _, draft_tokens in both]


SETTINGS: dict[str, dict[str, Any]] = {
    "chunked prompts": {"max_num_batched_tokens": 16, "audit": True},
    "blocks of 4": {"block_size": 4},
    "blocks of 1": {"block_size": 1},
    "without prefix caching": {"prefix_caching": False},
    "few checkpoints": {"states": {"checkpoints": "aligned"}},
    "no checkpoints": {"states": {"checkpoints": "none"}},
    "every past token": {"hybrid": False},
    "one request at a time": {"max_num_seqs": 1},
    "the reference": {"backends": {"full_attention": "torch_reference", "sliding_window": "torch_reference"}},
}


@pytest.mark.parametrize(("family", "setting"), few(5, cover_values(HEADED, SETTINGS)))
def test_settings_change_no_draft(models: Models, family: str, setting: str) -> None:
    options = dict(SETTINGS[setting])
    if family == "deepseek_v3":
        options.pop("backends", None)
    elif family == "glm4_moe" and "backends" in options:
        options["backends"] = {"full_attention": "torch_reference"}
    check(models(family), **options)


def test_fewer_drafts_than_heads_are_those_of_the_first_heads(models: Models) -> None:
    check(models("glm4_moe"), drafts={"name": "meddling", "max_drafts": 2})


@pytest.mark.whole
def test_pages_of_fewer_bits_hold_the_keys_of_heads_too(models: Models) -> None:
    headed = models("glm4_moe")
    with headed.model.engine(format="int8_token_head") as engine:
        expected = engine.generate(SOME, GREEDY)
    ANSWERS[:] = [[*output.prompt_token_ids, *output.token_ids] for output in expected]
    with headed.model.engine(format="int8_token_head", drafts="meddling") as engine:
        for _ in range(2):
            assert shown(expected) == shown(engine.generate(SOME, GREEDY))
        assert engine.stats().accepted_draft_tokens > 0
        assert not runner_of(engine).draft.is_set_aside


@pytest.mark.parametrize("family", keep(HEADED, "mellum"))
def test_the_drafts_are_right_after_preemption(models: Models, family: str) -> None:
    headed = models(family)
    memory = headed.model.tight_memory(81, drafts="meddling")
    options = {"memory": memory, "host_memory": "1MiB", "audit": True}
    stats = check(headed, prompts=PROMPTS, **options)
    assert stats.preemptions > 0


@pytest.mark.parametrize("family", keep(HEADED, "deepseek_v3"))
def test_samples_fork_the_state_of_the_heads_too(models: Models, family: str) -> None:
    # So cold that a sampled token is the most likely one, for the heads too.
    params = SamplingParams(max_new_tokens=10, temperature=1e-6, seed=7, n=3, ignore_eos=True)
    check(models(family), params, SOME[1:3])


SAMPLING: dict[str, dict[str, Any]] = {
    "all": {"temperature": 0.8, "seed": 5},
    "likely ones": {"temperature": 0.9, "seed": 6, "top_k": 20, "top_p": 0.9},
    "stops": {"temperature": 1.5, "seed": 8, "stop_token_ids": tuple(range(0, 128, 9))},
}


@pytest.mark.parametrize(("family", "sampling"), few(2, cover_values(HEADED, SAMPLING)))
def test_sampled_tokens_stay_the_same(models: Models, family: str, sampling: str) -> None:
    stats = check(models(family), SamplingParams(max_new_tokens=12, **SAMPLING[sampling]), PROMPTS, compares=False)
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens


def test_log_probabilities_stay_the_same(models: Models) -> None:
    headed, params = models("deepseek_v3"), SamplingParams(max_new_tokens=12, logprobs=True, prompt_logprobs=True)
    expected = generated(headed.model, params, SOME)[0]
    ANSWERS[:] = [[*output.prompt_token_ids, *output.token_ids] for output in expected]
    with headed.model.engine(drafts="meddling", max_num_batched_tokens=24) as engine:
        outputs = engine.generate(SOME, params)
        assert engine.stats().accepted_draft_tokens > 0
    for output, other in zip(expected, outputs, strict=True):
        assert output.token_ids == other.token_ids
        assert output.logprobs == pytest.approx(other.logprobs, abs=1e-3)
        assert output.prompt_logprobs[1:] == pytest.approx(other.prompt_logprobs[1:], abs=1e-3)  # type: ignore[index]


def check_drafts(reference: Reference) -> None:
    """Check that everything that the heads drafted is what transformers drafts."""
    assert len(CONTINUED) > len(SOME)
    assert [] == [context for context, drafts in CONTINUED if drafts != reference.drafts_after(context)[: len(drafts)]]


@pytest.mark.whole
@pytest.mark.parametrize("family", HEADED)
def test_heads_run_from_graphs_and_compiled_beside_a_model_that_does(models: Models, family: str) -> None:
    headed = models(family)
    expected = generated(headed.model, GREEDY, SOME)[0]
    ANSWERS[:] = [[*output.prompt_token_ids, *output.token_ids] for output in expected]
    CONTINUED.clear()
    with headed.model.engine(drafts="meddling", graphs=(4, 8)) as engine:
        heads, runner = cast(TransformersHeads, draft_of(engine)), cast(TokenRunner, runner_of(engine))
        if family == "glm4_moe":
            engine.model.compile("eager")
            heads.compile("eager")
        of_heads = cast(HeadsRunner, runner.draft).runners
        captured = [{*step_runner.graphs._graphs} for step_runner in (runner, *of_heads)]  # type: ignore[union-attr]
        assert shown(expected) == shown(engine.generate(SOME, GREEDY))
        assert engine.stats().accepted_draft_tokens > 0
        # No request waited for a capture.
        assert captured == [{*step_runner.graphs._graphs} for step_runner in (runner, *of_heads)]  # type: ignore[union-attr]
        assert MODELS[family] == len(of_heads)
        for step_runner in (runner, *of_heads):
            assert step_runner.graphs is not None
            assert set() == step_runner.graphs._reasons
            assert step_runner.graphs.num_replays > 0
        for step_runner in of_heads:
            # A head continues requests, and computes what a step keeps.
            assert {True, False} == {sizes.num_wanted > 0 for sizes in step_runner.graphs._graphs}  # type: ignore[union-attr]
        compiled = [head.num_graphs for head in heads.compiled_heads]
        assert ([1] * 3 if family == "glm4_moe" else []) == compiled
    check_drafts(headed.reference)
    assert [] == heads.compiled_heads


def test_the_stack_lets_the_heads_be_compiled_too(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    headed = models("mellum")
    for model_class in (TransformersModel, TransformersHeads):
        compile_it = model_class.compile
        monkeypatch.setattr(model_class, "compile", lambda loaded, compile_it=compile_it: compile_it(loaded, "eager"))
    CONTINUED.clear()
    with headed.model.engine(drafts="meddling", compile=True) as engine:
        engine.generate(SOME, GREEDY)
        heads = cast(TransformersHeads, draft_of(engine))
        assert [(1, 0)] == [(head.num_graphs, head.num_graph_breaks) for head in heads.compiled_heads]
    check_drafts(headed.reference)


def test_graphs_of_heads_are_dropped_with_those_of_the_model(models: Models) -> None:
    headed = models("deepseek_v3")
    CONTINUED.clear()
    with headed.model.engine(drafts="meddling", graphs=(4, 8)) as engine:
        runners = cast(HeadsRunner, cast(TokenRunner, runner_of(engine)).draft).runners
        for drop in (engine.weights_changed, partial(engine.resize_cache, "6MiB")):
            engine.generate(SOME, GREEDY)
            assert all(step_runner.graphs is not None and step_runner.graphs.num_graphs for step_runner in runners)
            drop()
            assert [0, 0] == [
                step_runner.graphs.num_graphs for step_runner in runners if step_runner.graphs is not None
            ]
        engine.generate(SOME, GREEDY)
    check_drafts(headed.reference)


def test_heads_are_told_of_new_weights_too(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    notified_heads: list[TransformersHeads] = []
    with models("deepseek_v3").model.engine(drafts="meddling") as engine:
        monkeypatch.setattr(TransformersHeads, "weights_changed", lambda heads: notified_heads.append(heads))
        engine.weights_changed()
        assert [draft_of(engine)] == notified_heads


def test_requests_are_packed_as_the_backend_of_the_heads_asks(models: Models) -> None:
    headed, mixed = models("glm4_moe"), 0
    ANSWERS[:] = [[*output.prompt_token_ids, *output.token_ids] for output in generated(headed.model, GREEDY, SOME)[0]]
    with headed.model.engine(drafts="meddling", backends={"full_attention": "decodes_first"}) as engine:
        runner = cast(HeadsRunner, cast(TokenRunner, runner_of(engine)).draft)
        batches: list[StepBatch] = []

        def noting(compute: Compute) -> Compute:
            return lambda batch, *others: batches.append(batch) or compute(batch, *others)  # type: ignore[func-returns-value]

        # The last head leaves out other tokens of each request.
        for head_runner in runner.runners[:-1]:
            head_runner.compute = noting(head_runner.compute)
        engine.generate(SOME, GREEDY)
        for batch in batches:
            assert None is runner._layers.order_for(batch.query_lens)
            mixed += len({*(batch.query_lens > 1).tolist()}) > 1
    assert mixed > 0


# --- how good they are ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", keep(["deepseek_v3", "glm4_moe"], "deepseek_v3"))
def test_heads_that_know_the_model_save_steps_and_other_heads_do_not(tmp_path: Path, family: str) -> None:
    save_headed(tmp_path, family, 2, agrees=True)
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    model = load(tmp_path)
    with model.engine() as engine:
        expected, num_steps = engine.generate(SOME, params), engine.stats().steps
    with model.engine(drafts="mtp") as engine:
        assert shown(expected) == shown(engine.generate(SOME, params))
        stats = engine.stats()
    assert stats.accepted_draft_tokens > 0.8 * stats.draft_tokens > 0
    assert stats.steps < 0.6 * num_steps
    # Heads that take the hidden state for the embedding guess nothing.
    weights = load_file(tmp_path / "model.safetensors")
    for name, value in weights.items():
        if name.endswith("eh_proj.weight"):
            weights[name] = value.roll(len(value), 1).contiguous()
        elif name.endswith("hnorm.weight"):
            weights[name] = -torch.ones_like(value)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with load(tmp_path).engine(drafts="mtp") as engine:
        assert shown(expected) == shown(engine.generate(SOME, params))
        stats = engine.stats()
    assert stats.accepted_draft_tokens < 0.1 * stats.draft_tokens


def test_a_single_head_computes_each_token_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_headed(tmp_path, "glm4_moe", 1, agrees=True)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    counts: list[int] = []
    with load(tmp_path).engine(drafts="mtp", max_num_batched_tokens=40) as engine:
        heads: Any = draft_of(engine)
        forward = heads.forward_head

        def counting(head: int, input_ids: torch.Tensor, *inputs: Any) -> Any:
            counts.append(len(input_ids))
            return forward(head, input_ids, *inputs)

        monkeypatch.setattr(heads, "forward_head", counting)
        engine.generate(PROMPTS[:4], params)
        assert engine.stats().accepted_draft_tokens > 0
    # The model computes all tokens but the last one, and the head begins with the second one.
    assert sum(len(prompt) + 12 - 2 for prompt in PROMPTS[:4]) == sum(counts)


# --- prefill skipping -------------------------------------------------------------------------------------------------


@pytest.fixture
def sharing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose heads guess most tokens right. Its last layer reads the cache of the first."""
    save_headed(tmp_path / "sharing", "glm4_moe", 2, agrees=True)
    describe = adapter._describe

    def described(*arguments: Any) -> ModelDescription:
        description = describe(*arguments)
        *others, last = description.layers
        return attrs.evolve(description, layers=(*others, attrs.evolve(last, shares_with=others[0].name)))

    monkeypatch.setattr(adapter, "_describe", described)
    return tmp_path / "sharing"


def test_no_layer_skips_tokens_whose_hidden_states_the_heads_need(sharing: Path) -> None:
    model, params = load(sharing), SamplingParams(max_new_tokens=24, ignore_eos=True)
    with model.engine(prefill_skipping="decode_only") as engine:
        assert ("model.layers.2.self_attn",) == runner_of(engine)._layers.skipped
        expected = engine.generate(SOME, params)
    with model.engine(prefill_skipping="decode_only", drafts="mtp") as engine:
        assert () == runner_of(engine)._layers.skipped
        assert shown(expected) == shown(engine.generate(SOME, params))
        stats = engine.stats()
    assert stats.accepted_draft_tokens > 0.8 * stats.draft_tokens > 0
    with model.engine(prefill_skipping="decode_only", drafts="ngram") as engine:
        assert ("model.layers.2.self_attn",) == runner_of(engine)._layers.skipped


@pytest.mark.parametrize("command", ["plan", "explain"])
def test_the_plan_says_why_no_layer_skips_tokens(sharing: Path, tmp_path: Path, command: str) -> None:
    def said(engine: str) -> tuple[Any, str]:
        stack = tmp_path / "stack.toml"
        stack.write_text(f'[model]\nprefill_skipping = "decode_only"\n{engine}')
        arguments = [command, str(sharing), "--stack", str(stack)]
        results = [run(*arguments, *more, env={"COLUMNS": "250"}) for more in (["--json"], [])]
        assert [0, 0] == [result.exit_code for result in results], results
        return json.loads(results[0].stdout)["note"], results[1].stdout

    note, text = said('drafts = "mtp"')
    assert note == (
        "prefill skipping leaves nothing out: the prediction heads keep a cache of their own, for which "
        "'model.layers.2.self_attn' and later layers compute every token of a prompt"
    )
    assert "prefill skipping leaves nothing out" in text
    assert (None, False) == (said("")[0], "prefill skipping" in said("")[1])


@pytest.mark.parametrize("skipping", ["", 'prefill_skipping = "decode_only"'], ids=["off", "on"])
def test_a_rule_that_leaves_out_tokens_which_the_heads_need_is_refused_with_the_reason(
    sharing: Path, tmp_path: Path, skipping: str
) -> None:
    stack = tmp_path / "stack.toml"
    rule = 'layers = "model.layers.2.self_attn"\nwrappers = ["decode_only"]'
    stack.write_text(f'[model]\ndrafts = "mtp"\n{skipping}\n[[rules]]\n{rule}\n')
    reason = (
        "'draft:layers.0.mtp_block.self_attn' runs after 'model.layers.2.self_attn' and keeps a cache of its own, for "
        "which it needs every token"
    )
    with pytest.raises(WrapperError, match=reason) as caught:
        Engine.from_pretrained(sharing, stack=Stack.from_file(stack))
    assert "not_skipped" == caught.value.code
    result = run("explain", str(sharing), "--stack", str(stack))
    assert (2, True) == (result.exit_code, reason in result.output)


# --- what is refused, and what fails ----------------------------------------------------------------------------------


def test_a_model_without_heads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StackError, match=r"'mtp' drafts with prediction heads .* has none .* choose another") as caught:
        TinyModel.save(tmp_path, "llama").engine(drafts="mtp")
    assert "no_prediction_heads" == caught.value.code
    assert "draft_model, ngram" in str(caught.value)


def test_a_checkpoint_without_the_weights_of_its_heads_is_refused(tmp_path: Path) -> None:
    save_headed(tmp_path, "glm4_moe")
    weights = load_file(tmp_path / "model.safetensors")
    other_weights = {name: value for name, value in weights.items() if "layers.3.eh_proj" not in name}
    save_file(other_weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load(tmp_path)
    with pytest.raises(ModelError, match=r"the prediction heads of .* cannot be loaded from .*eh_proj"):
        model.engine(drafts="mtp")
    with model.engine() as engine:
        assert 1 == len(engine.generate(SOME[:1], GREEDY))


def test_heads_that_fail_are_set_aside(
    models: Models, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models("glm4_moe").model
    expected = generated(model, GREEDY, SOME)[0]
    for failing_call, kind in ((1, SystemExit), (4, GeneratorExit), (9, RuntimeError)):
        caplog.clear()
        with model.engine(drafts="mtp") as engine:
            heads: Any = draft_of(engine)
            forward, calls = heads.forward_head, []

            def fail(*inputs: Any, at: int = failing_call, forward: Any = forward, calls: Any = calls) -> Any:
                calls.append(1)
                if len(calls) >= at:
                    raise kind("no more memory")  # noqa: B023
                return forward(*inputs)

            monkeypatch.setattr(heads, "forward_head", fail)
            assert shown(expected) == shown(engine.generate(SOME, GREEDY))
            assert 0 == held_pages(engine)
            assert failing_call == len(calls)
        monkeypatch.undo()
        expected_message = "a prediction head failed, and the heads are set aside: no drafts: "
        assert [f"{expected_message}{kind.__name__}: no more memory"] == [record.message for record in caplog.records]


def test_a_request_whose_logits_are_not_numbers_is_not_continued_by_later_heads(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    headed = models("glm4_moe")
    CONTINUED.clear()
    with headed.model.engine(drafts="meddling") as engine:
        heads = cast(TransformersHeads, draft_of(engine))
        forward = heads.forward_head

        def fail(head: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits, states = forward(head, *inputs)
            if head == 0 and len(logits) > 1:
                logits[1] = torch.nan
            return logits, states

        monkeypatch.setattr(heads, "forward_head", fail)
        engine.generate(SOME, SamplingParams(max_new_tokens=6, ignore_eos=True))
    failed = [continuation for continuation in CONTINUED if not continuation[1]]
    assert failed
    CONTINUED[:] = [continuation for continuation in CONTINUED if continuation[1]]
    check_drafts(headed.reference)


def test_a_saved_prefix_holds_the_state_of_the_heads(models: Models, tmp_path: Path) -> None:
    headed = models("deepseek_v3")
    prompt = [*PROMPTS[3], 1, 2]
    with headed.model.engine(drafts="meddling") as engine:
        engine.save_prefixes(tmp_path / "saved", [PROMPTS[3]])
    CONTINUED.clear()
    with headed.model.engine(drafts="meddling") as engine:
        assert [True] == [saved_prefix.is_cached for saved_prefix in engine.load_prefixes(tmp_path / "saved")]
        engine.generate([prompt], GREEDY)
        assert engine.stats().cached_prompt_tokens > 0
    assert CONTINUED
    assert [] == [
        context for context, drafts in CONTINUED if drafts != headed.reference.drafts_after(context)[: len(drafts)]
    ]
    with headed.model.engine(drafts="ngram") as engine, pytest.raises(PrefixFileError):
        engine.load_prefixes(tmp_path / "saved")


def test_a_closed_engine_leaves_the_model_as_it_was(models: Models) -> None:
    headed = models("mellum")
    with headed.model.engine(drafts="mtp") as engine:
        loaded: Any = engine.model
        decoder = loaded.model.get_decoder()
        assert decoder._forward_hooks
    assert not decoder._forward_hooks
    assert shown(generated(headed.model, GREEDY, SOME)[0]) == shown(generated(headed.model, GREEDY, SOME)[0])


# --- what is planned --------------------------------------------------------------------------------------------------


def test_the_heads_are_planned_only_for_a_proposer_that_uses_them(models: Models) -> None:
    model = models("deepseek_v3").model
    with model.engine() as engine:
        assert [3] == [len(group.layers) for group in engine.plan.groups]
    with model.engine(drafts="mtp") as engine:
        latents, states, rollback = engine.plan.groups
        assert ("draft:layers.0.mtp_block.self_attn", "draft:layers.1.mtp_block.self_attn") == latents.layers[3:]
        assert ("draft:last_hidden_states",) == states.layers == rollback.layers
        # Two hidden states of 64 float32 numbers, and as many for each of two drafts.
        assert (2 * 64 * 4, 2 * 2 * 64 * 4) == (states.page_bytes, rollback.page_bytes)


def test_a_backend_that_cannot_hide_the_first_tokens_is_refused(models: Models) -> None:
    (*_, layer, _) = models("glm4_moe").model.loaded.description.prediction_layers
    assert 3 == layer.query["first_token"]
    spec = LayerSpec(
        name=layer.name,
        spec=FullAttentionSpec(block_size=16, **layer.options),
        query=QuerySpec(**layer.query),
    )
    able = TorchReferenceBackend.capabilities
    assert [] == find_refusals(able, spec, "cpu")
    (refusal,) = find_refusals(attrs.evolve(able, extensions=frozenset()), spec, "cpu")
    assert "extension_seq_starts" == refusal.code
