"""A proposer that asks for hidden states gets those that the last tokens of each request were taken from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar

import attrs
import pytest
import torch
from kvframe_engine.contract import DraftRequest

from kvframe import SamplingParams, load_plugins
from kvframe.contract import StackError
from tests.attention.capturable import CapturableReference
from tests.engine.scripted_model import ScriptedModel
from tests.models import encoder_decoder
from tests.models.knowing import ANSWERS, Knowing
from tests.models.serving import PROMPTS, TinyModel, held_pages
from tests.support.engines import runner_of
from tests.support.plugins import plugin

WITH_ENCODERS = ("bart", "t5")
HEAD: list[Any] = []
"""The head of the served model."""
ASKED: list[tuple[str, list[int] | None, list[int]]] = []
"""For each request that was asked about: its id, what the head makes of its hidden states, and all its tokens."""


@attrs.define(kw_only=True, eq=False)
class Checking(Knowing):
    """Knows some of what requests will generate, and computes the model's head itself."""

    name = "checking"
    needs_hidden_states: ClassVar[bool] = True

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        for request in requests:
            states = request.hidden_states
            with torch.inference_mode():
                predictions = None if states is None else HEAD[0](states).argmax(-1).tolist()
            ASKED.append((request.request_id, predictions, list(request.token_ids)))
        return super().propose(requests)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    folder = tmp_path_factory.mktemp("models")
    proposers = {"checking": Checking, "knowing": Knowing}
    mine = plugin("mine", backends={"capturable": CapturableReference}, proposers=proposers)
    registry = load_plugins(plugins=[mine]).registry

    def model(family: str) -> TinyModel:
        return attrs.evolve(TinyModel.save(folder / family, family), registry=registry).in_dtype("float64")

    return cache(model)


GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)


def serve(model: TinyModel, family: str, *, compiled: bool = False, **options: Any) -> tuple[Any, Any]:
    """Serve prompts with drafts; check that tokens are those without, and return the statistics and the graphs."""
    prompts: Any = encoder_decoder.prompts(family) if family in WITH_ENCODERS else PROMPTS
    with model.engine() as engine:
        expected = engine.generate(prompts, GREEDY)
    ANSWERS[:] = [[*output.prompt_token_ids, *output.token_ids] for output in expected]
    loaded: Any = model.loaded
    HEAD[:] = [loaded.model.get_output_embeddings().forward]
    ASKED.clear()
    with model.engine(drafts="checking", **options) as engine:
        if compiled:
            engine.model.compile("eager")
            assert 0 == engine.model.compiled.num_graph_breaks  # type: ignore[attr-defined]
        outputs = engine.generate(prompts, GREEDY)
        assert 0 == held_pages(engine)
        stats, runner = engine.stats(), runner_of(engine)
    assert [output.token_ids for output in expected] == [output.token_ids for output in outputs]
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
    assert not loaded.model.get_output_embeddings()._forward_pre_hooks
    return stats, runner.graphs  # type: ignore[attr-defined]


def check_asked(*, some_are_missing: bool = False) -> None:
    """Check that the rows are those of the last tokens; after a preemption, there may be none."""
    assert len(ASKED) > len(PROMPTS)
    missing = [predictions for _, predictions, _ in ASKED if predictions is None]
    assert bool(missing) <= some_are_missing
    rows = [(predictions, tokens[-len(predictions) :]) for _, predictions, tokens in ASKED if predictions is not None]
    assert [last for _, last in rows] == [predictions for predictions, _ in rows]
    assert {1, 2} <= {len(predictions) for predictions, _ in rows}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"max_num_batched_tokens": 24}),
        ("gemma3n_text", {"prefill_skipping": "decode_only", "max_num_batched_tokens": 40}),
        ("falcon_h1", {"max_num_batched_tokens": 24}),
        ("t5", {}),
    ],
)
def test_the_head_makes_the_last_tokens_of_them(
    models: Callable[[str], TinyModel], family: str, options: dict[str, Any]
) -> None:
    serve(models(family), family, **options)
    check_asked()


@pytest.mark.parametrize("family", ["llama", "falcon_h1", "bart"])
def test_a_replayed_step_gives_them(models: Callable[[str], TinyModel], family: str) -> None:
    kinds = ("full_attention", "cross_attention") if family == "bart" else ("full_attention",)
    backends = dict.fromkeys(kinds, "capturable")
    _, graphs = serve(models(family), family, backends=backends, graphs=[4, 8], graph_query_lens=[1])
    assert graphs.num_replays > 0
    assert set() == graphs._reasons
    check_asked()


@pytest.mark.whole
@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_a_compiled_model_gives_them(models: Callable[[str], TinyModel], family: str) -> None:
    backends = {"full_attention": "capturable"}
    _, graphs = serve(models(family), family, compiled=True, backends=backends, graphs=[8])
    assert graphs.num_replays > 0
    check_asked()


@pytest.mark.parametrize("host_memory", [None, "1MiB"])
def test_a_preempted_request_gets_none_or_its_own(models: Callable[[str], TinyModel], host_memory: str | None) -> None:
    model = models("llama")
    options: dict[str, Any] = {"host_memory": host_memory, "block_size": 4}
    memory = model.tight_memory(100, drafts="checking", block_size=4)
    stats, _ = serve(model, "llama", memory=memory, **options)
    assert stats.preemptions > 0
    check_asked(some_are_missing=True)


def test_log_probabilities_of_a_prompt_shift_no_row(models: Callable[[str], TinyModel]) -> None:
    model, params = models("llama"), attrs.evolve(GREEDY, prompt_logprobs=True)
    ANSWERS.clear()
    ASKED.clear()
    with model.engine(drafts="checking", max_num_batched_tokens=24) as engine:
        loaded: Any = model.loaded
        HEAD[:] = [loaded.model.get_output_embeddings().forward]
        asked_requests = [(prompt, GREEDY if index % 2 else params) for index, prompt in enumerate(PROMPTS)]
        for prompt, request_params in asked_requests:
            engine.add_request(prompt, request_params)
        while engine.has_unfinished:
            request_ids = {output.request_id for output in engine.step() if output.new_token_ids}
            # Rows of earlier steps are not kept.
            assert request_ids == {*runner_of(engine).hidden_states}
    rows = [(states, tokens[-len(states) :]) for _, states, tokens in ASKED if states is not None]
    assert [last for _, last in rows] == [states for states, _ in rows]
    assert len(rows) == len(ASKED) > len(PROMPTS)


def test_a_proposer_that_does_not_ask_gets_none(
    models: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden_states: list[Any] = []

    def propose(self: Knowing, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        hidden_states.extend(request.hidden_states for request in requests)
        return [[] for _ in requests]

    monkeypatch.setattr(Knowing, "propose", propose)
    with models("llama").engine(drafts="knowing") as engine:
        engine.generate(PROMPTS, GREEDY)
        assert None is runner_of(engine).hidden_states
    assert {None} == {*hidden_states}


def test_what_cannot_give_hidden_states_is_refused(
    models: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models("llama")
    assert not ScriptedModel().can_give_hidden_states()
    monkeypatch.setattr(type(model.loaded), "can_give_hidden_states", lambda self: False)
    with pytest.raises(StackError, match=r"'checking' needs hidden states, and the model adapter .* none") as caught:
        model.engine(drafts="checking")
    assert "no_hidden_states" == caught.value.code
