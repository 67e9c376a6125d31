"""Graphs of every kind of model, with and without drafts: replays give the tokens of steps without graphs.

On the host, a replay calls the model again on the tensors of the capture, so it would miss any value that a step keeps
elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import attrs
import pytest
import torch
from kvframe_engine.graphs.device_graphs import CalledGraph
from kvframe_engine.graphs.sizes import GraphSizes
from kvframe_engine.graphs.step_graphs import StepGraphs
from torch.utils._python_dispatch import TorchDispatchMode

from kvframe import Prompt, SamplingParams, load_plugins
from kvframe.attention.batch_metadata import StepBatch
from tests.attention.capturable import CapturableLatents, CapturableReference
from tests.covering import cover_pairs, cover_values, few
from tests.models import encoder_decoder
from tests.models.knowing import ANSWERS, MAX_DRAFTS, make_manifest
from tests.models.serving import PROMPTS, TinyModel, held_pages, ids
from tests.support.engines import runner_of
from tests.support.plugins import plugin

WITH_STATES = ("mamba", "mamba2", "jamba", "falcon_h1", "qwen3_next", "lfm2", "kimi_linear")
WITH_ENCODERS = ("bart", "t5", "whisper")
FAMILIES = ("llama", "gemma3n_text", "deepseek_v3", *WITH_STATES, *WITH_ENCODERS)

BACKENDS = {"capturable": CapturableReference, "capturable_latents": CapturableLatents}
OF_KINDS: dict[str, dict[str, str]] = {
    "mamba": {},
    "mamba2": {},
    "deepseek_v3": {"mla": "capturable_latents"},
    "kimi_linear": {"mla": "capturable_latents"},
    "gemma3n_text": {"sliding_window": "capturable", "full_attention": "capturable"},
    **{family: {"full_attention": "capturable", "cross_attention": "capturable"} for family in WITH_ENCODERS},
}
GREEDY = SamplingParams(max_new_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    folder = tmp_path_factory.mktemp("models")
    registry = load_plugins(plugins=[plugin("mine", backends=BACKENDS), make_manifest()]).registry
    return cache(lambda family: attrs.evolve(TinyModel.save(folder / family, family), registry=registry))


def options_of(family: str) -> dict[str, Any]:
    options: dict[str, Any] = {"backends": OF_KINDS.get(family, {"full_attention": "capturable"})}
    return options | ({"prefill_skipping": "decode_only"} if family == "gemma3n_text" else {})


def prompts_of(family: str) -> Sequence[Any]:
    return encoder_decoder.prompts(family) if family in WITH_ENCODERS else PROMPTS


def serve(model: TinyModel, family: str, **options: Any) -> tuple[list[tuple[int, ...]], StepGraphs | None]:
    """Return the tokens that requests generate, and the engine's graphs."""
    with model.engine(**options_of(family), **options) as engine:
        outputs = engine.generate(prompts_of(family), GREEDY)
        assert 0 == held_pages(engine)
        runner: Any = runner_of(engine)
    if "graphs" not in options:
        ANSWERS[:] = [[*output.prompt_token_ids, *output.token_ids] for output in outputs]
    return [output.token_ids for output in outputs], runner.graphs


def note_sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[StepBatch, GraphSizes | None]]:
    """Note each step, and the sizes of its graph."""
    noted: list[tuple[StepBatch, GraphSizes | None]] = []
    find = StepGraphs.sizes_for

    def sizes_for(graphs: StepGraphs, batch: StepBatch, num_wanted: int) -> GraphSizes | None:
        noted.append((batch, find(graphs, batch, num_wanted)))
        return noted[-1][1]

    monkeypatch.setattr(StepGraphs, "sizes_for", sizes_for)
    return noted


def has_input(batch: StepBatch) -> bool:
    """Return whether a step computes inputs of an encoder."""
    return any(is_new.any() for is_new in batch.stores_input.values())


def generates(batch: StepBatch) -> bool:
    """Return whether a step computes only last tokens of requests, and drafts after them."""
    return bool(batch.num_computed.all()) and batch.max_query_len <= 1 + MAX_DRAFTS and not has_input(batch)


