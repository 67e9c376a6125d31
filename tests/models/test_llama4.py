"""Llama 4's text model: chunks of 8 tokens with rotary positions, and full layers with a temperature instead."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from kvframe_engine.requests.request import SamplingParams

from tests.covering import cover_pairs, few
from tests.models.serving import PROMPTS, TinyModel, Tokens, ids, served

BACKENDS = ("torch", "torch_reference")


@pytest.fixture(scope="module")
def model(models: Callable[[str], TinyModel]) -> TinyModel:
    return models("llama4_text")


@pytest.fixture(scope="module")
def reference(references: Callable[[str], Tokens]) -> Tokens:
    return references("llama4_text")


def test_chunked_layers_alternate_with_full_ones(model: TinyModel) -> None:
    layers = model.loaded.description.layers
    assert [("chunked_local", 8), ("full_attention", None)] * 2 == [
        (layer.kind, layer.options.get("chunk")) for layer in layers
    ]


# Blocks that divide the chunk, and blocks in which chunks begin.
SETTINGS = [(1, 24, 8), (4, 7, 8), (8, 2048, 3), (3, 24, 3), (5, 2048, 8), (16, 7, 1), (16, 24, 8), (17, 2048, 3)]


@pytest.mark.parametrize(
    ("backend", "block_size", "max_num_batched_tokens", "max_num_seqs", "hybrid", "prefix_caching"),
    few(3, cover_pairs(BACKENDS, SETTINGS, (True, False), (True, False))),
)
def test_tokens_equal_those_of_generate(
    model: TinyModel,
    reference: Tokens,
    backend: str,
    block_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    hybrid: bool,
    prefix_caching: bool,
) -> None:
    with model.engine(
        backend=backend,
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        hybrid=hybrid,
        prefix_caching=prefix_caching,
    ) as engine:
        assert reference == served(engine)
        assert prefix_caching == (engine.stats().cached_prompt_tokens > 0)
        assert (2 if hybrid else 1) == len(engine.plan.groups)


@pytest.mark.parametrize(("backend", "prefix_caching", "block_size"), few(2, product(BACKENDS, (True, False), (4, 5))))
def test_preempted_requests_give_the_same_tokens(
    model: TinyModel, reference: Tokens, backend: str, prefix_caching: bool, block_size: int
) -> None:
    options: dict[str, Any] = {"max_model_len": 96, "max_num_batched_tokens": 12, "block_size": block_size}
    memory = model.tight_memory(75, **options)
    with model.engine(
        memory=memory, prefix_caching=prefix_caching, max_num_seqs=8, backend=backend, **options
    ) as engine:
        assert reference == served(engine)
        assert engine.stats().preemptions > 0


def test_a_second_round_finds_the_prompts_of_the_first(model: TinyModel, reference: Tokens) -> None:
    with model.engine(block_size=4) as engine:
        served(engine)
        before = engine.stats()
        assert reference == served(engine)
        hits = sum((len(prompt) - 1) // 4 * 4 for prompt in PROMPTS)
        assert hits == engine.stats().cached_prompt_tokens - before.cached_prompt_tokens


def test_chunked_layers_hold_the_blocks_of_their_chunk_only(model: TinyModel) -> None:
    prompt = ids(9, 300)
    expected = model.reference(prompt, 40)
    with model.engine(block_size=4, max_num_batched_tokens=16) as engine:
        (output,) = engine.generate([prompt], SamplingParams(max_new_tokens=40))
        assert expected == output.token_ids
        chunked = next(group for group in engine.plan.groups if group.spec.kind == "chunked_local")
        # Two chunks of 8 tokens that a step of 16 writes, and the one before them in which the step may begin.
        assert engine.stats().peak_blocks_held[chunked.index] <= 6


@pytest.mark.parametrize("overrides", [{"use_qk_norm": False}, {"attn_temperature_tuning": False}], ids=str)
def test_its_variants_give_the_tokens_of_generate(tmp_path: Any, overrides: dict[str, Any]) -> None:
    model = TinyModel.save(tmp_path, "llama4_text", **overrides)
    expected = [model.reference(prompt) for prompt in PROMPTS]
    with model.engine(block_size=5, max_num_batched_tokens=24, self_check=True) as engine:
        assert expected == served(engine)


def test_the_temperature_tells_tokens_apart(model: TinyModel, reference: Tokens) -> None:
    """The tiny model's temperature matters: without it, the tokens differ."""
    loaded: Any = model.loaded
    full = [layer.self_attn for layer in loaded.model.model.layers if not layer.self_attn.use_rope]
    try:
        for attention in full:
            attention.attn_temperature_tuning = False
        assert reference != [model.reference(prompt) for prompt in PROMPTS]
    finally:
        for attention in full:
            attention.attn_temperature_tuning = True


def test_a_model_has_its_own_temperature_between_steps(model: TinyModel, reference: Tokens) -> None:
    loaded: Any = model.loaded
    full = [layer.self_attn for layer in loaded.model.model.layers if not layer.self_attn.use_rope]
    with model.engine(self_check=True):
        assert [True, True] == [attention.attn_temperature_tuning for attention in full]
        assert reference[3] == model.reference(PROMPTS[3])
