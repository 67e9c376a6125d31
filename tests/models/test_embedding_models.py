"""Embeddings of real architectures equal those of transformers' own plain forward, with all settings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from kvframe_engine.assembly import assemble
from kvframe_engine.self_check import run_packed
from kvframe_transformers.testing import ENCODER_FAMILIES, FAMILIES

from kvframe import Embedder, Setup
from tests.covering import cover_pairs, cover_values, few
from tests.models.serving import TinyModel, make_stack
from tests.support.engines import manager_of, runner_of

MODES = ("mean", "cls", "last")


def ids(length: int, seed: int) -> list[int]:
    # Without the ids that stand for padding.
    return torch.randint(4, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


SHARED = ids(36, 9)
TEXTS = (ids(1, 1), ids(9, 2), ids(17, 3), ids(64, 4), [*SHARED, *ids(3, 5)], [*SHARED, *ids(19, 6)], ids(2, 7), SHARED)


def embedder(model: TinyModel, *, pooling: Any = None, **options: Any) -> Embedder:
    stack = make_stack(**options)
    setup = Setup.of(model.loaded.description, stack, model.registry, dtype="float32")
    return Embedder(model.loaded, setup, pooling=pooling, normalize=False, poison_freed=True)


def plain_states(model: TinyModel, text: Sequence[int]) -> torch.Tensor:
    """Return the hidden states of a text alone; the model must not be attached."""
    loaded: Any = model.loaded
    with torch.inference_mode():
        states: torch.Tensor = loaded.model.base_model(torch.tensor([text]), use_cache=False).last_hidden_state[0]
    return states


def pooled(states: torch.Tensor, mode: str) -> torch.Tensor:
    return {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[mode]


def difference(expected: Sequence[torch.Tensor], vectors: Sequence[Any]) -> float:
    """Return the largest relative difference between pairs."""
    pairs = zip(expected, vectors, strict=True)
    return max(float((torch.as_tensor(have) - want).norm() / want.norm()) for want, have in pairs)


def embedded(model_embedder: Embedder) -> list[Any]:
    outputs = model_embedder.embed(TEXTS)
    assert {"computed"} == {output.finish_reason for output in outputs}
    assert 0 == manager_of(model_embedder).num_held_pages
    return [output.embedding for output in outputs]


# --- encoders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "backend", "max_num_batched_tokens"),
    few(4, cover_values(ENCODER_FAMILIES, product(("torch", "torch_reference"), (64, 100, 2048)))),
)
def test_mixed_lengths_in_one_batch_give_the_plain_hidden_states(
    models: Any, family: str, backend: str, max_num_batched_tokens: int
) -> None:
    model = models(family)
    expected = [plain_states(model, text) for text in TEXTS]
    stack = make_stack(backend=backend, max_num_batched_tokens=max_num_batched_tokens, device="cpu")
    setup = Setup.of(model.loaded.description, stack, model.registry, dtype="float32")
    assembly = assemble(model.loaded, setup)
    assembly.layers.local.is_poisoned = True
    model.loaded.attach(assembly.layers)
    try:
        states = run_packed(assembly, [list(text) for text in TEXTS])
    finally:
        model.loaded.detach()
    assert difference(expected, states) < 1e-5


@pytest.mark.parametrize(
    ("family", "mode", "block_size", "max_num_batched_tokens", "max_num_seqs", "backend"),
    cover_pairs(
        ENCODER_FAMILIES[:3],
        MODES,
        [(16, 2048, 64, "torch"), (1, 64, 3, "torch"), (17, 100, 64, "torch"), (16, 64, 1, "torch_reference")],
    ),
)
def test_embeddings_of_an_encoder_are_the_plain_ones(
    models: Any,
    family: str,
    mode: str,
    block_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    backend: str,
) -> None:
    model = models(family)
    expected = [pooled(plain_states(model, text), mode) for text in TEXTS]
    options = {"max_num_batched_tokens": max_num_batched_tokens, "max_num_seqs": max_num_seqs, "backend": backend}
    with embedder(model, pooling=mode, block_size=block_size, **options) as model_embedder:
        assert difference(expected, embedded(model_embedder)) < 1e-5
        stats = model_embedder.stats()
    assert (0, 0, 0) == (stats.cache_bytes, stats.cached_prompt_tokens, stats.generated_tokens)
    assert sum(map(len, TEXTS)) == stats.computed_tokens


@pytest.mark.parametrize("family", few(3, ENCODER_FAMILIES))
def test_the_self_check_of_an_encoder_runs_in_a_small_step_too(models: Any, family: str) -> None:
    for max_num_batched_tokens, max_num_seqs in ((2048, 64), (8, 1)):
        options = {"max_num_batched_tokens": max_num_batched_tokens, "max_num_seqs": max_num_seqs}
        with embedder(models(family), self_check=True, **options) as model_embedder:
            assert 1 == len(model_embedder.embed([TEXTS[0]]))


def test_an_encoder_whose_attention_is_causal_by_mistake_would_show(
    models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvframe_attention_free import EncoderOnlySpec

    from kvframe.contract.specs import AttentionMask

    model = models("bert")
    expected = [pooled(plain_states(model, text), "mean") for text in TEXTS]
    monkeypatch.setattr(EncoderOnlySpec, "mask", property(lambda _: AttentionMask()))
    with embedder(model) as model_embedder:
        assert difference(expected, embedded(model_embedder)) > 1e-2


# --- decoders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "mode", "block_size", "max_num_batched_tokens"),
    few(3, cover_pairs(FAMILIES, MODES, [(16, 2048), (5, 24), (1, 7)])),
)
def test_embeddings_of_a_decoder_are_the_plain_ones_in_chunks_too(
    models: Any, family: str, mode: str, block_size: int, max_num_batched_tokens: int
) -> None:
    model = models(family)
    expected = [pooled(plain_states(model, text), mode) for text in TEXTS]
    options = {"block_size": block_size, "max_num_batched_tokens": max_num_batched_tokens}
    with embedder(model, pooling=mode, **options) as model_embedder:
        assert difference(expected, embedded(model_embedder)) < 1e-4
        assert (mode == "last") == (model_embedder.stats().cached_prompt_tokens > 0)


def test_the_body_of_a_decoder_is_found_by_its_class_too(models: Any) -> None:
    # For Llama 4's text models, transformers' base model is the whole model.
    model = models("llama4_text")
    loaded: Any = model.loaded
    with torch.inference_mode():
        expected = [loaded.model.model(torch.tensor([text])).last_hidden_state[0, -1] for text in TEXTS]
    with embedder(model, self_check=True) as model_embedder:
        assert difference(expected, embedded(model_embedder)) < 1e-4


def test_a_decoder_that_pools_its_last_token_keeps_its_cache_and_its_prefixes(models: Any) -> None:
    model = models("qwen3")
    expected = [pooled(plain_states(model, text), "last") for text in TEXTS[4:6]]
    with embedder(model, block_size=4) as model_embedder:
        assert ("last", 1) == (model_embedder.pooling.mode, len(model_embedder.plan.groups))
        assert model_embedder.stats().cache_bytes > 0
        outputs = [*model_embedder.embed([TEXTS[4]]), *model_embedder.embed([TEXTS[5]])]
        assert difference(expected, [output.embedding for output in outputs]) < 1e-4
        # 39 tokens, then 55, the first 36 of which are 9 cached blocks.
        assert (39 + 55 - 36, 36) == (
            model_embedder.stats().computed_tokens,
            model_embedder.stats().cached_prompt_tokens,
        )


@pytest.mark.parametrize("family", ["lfm2", "bamba"])
def test_a_hybrid_decoder_embeds_from_its_states(models: Any, family: str) -> None:
    model = models(family)
    expected = [pooled(plain_states(model, text), "last") for text in TEXTS]
    with embedder(model, max_num_batched_tokens=24) as model_embedder:
        assert difference(expected, embedded(model_embedder)) < 1e-4


@pytest.mark.parametrize("mode", ["last", "mean"])
def test_layers_that_skip_tokens_give_the_plain_embeddings(models: Any, mode: str) -> None:
    model = models("gemma3n_text")
    expected = [pooled(plain_states(model, text), mode) for text in TEXTS]
    options = {"prefill_skipping": "decode_only", "max_num_batched_tokens": 40, "self_check": True}
    with embedder(model, pooling=mode, **options) as model_embedder:
        assert runner_of(model_embedder)._layers.skipped
        assert difference(expected, embedded(model_embedder)) < 1e-4


def test_one_loaded_model_generates_and_embeds_by_turns(models: Any) -> None:
    model = models("llama")
    with model.engine() as engine:
        before = engine.generate([TEXTS[1]])[0].token_ids
    with embedder(model) as model_embedder:
        model_embedder.embed([TEXTS[1]])
    with model.engine() as engine:
        assert before == engine.generate([TEXTS[1]])[0].token_ids
