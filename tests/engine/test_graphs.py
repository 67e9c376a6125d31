"""Steps as graphs: replays give the outputs of steps without graphs; other steps run without, and the log says why.

On the host, a graph calls the captured function with the tensors and the metadata of the capture. So a value that a
replay on a GPU would not read is not read here either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from kvframe_engine.graphs import sizes as graph_sizes
from kvframe_engine.graphs.device_graphs import CalledGraph
from kvframe_engine.graphs.sizes import Generating, GraphSizes, asked_sizes, auto_sizes, context_sizes
from kvframe_engine.graphs.step_graphs import StepGraphs
from kvframe_engine.requests.request import SamplingParams

from kvframe import Engine, Stack, load_plugins
from kvframe.attention.batch_metadata import StepBatch
from kvframe.attention.state import StateLayers
from kvframe.attention.step import refresh
from kvframe.config.options import ModelOptions
from kvframe.contract.capture import GraphCapture, NotReplayableError
from kvframe.contract.errors import StackError
from kvframe.contract.metadata import Axis, Extension
from kvframe.planning.groups import Grouping
from tests.attention.capturable import CapturableReference, DecodesOnly, UniformOnly
from tests.covering import cover_values, few
from tests.models.serving import GREEDY, PROMPTS, TinyModel, ids, make_stack, served
from tests.support.engines import runner_of
from tests.support.plugins import plugin

BACKENDS = {"capturable": CapturableReference, "decodes_only": DecodesOnly, "uniform_only": UniformOnly}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    folder = tmp_path_factory.mktemp("models")
    registry = load_plugins(plugins=[plugin("mine", backends=BACKENDS)]).registry

    @cache
    def make(family: str) -> TinyModel:
        return attrs.evolve(TinyModel.save(folder / family, family), registry=registry)

    return make


def graphs_of(engine: Engine) -> StepGraphs:
    runner: Any = runner_of(engine)
    assert isinstance(runner.graphs, StepGraphs)
    return runner.graphs


# --- real models ------------------------------------------------------------------------------------------------------


REPLAYED = ("capturable", "cpu")
"""The reference, and kernels that take addresses: they would miss any tensor that a step moves."""


@pytest.mark.parametrize(
    ("family", "backend"), few(2, cover_values(("llama", "gemma3_text", "llama4_text", "gemma3n_text"), REPLAYED))
)
def test_replayed_decodes_give_the_tokens_of_steps_without_graphs(
    models: Callable[[str], TinyModel], family: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Requests grow beyond the graphs for short ones.
    monkeypatch.setattr(graph_sizes, "SHORTEST_CONTEXT", 18)
    model = models(family)
    options: dict[str, Any] = {"prefill_skipping": "decode_only"} if family == "gemma3n_text" else {}
    with model.engine(backend="capturable", **options) as engine:
        expected = served(engine)
    with model.engine(backend=backend, graphs=[2, 4, 8], **options) as engine:
        assert expected == served(engine)
        graphs = graphs_of(engine)
        assert graphs.num_replays >= 4
        assert graphs.num_replays == engine.stats().graph_replays
        assert {1} == {sizes.query_len for sizes in graphs._graphs}
        assert len({sizes.max_seq_len for sizes in graphs._graphs}) > 1
    if family == "llama4_text":
        assert any(wrapper.name == "chunked_local" for choice in engine.choices for wrapper in choice.wrappers)


@pytest.mark.parametrize(
    ("family", "backend"), few(2, cover_values(("gemma3n_text", "llama4_text", "gemma3_text"), REPLAYED))
)
def test_steps_of_several_tokens_a_request_are_replayed_too(
    models: Callable[[str], TinyModel], family: str, backend: str
) -> None:
    # Prompts are computed in chunks beside decodes; five of a prompt's nine tokens generate nothing.
    prompts = [ids(start, length) for start, length in ((1, 9), (2, 9), (3, 3), (4, 9), (5, 9), (6, 4))]
    options: dict[str, Any] = {"prefill_skipping": "decode_only"} if family == "gemma3n_text" else {}
    options |= {"max_num_batched_tokens": 12}
    with models(family).engine(**options, backend="capturable") as engine:
        expected = [output.token_ids for output in engine.generate(prompts, GREEDY)]
    with models(family).engine(**options, backend=backend, graphs=[1, 2, 4, 8], graph_query_lens=[1, 4, 9]) as engine:
        assert expected == [output.token_ids for output in engine.generate(prompts, GREEDY)]
        held = graphs_of(engine)._graphs
        assert {1, 4, 9} == {sizes.query_len for sizes in held}
        assert {True, False} == {sizes.all_generate for sizes in held}
        # The second time, nothing is captured.
        before, steps = (graphs_of(engine).num_graphs, graphs_of(engine).num_replays), engine.stats().steps
        engine.reset_prefix_cache()
        assert expected == [output.token_ids for output in engine.generate(prompts, GREEDY)]
        assert (before[0], before[1] + steps) == (graphs_of(engine).num_graphs, graphs_of(engine).num_replays)


def test_requests_with_log_probabilities_and_random_tokens_are_served_alike(
    models: Callable[[str], TinyModel],
) -> None:
    params = [
        SamplingParams(
            max_new_tokens=6,
            temperature=0.8,
            seed=index,
            prompt_logprobs=index % 2 == 0,
            top_logprobs=2 * (index % 2 == 0),
        )
        for index in range(len(PROMPTS))
    ]
    outputs = []
    variants: list[dict[str, Any]] = [{}, {"graphs": "auto", "graph_query_lens": [1, 8]}]
    for options in variants:
        with models("gemma3_text").engine(backend="capturable", max_num_seqs=4, **options) as engine:
            outputs.append([attrs.asdict(output) for output in engine.generate(PROMPTS, params)])
    assert outputs[0] == outputs[1]


# --- which steps ------------------------------------------------------------------------------------------------------


def graphs_for(level: GraphCapture, skipped: tuple[str, ...] = (), **sizes: Any) -> StepGraphs:
    class Layers:
        capture = level
        states = StateLayers((), Grouping(groups=(), follows={}), {})
        of_inputs = frozenset[int]()

    Layers.skipped = skipped  # type: ignore[attr-defined]
    given: dict[str, Any] = {
        "num_reqs": (2, 4),
        "query_lens": (1, 3),
        "max_model_len": 5000,
        "max_num_batched_tokens": 8,
        **sizes,
    }
    return StepGraphs(Layers(), lambda *_: (torch.empty(0),), torch.device("cpu"), **given)  # type: ignore[arg-type]


def batch_of(*requests: tuple[int, int], generating: list[int] | None = None) -> StepBatch:
    computed, new = (np.array(each) for each in zip(*requests, strict=True))
    return StepBatch(
        rows=np.arange(len(requests)),
        num_computed=computed,
        query_lens=new,
        generating_indices=np.cumsum(new) - 1 if generating is None else np.array(generating),
    )


def sizes_of(graphs: StepGraphs, batch: StepBatch) -> tuple[int, ...] | None:
    found = graphs.sizes_for(batch, len(batch.generating_indices))
    return None if found is None else attrs.astuple(found)[:6]


def test_a_step_is_padded_to_the_next_sizes() -> None:
    graphs = graphs_for(GraphCapture.ALWAYS)
    assert (2, 1, 2, 2, 1024, True) == sizes_of(graphs, batch_of((5, 1)))
    assert (4, 1, 4, 4, 1024, True) == sizes_of(graphs, batch_of((5, 1), (1000, 1), (7, 1)))
    assert (2, 1, 2, 2, 4096, True) == sizes_of(graphs, batch_of((5, 1), (1024, 1)))
    assert (2, 1, 2, 2, 5000, True) == sizes_of(graphs, batch_of((4999, 1)))
    assert (2, 3, 2, 2, 1024, False) == sizes_of(graphs, batch_of((5, 2), (9, 3)))
    assert (2, 3, 6, 2, 1024, True) == sizes_of(graphs, batch_of((5, 2), generating=[0, 1]))


def test_a_step_that_is_larger_than_all_graphs_runs_without() -> None:
    graphs = graphs_for(GraphCapture.ALWAYS)
    assert sizes_of(graphs, batch_of(*[(5, 1)] * 5)) is None
    assert sizes_of(graphs, batch_of((5, 4))) is None
    assert sizes_of(graphs, batch_of((5, 3), generating=[])) is None


def test_a_step_whose_logits_nobody_reads_has_a_graph_without_them() -> None:
    found = graphs_for(GraphCapture.ALWAYS).sizes_for(batch_of((5, 2), (9, 3)), 0)
    assert found is not None
    assert (2, 0) == (found.num_generating, found.num_wanted)


def test_a_step_with_an_extension_is_captured_if_the_host_has_its_values() -> None:
    values = torch.ones(1, dtype=torch.int32)
    for on_host in (values, None):
        extension = Extension(values, Axis.REQUEST, on_host)
        batch = attrs.evolve(batch_of((5, 1)), extensions={"seq_starts": extension})
        assert (on_host is None) == (sizes_of(graphs_for(GraphCapture.ALWAYS), batch) is None)


def test_decodes_alone_are_captured_where_no_more_can_be() -> None:
    graphs = graphs_for(GraphCapture.DECODE)
    assert sizes_of(graphs, batch_of((5, 1))) is not None
    assert sizes_of(graphs, batch_of((5, 3))) is None


def test_uniform_steps_have_the_very_number_of_tokens() -> None:
    graphs = graphs_for(GraphCapture.UNIFORM)
    assert sizes_of(graphs, batch_of((5, 3), (9, 3))) is not None
    assert sizes_of(graphs, batch_of((5, 2), (9, 2))) is None
    assert sizes_of(graphs, batch_of((5, 3), (9, 2))) is None


def test_a_step_that_skips_tokens_needs_backends_that_take_any_batch() -> None:
    batch = batch_of((5, 1), (9, 1), generating=[1])
    assert sizes_of(graphs_for(GraphCapture.UNIFORM), batch) is not None
    assert sizes_of(graphs_for(GraphCapture.UNIFORM, ("last",)), batch) is None
    assert sizes_of(graphs_for(GraphCapture.ALWAYS, ("last",)), batch) is not None


def test_a_step_of_states_is_captured_unless_a_token_has_no_state_to_continue_from() -> None:
    choice = attrs.evolve(graphs_for(GraphCapture.ALWAYS)._choice, max_rounds=2)
    assert choice.of(batch_of((5, 2), (9, 1)), 2) is not None
    assert choice.of(batch_of((5, 3)), 1) is None
    assert choice.of(batch_of((5, 1), (0, 1)), 2) is None
    # A graph that no step could use is not captured when the engine starts.
    assert {1} == {sizes.query_len for sizes in choice.usual(64, [(1, Generating.LAST), (3, Generating.LAST)])}


def test_a_step_of_inputs_is_captured_unless_it_computes_one() -> None:
    choice = graphs_for(GraphCapture.ALWAYS, max_input_len=3000)._choice

    def with_inputs(lens: list[int], is_new: list[bool]) -> GraphSizes | None:
        inputs = {"input_lens": {"encoder": np.array(lens)}, "stores_input": {"encoder": np.array(is_new)}}
        return choice.of(attrs.evolve(batch_of((5, 1), (9, 1)), **inputs), 2)

    assert [1024, 3000] == [
        found.max_input_len
        for lens in ([1024, 3], [3, 1025])
        if (found := with_inputs(lens, [False, False])) is not None
    ]
    assert with_inputs([1024, 3], [False, True]) is None
    assert {1024, 3000} == {sizes.max_input_len for sizes in choice.usual(8, [(1, Generating.LAST)])}


def test_a_chain_with_effects_leaves_no_uniform_steps_to_a_backend_that_needs_them(
    models: Callable[[str], TinyModel],
) -> None:
    for backend, expected in (("uniform_only", "DECODE"), ("capturable", "ALWAYS"), ("torch", "NEVER")):
        with models("llama4_text").engine(backend=backend) as engine:
            runner: Any = runner_of(engine)
            assert GraphCapture[expected] is runner._layers.capture


def test_the_sizes_that_are_chosen_end_with_the_most_requests() -> None:
    assert (1,) == auto_sizes(1)
    assert (1, 2, 3, 4, 6, 8, 12, 16, 20) == auto_sizes(20)
    assert (1024, 4096, 5000) == context_sizes(5000)
    assert (128,) == context_sizes(128)


# --- before the first request -----------------------------------------------------------------------------------------


def test_the_usual_steps_are_captured_before_the_first_request(
    models: Callable[[str], TinyModel], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvframe")
    model = models("gemma3_text")
    with model.engine(backend="capturable") as engine:
        expected = served(engine)
    with model.engine(backend="capturable", graphs=[1, 2, 4, 8], max_model_len=96) as engine:
        assert [(count, 1, 96) for count in (8, 4, 2, 1)] == [
            (sizes.num_reqs, sizes.query_len, sizes.max_seq_len) for sizes in graphs_of(engine)._graphs
        ]
        assert expected == served(engine)
        assert 4 == graphs_of(engine).num_graphs
        assert graphs_of(engine).num_replays > 0
    said = [record.message for record in caplog.records if "graphs" in record.message]
    assert "capturing 4 graphs of steps of up to 8 requests" == said[0]
    assert said[1].startswith("captured 4 graphs in ")


def test_usual_steps_are_uniform_and_no_larger_than_a_step_may_be() -> None:
    for level, expected in (
        (GraphCapture.ALWAYS, [(2, 3, 5000), (2, 3, 4096), (2, 3, 1024), (4, 1, 5000)]),
        (GraphCapture.DECODE, [(4, 1, 5000), (4, 1, 4096), (4, 1, 1024), (2, 1, 5000)]),
    ):
        usual = graphs_for(level)._choice.usual(8, [(1, Generating.LAST), (3, Generating.LAST)])
        assert expected == [(sizes.num_reqs, sizes.query_len, sizes.max_seq_len) for sizes in usual][:4]
    assert {} == graphs_for(GraphCapture.ALWAYS)._choice.usual(1, [(1, Generating.LAST), (3, Generating.LAST)])


def test_usual_steps_want_the_logits_that_they_are_asked_for() -> None:
    choice = graphs_for(GraphCapture.ALWAYS, num_reqs=(2,), max_model_len=1024)._choice
    assert {
        Generating.LAST: (2, 2, False),
        Generating.STORED: (2, 0, False),
        Generating.ALL: (6, 6, True),
        Generating.FEW: (6, 2, True),
    } == {
        rows: (sizes.num_generating, sizes.num_wanted, sizes.all_generate)
        for sizes, (_, rows) in choice.usual(8, [(3, rows) for rows in Generating]).items()
    }
    # Of kinds with the same sizes, one is captured.
    assert [2, 0] == [sizes.num_wanted for sizes in choice.usual(8, [(1, rows) for rows in Generating])]


def test_what_there_is_no_memory_to_capture_runs_without_a_graph(
    models: Callable[[str], TinyModel], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_none(graph: CalledGraph, run: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = models("llama")
    with model.engine(backend="capturable") as engine:
        expected = served(engine)
    monkeypatch.setattr(CalledGraph, "capture", has_none)
    with model.engine(backend="capturable", graphs=[4, 8]) as engine:
        assert expected == served(engine)
        assert 0 == graphs_of(engine).num_graphs
    assert 1 == len([record for record in caplog.records if "has no memory left" in record.message])


# --- what cannot be captured ------------------------------------------------------------------------------------------


def test_sizes_in_vain_are_refused_and_auto_says_it_once(
    models: Callable[[str], TinyModel], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StackError, match=r"model.graphs names sizes.*'model.layers.0.self_attn', on .*torch'"):
        models("llama").engine(backend="torch", graphs=[4])
    with models("llama").engine(backend="torch", graphs="auto") as engine:
        served(engine)
        runner: Any = runner_of(engine)
        assert runner.graphs is None
    assert 1 == len([record for record in caplog.records if "without graphs" in record.message])


@attrs.frozen(eq=False)
class Numbered:
    common: Any
    number: int


class Miscounts(CapturableReference):
    """Declares that it can be captured, but reads a number that differs from step to step."""

    def make_builder(self) -> Any:
        builder = super().make_builder()
        build = builder.build
        builder.build = lambda metadata: Numbered(build(metadata), int(metadata.seq_lens_cpu.max()))  # type: ignore[method-assign]
        return builder

    def attend(self, layer: Any, query: Any, kv_cache: Any, metadata: Any, **named: Any) -> torch.Tensor:
        return super().attend(layer, query, kv_cache, metadata.common, **named)


def test_a_step_that_a_graph_cannot_be_told_runs_without_and_says_so_once(
    models: Callable[[str], TinyModel], caplog: pytest.LogCaptureFixture
) -> None:
    model = models("llama")
    model = attrs.evolve(
        model, registry=load_plugins(plugins=[plugin("mine", backends={**BACKENDS, "miscounts": Miscounts})]).registry
    )
    with model.engine(backend="capturable") as engine:
        expected = served(engine)
    with model.engine(backend="miscounts", graphs=[8]) as engine:
        assert expected == served(engine)
        assert 0 == graphs_of(engine).num_replays
    (said,) = [record.message for record in caplog.records if "without a graph" in record.message]
    assert "Numbered.number was" in said


def test_what_stays_gets_new_values_and_nothing_else_may_differ() -> None:
    memory = torch.empty(0, dtype=torch.uint8)
    kept = {"a": (torch.zeros(3), 1), "b": [None, "text"]}
    refresh(kept, {"a": (torch.ones(3), 1), "b": [None, "text"]}, memory, "it")
    assert torch.equal(torch.ones(3), kept["a"][0])  # type: ignore[arg-type]
    wrong: list[tuple[Mapping[str, Any], str]] = [
        ({"a": (torch.ones(4), 1), "b": [None, "text"]}, r"it\['a'\]\[0\] was \[3\] of"),
        ({"a": (torch.ones(3), 2), "b": [None, "text"]}, r"it\['a'\]\[1\] was 1 and is 2"),
        ({"a": (torch.ones(3), 1), "b": [None]}, r"it\['b'\] had 2 items and has 1"),
        ({"a": (torch.ones(3), 1), "b": (None, "text")}, "was of list and is of tuple"),
        ({"a": (torch.ones(3), 1)}, "it had"),
    ]
    for fresh, message in wrong:
        with pytest.raises(NotReplayableError, match=message):
            refresh(kept, fresh, memory, "it")
    whole = torch.arange(8)
    with pytest.raises(NotReplayableError, match="it is another tensor of the step than at the capture"):
        refresh(whole[:3], whole[2:5], whole, "it")


def test_equal_arrays_and_mappings_of_any_kind_are_the_same() -> None:
    memory = torch.empty(0, dtype=torch.uint8)
    refresh({"a": np.arange(3)}, MappingProxyType({"a": np.arange(3)}), memory, "it")
    with pytest.raises(NotReplayableError, match=r"it\['a'\], an array on the host, has other numbers"):
        refresh({"a": np.arange(3)}, {"a": np.arange(1, 4)}, memory, "it")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"graphs": "always"}, "model.graphs must be 'off', 'auto', or an array"),
        ({"graphs": [0, 4]}, "model.graphs must be"),
        ({"graphs": []}, "model.graphs must be"),
        ({"graphs": [-2]}, "model.graphs must be"),
        ({"graphs": [2.0]}, "model.graphs must be"),
        ({"graphs": [True]}, "model.graphs must be"),
        ({"graphs": ["8"]}, "model.graphs must be"),
        ({"graph_query_lens": 3}, "model.graph_query_lens must be an array of whole numbers"),
        ({"graph_query_lens": [0]}, "model.graph_query_lens must be an array of whole numbers"),
        ({"graph_query_lens": [1, 1.5]}, "model.graph_query_lens must be an array of whole numbers"),
        ({"graph_query_lens": []}, "model.graph_query_lens must be an array of whole numbers"),
    ],
)
def test_a_stack_with_wrong_sizes_is_refused(given: Mapping[str, Any], message: str) -> None:
    with pytest.raises(StackError, match=message):
        make_stack(**given)


def test_sizes_are_sorted() -> None:
    assert (1, 4, 8) == ModelOptions(graphs=(8, 1, 4, 4)).graphs
    assert (
        GraphSizes(
            num_reqs=4, query_len=3, num_generating=4, num_wanted=4, max_seq_len=8, all_generate=False
        ).num_tokens
        == 12
    )


def test_steps_with_the_most_drafts_are_captured_beside_the_asked_ones() -> None:
    options = Stack(model=ModelOptions(graphs=(4,), graph_query_lens=(1, 8)))
    assert ((4,), (1, 8)) == asked_sizes(options, 64)
    assert ((4,), (1, 5, 8)) == asked_sizes(options, 64, [5])
    assert ((4,), (1,)) == asked_sizes(options, 4, [5])


def test_sizes_that_no_step_can_have_cost_nothing(models: Callable[[str], TinyModel]) -> None:
    huge, options = 2**31 - 1, {"backend": "capturable", "max_num_seqs": 3}
    with models("llama").engine(**options) as engine:
        expected = served(engine)
    with models("llama").engine(**options, graphs=[2, 2, huge], graph_query_lens=[1, huge]) as engine:
        assert expected == served(engine)
        assert {2, 3} == {sizes.num_reqs for sizes in graphs_of(engine)._graphs}
        assert {1} == {sizes.query_len for sizes in graphs_of(engine)._graphs}
    with pytest.raises(StackError, match=r"graph_query_lens is \[2147483647\], and a request computes at most \d+ tok"):
        models("llama").engine(**options, graphs="auto", graph_query_lens=[huge])
