"""vLLM with processes of its own: an engine, tensor and pipeline parallel workers. Each layer runs on kvframe."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make vllm"),
    pytest.mark.filterwarnings("ignore"),
]

COUNTER = """
import os

def register():
    import kvframe
    original = kvframe.Layers.attend

    def attend(self, step, layer, *args, **options):
        open(os.path.join(os.environ["RAN"], f"{os.getpid()} {layer}"), "a").close()
        return original(self, step, layer, *args, **options)

    kvframe.Layers.attend = attend
"""
PARALLEL: dict[str, dict[str, Any]] = {
    "engine": {},
    "tensor": {"tensor_parallel_size": 2},
    # vLLM 0.32 has no memory for what stages hand over on a CPU, unless it compiled the model; so it does, to nothing.
    "pipeline": {
        "pipeline_parallel_size": 2,
        "enforce_eager": False,
        "compilation_config": {"mode": 1, "backend": "eager"},
    },
}


@pytest.fixture(scope="module")
def one_process(vllm_runs: Any) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Return a model, what is asked of it, and the answers of one process on vLLM's own backend."""
    model, prompts = vllm_runs.make_model("Gemma3Text"), vllm_runs.make_prompts(64)
    settings = {"engine": vllm_runs.engine, "prompts": prompts, "max_tokens": 8}
    return model, settings, vllm_runs.serve(model, settings, None)


@pytest.mark.parametrize("parallel", PARALLEL)
def test_processes_give_the_tokens_of_one(
    parallel: str, vllm_runs: Any, one_process: tuple[Path, dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    model, settings, expected = one_process
    ran = tmp_path / "ran"
    ran.mkdir()
    binding = "0|1" if PARALLEL[parallel] else "0"
    variables = {"RAN": str(ran), "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": binding}
    remote = {**settings, "engine": {**vllm_runs.engine, **PARALLEL[parallel]}}
    plugins = [
        vllm_runs.make_plugin(tmp_path / "plugins", "counter", COUNTER, "vllm.general_plugins", "counter:register")
    ]
    report = vllm_runs.serve(model, remote, vllm_runs.stack, plugins, **variables)

    assert expected["tokens"] == report["tokens"]
    assert sum(report["cached"]) > 1000
    layers: dict[str, set[str]] = {}
    for path in ran.iterdir():
        process, _, layer = path.name.partition(" ")
        layers.setdefault(process, set()).add(layer)
    every = set(expected["layers"])
    if parallel == "pipeline":  # each stage has layers of its own
        assert sorted(every) == sorted(layer for stage_layers in layers.values() for layer in stage_layers)
    else:
        assert [every] * len(layers) == [*layers.values()]
    assert (2 if PARALLEL[parallel] else 1) == len(layers)
