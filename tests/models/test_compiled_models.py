"""Models compiled around their attention and states: equal tokens, a single graph, and no layer of them is traced."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from kvframe_transformers.operators import OpaqueAttention, OpaqueFunction

from kvframe import Engine, SamplingParams
from kvframe.contract.errors import ModelError
from tests.covering import keep
from tests.engine.scripted_model import ScriptedModel
from tests.models import encoder_decoder
from tests.models.serving import PROMPTS, TinyModel, served
from tests.support.engines import runner_of

WHOLE = pytest.mark.whole
"""Marks a family that usual runs compile in another test, or whose layers are those of others."""
WITH_STATES = (
    pytest.param("mamba", marks=WHOLE),
    pytest.param("mamba2", marks=WHOLE),
    pytest.param("jamba", marks=WHOLE),
    pytest.param("falcon_h1", marks=WHOLE),
    pytest.param("qwen3_next", marks=WHOLE),
    pytest.param("lfm2", marks=WHOLE),
    "kimi_linear",
)

SMALLER: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2},
    "llama4_text": {"num_hidden_layers": 2, "no_rope_layers": [1, 0]},
    "gemma3n_text": {
        "num_hidden_layers": 2,
        "num_kv_shared_layers": 1,
        "layer_types": ["full_attention"] * 2,
        "intermediate_size": [96] * 2,
        "activation_sparsity_pattern": [0.0] * 2,
    },
    "jamba": {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]},
    "qwen3_next": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "bart": {"encoder_layers": 1, "decoder_layers": 2},
    "t5": {"num_layers": 1, "num_decoder_layers": 2},
}
"""Few layers of each type, because torch traces each layer: of Gemma 3n's, the second shares the cache of the first."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    folder = tmp_path_factory.mktemp("models")
    return cache(lambda family: TinyModel.save(folder / family, family, **SMALLER.get(family, {})))


def compiled(engine: Engine, backend: Any) -> Engine:
    """Return the engine with its model compiled by a cheap compiler."""
    engine.model.compile(backend)
    return engine


@pytest.mark.parametrize(
    ("family", "options", "num_graphs"),
    [
        pytest.param("llama", {}, 1, marks=WHOLE),
        pytest.param("gemma3_text", {}, 1, marks=WHOLE),
        # Its experts broadcast over tokens, which a single token changes.
        pytest.param("llama4_text", {}, 2, marks=WHOLE),
        # Before the layers that share caches, its code asks whether a step has one token.
        pytest.param("gemma4_text", {}, 2, marks=WHOLE),
        pytest.param("gemma4_text", {"prefill_skipping": "decode_only"}, 3, marks=WHOLE),
        # Steps that leave rows out have a graph of their own.
        ("gemma3n_text", {"prefill_skipping": "decode_only"}, 2),
    ],
)
def test_a_compiled_model_gives_the_same_tokens_from_one_graph(
    models: Callable[[str], TinyModel], family: str, options: dict[str, Any], num_graphs: int
) -> None:
    with models(family).engine(**options) as engine:
        expected = served(engine)
    with compiled(models(family).engine(**options), "eager") as engine:
        body: Any = engine.model.compiled  # type: ignore[attr-defined]
        assert 0 == body.num_graph_breaks
        # The first steps find their model compiled.
        assert num_graphs == body.num_graphs
        assert expected == served(engine)
        engine.generate([[3]], SamplingParams(max_new_tokens=3, ignore_eos=True))
        # Any number of tokens and of rows of logits, single ones too: no batch causes another compilation.
        assert num_graphs == body.num_graphs
    assert not [module for module in engine.model.model.modules() if hasattr(module, "kvframe_attend")]  # type: ignore[attr-defined]


# torch itself warns where its compiler is first used.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.parametrize("family", keep(["llama", "mamba2"], "llama"))
def test_inductor_compiles_a_model_that_passes_its_self_check(tmp_path: Path, family: str) -> None:
    model = TinyModel.save(tmp_path, family, num_hidden_layers=1)
    with model.engine() as engine:
        expected = served(engine)
    with model.engine(compile=True, self_check=True) as engine:
        assert expected == served(engine)
        assert 0 == engine.model.compiled.num_graph_breaks  # type: ignore[attr-defined]


def seen_in(model: TinyModel) -> list[str]:
    """Return the functions that a compiler sees in a model."""
    targets: list[str] = []

    def noting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    with compiled(model.engine(), noting):
        return targets


@pytest.mark.parametrize("family", WITH_STATES)
def test_a_model_with_states_gives_the_same_tokens_from_one_graph(
    models: Callable[[str], TinyModel], family: str
) -> None:
    with models(family).engine() as engine:
        expected = served(engine)
    with compiled(models(family).engine(max_num_batched_tokens=24), "eager") as engine:
        body: Any = engine.model.compiled  # type: ignore[attr-defined]
        assert expected == served(engine)
        assert 0 == body.num_graph_breaks
        assert 1 == body.num_graphs
    # The model is restored, so that another engine can use it.
    with models(family).engine() as engine:
        assert expected == served(engine)


