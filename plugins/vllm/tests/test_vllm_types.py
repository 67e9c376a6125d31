"""Attention types that vLLM has never heard of, in its engine: tokens equal to those under a dense mask."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvframe.contract import TokenRange

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make vllm"),
    pytest.mark.filterwarnings("ignore"),
]

WINDOW, NUM_SINKS, STRIDE, NUM_SUMMARY, CHUNK = 48, 4, 16, 4, 40
EXAMPLES = Path(__file__).parents[3] / "examples"
Live = Callable[[int], Sequence[TokenRange]]


def window(n: int) -> list[TokenRange]:
    return [(max(0, n - WINDOW + 1), n)]


def window_with_sinks(n: int) -> list[TokenRange]:
    return [(0, min(n, NUM_SINKS)), *window(n)]


def fixed_pattern(n: int) -> list[TokenRange]:
    own = n - n % STRIDE
    return [*((end - NUM_SUMMARY, end) for end in range(STRIDE, own + 1, STRIDE)), (own, n)]


def chunk(n: int) -> list[TokenRange]:
    return [(n - n % CHUNK, n)]


def full(n: int) -> list[TokenRange]:
    return [(0, n)]


def test_a_window_with_sinks_under_preemption_and_eviction(vllm_runs: Any) -> None:
    model, prompts = vllm_runs.make_model("Mistral"), vllm_runs.make_prompts(24)
    stack = vllm_runs.torch + f'[[rules]]\nkind = "sliding_window"\nspec = {{ num_sink_tokens = {NUM_SINKS} }}\n'
    # The cache has pages for few of the requests, so that they are preempted; the second round finds part of the first.
    limits = {"num_gpu_blocks_override": 20, "max_num_batched_tokens": 32, "max_num_seqs": 32}
    engine = {**vllm_runs.engine, **limits}
    settings = {"engine": engine, "prompts": prompts, "max_tokens": 40, "rounds": 2}
    report = vllm_runs.serve(model, settings, stack)

    expected = vllm_runs.dense_tokens(model, prompts, 40, [window_with_sinks] * 2)
    assert expected * 2 == report["tokens"]
    assert expected != vllm_runs.dense_tokens(model, prompts, 40, [window] * 2)  # the control: sinks matter
    assert report["preemptions"] > 0
    assert 0 < sum(report["cached"]) < 2 * sum(map(len, prompts))
    assert 0 == report["held_blocks"]
    assert 0 == report["copies"]["pages"]
    # The window, the sinks and the tokens in flight, not the whole request.
    assert report["most_blocks"] <= report["peak_blocks"] < -(-(max(map(len, prompts)) + 40) // 32)


def test_a_pattern_of_the_examples_beside_full_attention(vllm_runs: Any, tmp_path: Path) -> None:
    model, prompts = vllm_runs.make_model("Llama"), vllm_runs.make_prompts(16)
    plugins = vllm_runs.make_plugin(tmp_path, "pattern", "", "kvframe.v1", "new_attention_type")
    stack = (
        vllm_runs.torch
        + '[[rules]]\nlayers = "model.layers.0.*"\nbackend = "torch_reference"\n'
        + f'spec = {{ kind = "fixed_pattern", stride = {STRIDE}, num_summary = {NUM_SUMMARY} }}\n'
    )
    settings = {"engine": vllm_runs.engine, "prompts": prompts, "max_tokens": 12}
    report = vllm_runs.serve(model, settings, stack, [plugins, EXAMPLES])

    assert vllm_runs.dense_tokens(model, prompts, 12, [fixed_pattern, full]) == report["tokens"]
    assert vllm_runs.dense_tokens(model, prompts, 12, [full, full]) != report["tokens"]
    assert ["LiveBlockManager"] * 2 == report["managers"]
    assert sum(report["cached"]) > 0
    assert 0 == report["held_blocks"]


def test_chunks_that_begin_within_a_block_beside_full_attention(vllm_runs: Any) -> None:
    model, prompts = vllm_runs.make_model("Llama"), vllm_runs.make_prompts(16)
    stack = (
        vllm_runs.stack
        + f'[[rules]]\nlayers = "model.layers.0.*"\nspec = {{ kind = "chunked_local", chunk = {CHUNK} }}\n'
    )
    report = vllm_runs.serve(model, {"engine": vllm_runs.engine, "prompts": prompts, "max_tokens": 12}, stack)

    assert vllm_runs.dense_tokens(model, prompts, 12, [chunk, full]) == report["tokens"]
    assert vllm_runs.dense_tokens(model, prompts, 12, [full, full]) != report["tokens"]
    assert sum(report["cached"]) > 0
    assert {"pages": 0, "output": 0} == report["copies"]
    assert 0 == report["held_blocks"]
