"""Layers that keep the prompt and a window of what was generated: a real model, against dense attention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from kvframe_sliding_window import PromptAndWindowSpec
from kvframe_torch.backend import TorchBackend
from kvframe_transformers.testing import save_tiny

from kvframe import Engine, Layers, SamplingParams, Stack, group_layers, load_plugins, plan_cache
from kvframe.contract import BackendError, LayerSpec, QuerySpec
from tests.covering import few
from tests.stacks import tables_of

WINDOW = 4
PROMPTS = [[*range(3, 40)], [5, 6, 7], [*range(3, 24), 9]]
NUM_NEW = 24

BACKENDS = ("torch_reference", "torch", "cpu", "numba", {"name": "flex", "compile": "never"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("model") / "tiny-llama"
    return path, save_tiny(path, "llama")


def dense_tokens(model: Any, prompt: Sequence[int], num_new: int = NUM_NEW) -> list[int]:
    """Return greedy tokens of the model's own forward: the mask shows the prompt and a window."""
    tokens = list(prompt)
    for _ in range(num_new):
        queries, keys = torch.arange(len(tokens))[:, None], torch.arange(len(tokens))[None]
        sees = (keys <= queries) & ((keys < len(prompt)) | (keys > queries - WINDOW))
        mask = torch.zeros(sees.shape).masked_fill(~sees, float("-inf"))[None, None]
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]), attention_mask=mask, use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def make_engine(path: Path, *, backend: Any = "auto", **options: Any) -> Engine:
    rule = {"layers": "*", "backend": backend, "spec": {"kind": "prompt_and_window", "window": WINDOW}}
    usual = {"memory": "2MiB", "block_size": 4, "max_model_len": 96, "max_num_batched_tokens": 16}
    tables = tables_of(**{**usual, **options.pop("cache", {}), **options})
    return Engine.from_pretrained(path, stack=Stack.from_mapping({**tables, "rules": [rule]}))


def generate(engine: Engine, prompts: Sequence[Sequence[int]] = PROMPTS, **params: Any) -> list[list[int]]:
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True, **params))
    return [list(output.token_ids) for output in outputs]


@pytest.mark.parametrize("backend", few(3, BACKENDS), ids=str)
def test_every_token_is_that_of_dense_attention(model: tuple[Path, Any], backend: Any) -> None:
    path, own = model
    expected = [dense_tokens(own, prompt) for prompt in PROMPTS]
    with make_engine(path, backend=backend) as engine:
        assert expected == generate(engine)
        assert expected == generate(engine)  # on cached prefixes


def test_the_window_and_the_prompt_both_matter(model: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    path, own = model
    with make_engine(path) as engine:
        found = generate(engine)
    monkeypatch.setattr(f"{__name__}.WINDOW", 10**6)
    assert all(dense_tokens(own, prompt) != tokens for prompt, tokens in zip(PROMPTS, found, strict=True))


def test_a_request_holds_its_prompt_and_a_window(model: tuple[Path, Any]) -> None:
    path, _ = model
    with make_engine(path, backend="torch") as engine:
        generate(engine, PROMPTS[:1])
        # 37 tokens of the prompt and a window of 4 in blocks of 4; 61 tokens would take 16.
        assert (10 + 2,) == engine.stats().peak_blocks_held


def test_samples_drafts_and_preempted_requests_generate_the_same(model: tuple[Path, Any]) -> None:
    path, own = model
    prompts = [[*range(3 + i, 24 + i)] for i in range(6)]
    expected = [dense_tokens(own, prompt) for prompt in prompts]
    for preemption in ({"preemption": "recompute"}, {"preemption": "swap", "swap_memory": "1MiB"}):
        with make_engine(path, backend="torch", cache={**preemption, "memory": "128KiB", "audit": True}) as engine:
            assert expected == generate(engine, prompts)
            stats = engine.stats()
        assert stats.preemptions > 0
    with make_engine(path, backend="torch", drafts="ngram") as engine:
        assert expected[0] == generate(engine, prompts[:1])[0]
        assert [expected[1]] * 3 == generate(engine, [prompts[1]], n=3)


def test_steps_are_replayed_from_graphs(model: tuple[Path, Any]) -> None:
    path, own = model
    expected = [dense_tokens(own, prompt) for prompt in PROMPTS]
    options: dict[str, Any] = {"graphs": [1, 2, 4], "graph_query_lens": [1, 8, 16]}
    with make_engine(path, backend="cpu", **options) as engine:
        assert expected == generate(engine)
        runner: Any = engine._runner
        assert runner.graphs.num_replays > 20
        assert set() == runner.graphs._reasons


def test_what_was_generated_is_for_no_other_prompt(model: tuple[Path, Any]) -> None:
    path, own = model
    with make_engine(path, backend="torch") as engine:
        (answer,) = generate(engine, PROMPTS[:1])
        (output,) = engine.generate([PROMPTS[0] + answer[:20]], SamplingParams(max_new_tokens=8, ignore_eos=True))
    # In a conversation, only the first prompt is found: what its answer saw ended with its window.
    assert output.cached is not None
    assert 36 == output.cached.num_tokens
    assert dense_tokens(own, PROMPTS[0] + answer[:20], 8) == list(output.token_ids)


def test_other_backends_are_refused_by_code(model: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = model
    layer = LayerSpec(
        name="layer",
        spec=PromptAndWindowSpec(block_size=16, num_kv_heads=2, head_size=16, window=4),
        query=QuerySpec(num_heads=2, head_size=16, scale=1.0),
    )
    backends = load_plugins().registry.backends
    for name in ("torch", "torch_reference", "cpu", "numba", "flex"):
        assert [] == backends.load(name).capabilities.refusals(layer, "cpu")
    assert [] == backends.load("triton").capabilities.refusals(layer, "cuda")
    known = TorchBackend.capabilities
    monkeypatch.setattr(TorchBackend, "capabilities", attrs.evolve(known, masks=known.masks - {"prompt"}))
    with pytest.raises(BackendError, match="mask prompt"):
        make_engine(path, backend="torch")


def test_another_host_is_refused() -> None:
    layer = LayerSpec(
        name="layer",
        spec=PromptAndWindowSpec(block_size=16, num_kv_heads=2, head_size=16, window=4),
        query=QuerySpec(num_heads=2, head_size=16, scale=1.0),
    )
    with pytest.raises(BackendError, match="depends on the length of a request's prompt") as caught:
        Layers.on_host_pages([layer], Stack(), load_plugins().registry, torch.device("cpu"))
    assert "mask_prompt" == caught.value.code


def test_a_request_fits_by_its_prompt_and_window() -> None:
    spec = PromptAndWindowSpec(block_size=4, num_kv_heads=1, head_size=8, window=4)
    layers = [LayerSpec(name="layer", spec=spec)]
    plan = plan_cache(group_layers(layers), memory_bytes=1 << 14, max_model_len=200, max_num_batched_tokens=8)
    assert plan.depends_on_prompt
    assert (50,) == plan.peak_blocks(200) == plan.peak_blocks(200, num_prompt_tokens=200)
    # 20 tokens of the prompt, and one token more than a window, in blocks of 4.
    assert (5 + 2,) == plan.generating_blocks(200, num_prompt_tokens=20)