@pytest.mark.parametrize("family", ["bart", pytest.param("t5", marks=WHOLE), pytest.param("whisper", marks=WHOLE)])
def test_a_decoder_with_an_encoder_gives_the_same_tokens_from_few_graphs(
    models: Callable[[str], TinyModel], family: str
) -> None:
    prompts, params = encoder_decoder.prompts(family), SamplingParams(max_new_tokens=8, ignore_eos=True)
    with models(family).engine() as engine:
        expected = [output.token_ids for output in engine.generate(prompts, params)]
    with compiled(models(family).engine(max_num_batched_tokens=24), "eager") as engine:
        body: Any = engine.model.compiled  # type: ignore[attr-defined]
        assert expected == [output.token_ids for output in engine.generate(prompts, params)]
        assert 0 == body.num_graph_breaks
        # Each for steps with an input of one token alone, and for others.
        assert body.num_graphs <= 5


def test_a_compiler_sees_attention_and_a_state_layer_as_one_operator_each(models: Callable[[str], TinyModel]) -> None:
    targets = seen_in(models("falcon_h1"))
    assert (2, 2) == (targets.count("kvframe.compute"), targets.count("kvframe.attend"))
    inside = ("conv", "softplus", "scaled_dot_product", "index_put")
    assert not [target for target in targets if any(name in target for name in inside)]


@pytest.mark.parametrize("family", keep(["llama", "falcon_h1", "qwen3_next", "t5"], "falcon_h1"))
def test_a_compiled_model_computes_drafts_in_replayed_steps(models: Callable[[str], TinyModel], family: str) -> None:
    prompts: Any = encoder_decoder.prompts(family) if family == "t5" else PROMPTS
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    options: dict[str, Any] = {"backends": {"full_attention": "cpu"}, "drafts": "ngram"}
    with models(family).engine() as engine:
        expected = [output.token_ids for output in engine.generate(prompts, params)]
    with compiled(models(family).engine(**options, graphs=[8], graph_query_lens=[1, 5]), "eager") as engine:
        assert expected == [output.token_ids for output in engine.generate(prompts, params)]
        assert 0 == engine.model.compiled.num_graph_breaks  # type: ignore[attr-defined]
        runner: Any = runner_of(engine)
        assert runner.graphs.num_replays > 0
        assert set() == runner.graphs._reasons


def test_a_model_that_was_checked_in_another_format_is_compiled_again(
    models: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models("llama")
    compile_model = type(model.loaded).compile
    monkeypatch.setattr(type(model.loaded), "compile", lambda loaded: compile_model(loaded, "eager"))
    with model.engine(format="int8_token_head") as engine:
        expected = served(engine)
    # The self-check attaches the model to plain pages first.
    with model.engine(format="int8_token_head", compile=True, self_check=True) as engine:
        assert expected == served(engine)
        assert engine.model.compiled.num_graphs > 0  # type: ignore[attr-defined]


def test_a_failure_of_the_compiler_is_one_clear_error(models: Callable[[str], TinyModel]) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler was found")

    with models("llama").engine() as engine, pytest.raises(ModelError, match=r"cannot be compiled here.*no compiler"):
        engine.model.compile(broken)


def test_an_adapter_that_cannot_compile_says_so() -> None:
    with pytest.raises(ModelError, match="scripted cannot be compiled by its model adapter; leave compile out"):
        ScriptedModel().engine(compile=True)


def test_the_operator_promises_the_shape_that_it_gives() -> None:
    def attend(query: Any, key: Any, value: Any, sinks: Any = None) -> torch.Tensor:
        return value.expand(3, 2, 5).transpose(0, 1).contiguous().transpose(0, 1)

    opaque = OpaqueAttention(attend, 5)
    query, key, value = torch.randn(3, 2, 4), torch.randn(3, 1, 4), torch.randn(3, 1, 5)
    output = opaque(query, key, value)
    assert output.is_contiguous()
    assert torch.equal(value.expand(3, 2, 5), output)
    torch.library.opcheck(
        torch.ops.kvframe.attend.default,
        (query, key, value, None, opaque._name, 5),
        test_utils=("test_schema", "test_faketensor"),
    )
    # A layer that shares a cache gets no keys, and a backend may return one of its arguments.
    same = OpaqueAttention(lambda query, key, value, sinks=None: query, 4)
    assert same(query, None, None).data_ptr() != query.data_ptr()
    last = OpaqueAttention(lambda query, key, value, sinks=None: value[1:], 5)
    assert last(query, key, value).data_ptr() != value[1:].data_ptr()


def test_the_operator_of_a_function_gives_results_in_their_own_memory() -> None:
    first, second = torch.randn(3, 4), torch.randn(2, 3)
    function = OpaqueFunction(
        lambda inputs: [inputs[0], second.T, second.T, inputs[1]],
        lambda inputs: [inputs[0], *(inputs[1].new_empty(3, 2) for _ in range(2)), inputs[1]],
    )
    results = function([first, second])
    assert all(map(torch.equal, [first, second.T, second.T, second], results))
    assert all(result.is_contiguous() for result in results)
    assert 6 == len({result.data_ptr() for result in (*results, first, second)})
    torch.library.opcheck(
        torch.ops.kvframe.compute.default,
        ([first, second], function._name),
        test_utils=("test_schema", "test_faketensor"),
    )
