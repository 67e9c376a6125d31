"""Plugins of an older version of the contract, unchanged, in this version of vLLM: a spec, a wrapper and a backend."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make vllm"),
    pytest.mark.filterwarnings("ignore"),
]

FROZEN = Path(__file__).parents[3] / "tests" / "frozen"
CHUNK = 24
STACK = f"""
[plugins]
required = ["frozen"]
[[rules]]
layers = "*"
backend = "frozen_backend"
wrappers = ["frozen_wrapper"]
[[rules]]
layers = "model.layers.0.*"
spec = {{ kind = "frozen_spec", chunk = {CHUNK} }}
"""


def chunk(n: int) -> list[tuple[int, int]]:
    return [(n - n % CHUNK, n)]


def full(n: int) -> list[tuple[int, int]]:
    return [(0, n)]


@pytest.mark.parametrize("version", sorted(path.name for path in FROZEN.glob("[0-9]*")))
def test_frozen_plugins_serve_a_model_in_vllm(version: str, vllm_runs: Any) -> None:
    model, prompts = vllm_runs.make_model("Llama"), vllm_runs.make_prompts(12)
    settings = {"engine": vllm_runs.engine, "prompts": prompts, "max_tokens": 8}
    report = vllm_runs.serve(model, settings, STACK, [FROZEN / version])

    assert vllm_runs.dense_tokens(model, prompts, 8, [chunk, full]) == report["tokens"]
    assert vllm_runs.dense_tokens(model, prompts, 8, [full, full]) != report["tokens"]
    assert ["HostedImpl"] == report["impls"]
    assert sum(report["cached"]) > 0
    assert {"pages": 0, "output": 0} == report["copies"]
    assert 0 == report["held_blocks"]