@pytest.mark.parametrize(("family", "with_drafts"), few(3, cover_values(FAMILIES, (False, True))))
def test_every_step_that_only_generates_is_replayed_with_equal_tokens(
    models: Callable[[str], TinyModel], family: str, with_drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = serve(models(family), family)
    noted = note_sizes(monkeypatch)
    query_lens, options = ([1, 1 + MAX_DRAFTS], {"drafts": "knowing"}) if with_drafts else ([1], {})
    tokens, graphs = serve(models(family), family, graphs=[1, 2, 4, 8], **options)
    assert expected == tokens
    assert graphs is not None
    assert set() == graphs._reasons
    assert graphs.num_replays >= (1 if with_drafts else 5)
    replayed = [sizes for batch, sizes in noted if generates(batch) and batch.max_query_len <= query_lens[-1]]
    assert None not in replayed
    assert {*query_lens[1:]} <= {sizes.query_len for sizes in replayed if sizes is not None}
    others = [sizes for batch, sizes in noted if has_input(batch) or (family in WITH_STATES and not generates(batch))]
    assert {None} >= {*others}


@pytest.mark.parametrize(("family", "host_memory"), few(2, cover_pairs(("llama", "falcon_h1", "lfm2"), (None, "1MiB"))))
def test_preempted_requests_with_drafts_are_replayed_with_equal_tokens(
    models: Callable[[str], TinyModel], family: str, host_memory: str | None
) -> None:
    model = models(family)
    expected, _ = serve(model, family)
    options: dict[str, Any] = {"drafts": "knowing", "max_model_len": 96, "block_size": 4}
    memory = model.tight_memory(75, **options) * 5 // 4
    options |= {"memory": memory, "host_memory": host_memory, "max_num_batched_tokens": 24}
    with model.engine(**options_of(family), **options, graphs=[1, 2, 4]) as engine:
        assert expected == [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]
        stats, runner = engine.stats(), cast(Any, runner_of(engine))
        assert stats.preemptions > 0
        assert runner.graphs.num_replays > 0
        assert stats.accepted_draft_tokens > 0


@pytest.mark.parametrize("family", few(2, WITH_STATES))
def test_what_the_null_page_holds_reaches_no_request(
    models: Callable[[str], TinyModel], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = serve(models(family), family)
    capture_usual = StepGraphs.capture_usual

    def then_poison(graphs: StepGraphs, *arguments: Any) -> None:
        capture_usual(graphs, *arguments)
        for layer in graphs._layers.states.values():
            for tensor in layer.pages.values():
                tensor[0] = torch.nan

    monkeypatch.setattr(StepGraphs, "capture_usual", then_poison)
    # One size, so that every step has padding.
    assert expected == serve(models(family), family, graphs=[16])[0]


def test_an_input_may_be_longer_than_all_requests(models: Callable[[str], TinyModel]) -> None:
    model, prompts = models("bart"), [Prompt(encoder=ids(start, 70)) for start in range(3)]
    options = {**options_of("bart"), "max_model_len": 20}
    with model.engine(**options) as engine:
        expected = engine.generate(prompts, GREEDY)
    with model.engine(**options, graphs=[4]) as engine:
        assert [output.token_ids for output in expected] == [
            output.token_ids for output in engine.generate(prompts, GREEDY)
        ]
        runner: Any = runner_of(engine)
        assert runner.graphs.num_replays >= 5


class Refusing(TorchDispatchMode):
    """Notes operators that a GPU cannot record: they read values on the host, or bring values from there."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "lift_fresh", "is_nonzero", "item")

    def __init__(self) -> None:
        super().__init__()
        self.noted: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name.startswith(self.FORBIDDEN):
            self.noted.add(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", few(3, [*WITH_STATES[:-1], *WITH_ENCODERS]))
def test_a_replay_has_only_operators_that_a_gpu_can_record(
    models: Callable[[str], TinyModel], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode, replay = Refusing(), CalledGraph.replay

    def watched(graph: CalledGraph) -> None:
        with mode:
            replay(graph)

    monkeypatch.setattr(CalledGraph, "replay", watched)
    kinds = OF_KINDS.get(family, {"full_attention": "capturable"})
    with models(family).engine(backends=dict.fromkeys(kinds, "cpu"), graphs=[8]) as engine:
        engine.generate(prompts_of(family), GREEDY)
    assert set() == mode.noted
