"""Whole models on a GPU: graphs, drafts, prediction heads, preemption, formats, compilation and ranks change no token.

Everything is computed in float32. Steps of different sizes use different kernels, whose sums differ in the last bits;
the tiny models' tokens are far from ties.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from packaging.version import Version

pytest.importorskip("transformers", reason="tiny models are made by transformers")
from kvframe_engine.graphs.step_graphs import StepGraphs

from kvframe import SamplingParams, load_plugins
from kvframe.contract import ModelError
from tests.models import encoder_decoder
from tests.models.headed import save_headed
from tests.models.knowing import ANSWERS, MAX_DRAFTS, make_manifest
from tests.models.serving import PROMPTS, TinyModel, held_pages
from tests.support.engines import runner_of
from tests.support.overlap import EXTRAS
from tests.support.ports import free_port

pytestmark = pytest.mark.gpu

WITH_ENCODERS = ("bart", "t5", "whisper")
FAMILIES = (
    *("llama", "gemma3_text", "gpt_oss", "llama4_text", "gemma3n_text", "deepseek_v3", "mamba", "mamba2", "jamba"),
    *("falcon_h1", "qwen3_next", "lfm2", "kimi_linear", *WITH_ENCODERS),
)
GREEDY = SamplingParams(max_new_tokens=16, ignore_eos=True)
Tokens = list[tuple[int, ...]]


def no_op(value: Any) -> Any:
    return value


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    folder = tmp_path_factory.mktemp("models")
    registry = load_plugins(plugins=[make_manifest()]).registry

    def load(family: str) -> TinyModel:
        model = attrs.evolve(TinyModel.save(folder / family, family), registry=registry).on("cuda")
        of_experts: Any = getattr(model.loaded.model, "set_experts_implementation", no_op)  # type: ignore[attr-defined]
        of_experts("batched_mm")  # the others read the routing on the host, so their steps cannot be captured
        return model

    return cache(load)


def options_of(family: str) -> dict[str, Any]:
    return {"prefill_skipping": "decode_only"} if family == "gemma3n_text" else {}


def prompts_of(family: str) -> Sequence[Any]:
    return encoder_decoder.prompts(family) if family in WITH_ENCODERS else PROMPTS


def serve(model: TinyModel, family: str, **options: Any) -> tuple[Tokens, Any]:
    """Return the tokens that requests generate, and their engine, which is closed."""
    with model.engine(**options_of(family), **options) as engine:
        outputs = engine.generate(prompts_of(family), GREEDY)
        assert [None] * len(outputs) == [output.error for output in outputs]
        assert 0 == held_pages(engine)
        if "graphs" not in options and "drafts" not in options:
            ANSWERS[:] = [[*output.prompt_token_ids, *output.token_ids] for output in outputs]
        return [output.token_ids for output in outputs], engine


def check_replays(graphs: StepGraphs | None, at_least: int = 1) -> None:
    """Check that steps were replayed, and that none could not be captured."""
    assert graphs is not None
    assert set() == graphs._reasons
    assert graphs.num_replays >= at_least


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("graphs", ["off", "auto"])
def test_steps_that_overlap_give_the_tokens_of_steps_that_do_not(
    models: Callable[[str], TinyModel], family: str, graphs: str
) -> None:
    expected, _ = serve(models(family), family, overlap="off")
    tokens, engine = serve(models(family), family, overlap="on", graphs=graphs)
    assert expected == tokens
    assert 0 == held_pages(engine)


@pytest.mark.parametrize("family", ["llama", "jamba"])
@pytest.mark.parametrize("graphs", ["off", "auto"])
def test_penalties_and_log_probabilities_of_steps_that_overlap(
    models: Callable[[str], TinyModel], family: str, graphs: str
) -> None:
    params = [SamplingParams(**{"seed": 1, **extras}, max_new_tokens=16, ignore_eos=True) for extras in EXTRAS]
    results = []
    for overlap in ("off", "on"):
        with models(family).engine(overlap=overlap, graphs=graphs) as engine:
            outputs = engine.generate(PROMPTS, params)
            results.append(([output.token_ids for output in outputs], [output.logprobs for output in outputs]))
    (expected, expected_values), (tokens, values) = results
    assert expected == tokens
    for own, other in zip(expected_values, values, strict=True):
        assert other == (own if own is None else pytest.approx(own, abs=1e-3))


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_and_drafts_change_no_token_of_any_kind_of_model(
    models: Callable[[str], TinyModel], family: str
) -> None:
    model = models(family)
    expected, _ = serve(model, family)
    tokens, engine = serve(model, family, graphs=[1, 2, 4, 8])
    assert expected == tokens
    check_replays(runner_of(engine).graphs, 8)
    sizes = {"graphs": [1, 2, 4, 8], "graph_query_lens": [1, 1 + MAX_DRAFTS]}
    tokens, engine = serve(model, family, drafts="knowing", **sizes)
    assert expected == tokens
    check_replays(runner_of(engine).graphs)
    assert 0 < engine.stats().accepted_draft_tokens < engine.stats().draft_tokens


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_prediction_heads_run_in_graphs(tmp_path: Path, family: str) -> None:
    save_headed(tmp_path / family, family, 2, agrees=True, num_wrong=1)
    registry = load_plugins().registry
    model = attrs.evolve(TinyModel.save(tmp_path / "plain", family), path=tmp_path / family, registry=registry).on(
        "cuda"
    )
    loaded: Any = model.loaded
    loaded.model.set_experts_implementation("batched_mm")
    expected, _ = serve(model, family)
    tokens, engine = serve(model, family, drafts="mtp", graphs=[4, 8])
    assert expected == tokens
    assert 0 < engine.stats().accepted_draft_tokens < engine.stats().draft_tokens
    for runner in (runner_of(engine), *runner_of(engine).draft.runners):
        check_replays(runner.graphs)


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_a_draft_model_runs_in_graphs(models: Callable[[str], TinyModel], family: str) -> None:
    model = models(family)
    expected, _ = serve(model, family)
    tokens, engine = serve(model, family, drafts={"name": "draft_model", "model": str(model.path)}, graphs=[4, 8])
    assert expected == tokens
    assert engine.stats().accepted_draft_tokens > 0
    check_replays(runner_of(engine).graphs)


@pytest.mark.parametrize("host_memory", [None, "1MiB"])
@pytest.mark.parametrize("family", ["gemma3_text", "falcon_h1"])
def test_preempted_requests_generate_the_same(
    models: Callable[[str], TinyModel], family: str, host_memory: str | None
) -> None:
    model = models(family)
    expected, _ = serve(model, family)
    options: dict[str, Any] = {"memory": model.tight_memory(81), "host_memory": host_memory}
    tokens, engine = serve(model, family, graphs=[1, 2, 4, 8], **options)
    assert expected == tokens
    assert engine.stats().preemptions > 0


@pytest.mark.parametrize("kv_format", ["fp8_tensor", "fp8_token_head", "int8_token_head", "int4_token_head"])
def test_a_format_gives_the_tokens_of_the_reference(models: Callable[[str], TinyModel], kv_format: str) -> None:
    model = models("llama")
    expected, _ = serve(model, "llama", format=kv_format, backend="torch_reference")
    tokens, engine = serve(model, "llama", format=kv_format, backend="triton", graphs=[4, 8])
    assert expected == tokens
    check_replays(runner_of(engine).graphs)


NOT_COMPILED = pytest.mark.xfail(
    Version(torch.__version__) < Version("2.12"), raises=ModelError, reason="torch 2.11 cannot compile it for a GPU"
)


@pytest.mark.parametrize("family", ["llama", pytest.param("falcon_h1", marks=NOT_COMPILED)])
def test_a_compiled_model_generates_the_same(models: Callable[[str], TinyModel], family: str) -> None:
    model = models(family)
    expected, _ = serve(model, family)
    assert expected == serve(model, family, compile=True)[0]


def test_ranks_communicate_through_nccl(models: Callable[[str], TinyModel], tmp_path: Path) -> None:
    model = models("llama")
    expected, _ = serve(model, "llama")
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(PROMPTS))
    arguments = ["--prompt-token-ids", str(prompts), "--max-new-tokens", "16", "--ignore-eos", "--json"]
    command = [sys.executable, "-m", "kvframe", "generate", str(model.path), *arguments]
    port = free_port()
    # Both ranks use the first GPU. NCCL refuses that on one machine, so each has the name of a machine of its own.
    ranks = [
        subprocess.Popen(
            [*command, "--device", "cuda", "--dtype", "float32", "--memory", "4MiB"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "NCCL_HOSTID": f"machine{rank}",
                "NCCL_SOCKET_IFNAME": "lo",
                "NCCL_IB_DISABLE": "1",
            },
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [0, 0] == [rank.returncode for rank in ranks], outputs
    assert expected == [tuple(output["token_ids"]) for output in json.loads(outputs[0][0])["outputs"]]
