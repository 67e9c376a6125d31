"""Layers of every kind in one model: planned, run, cached, preempted, and equal to its dense forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from kvframe_engine.requests.request import SamplingParams

from kvframe.attention.layer import AttentionLayer
from kvframe.contract.errors import ModelError
from kvframe.contract.state import StateRound
from tests.covering import cover_pairs, cover_values, few
from tests.models.encoder_decoder import decoder_of, plain_logits
from tests.models.encoder_decoder import prompts as encoder_prompts
from tests.models.mixtures import dense_tokens, save_mixture
from tests.models.serving import GREEDY, NUM_NEW_TOKENS, PROMPTS, TinyModel, Tokens, held_pages, ids, served
from tests.support.commands import run_json
from tests.support.engines import storage_of

MIXTURES = {
    "each": ("full", "window", "chunk", "mamba2", "latent"),
    "each twice": ("latent", "mamba2", "window", "full", "chunk", "chunk", "latent", "window", "mamba2", "full"),
    "full and latent": ("full", "latent", "full", "latent"),
    "latent and states": ("mamba2", "mamba2", "latent"),
    "local and latent": ("window", "latent", "chunk", "latent"),
}
KINDS = {
    "full": "full_attention",
    "window": "sliding_window",
    "chunk": "chunked_local",
    "mamba2": "mamba",
    "latent": "mla",
}
ALL = pytest.mark.parametrize("mixture", MIXTURES)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    folder = tmp_path_factory.mktemp("mixtures")
    return cache(lambda mixture: save_mixture(folder / mixture.replace(" ", "_"), MIXTURES[mixture]))


@pytest.fixture(scope="module")
def references(models: Callable[[str], TinyModel]) -> Callable[[str], Tokens]:
    return cache(lambda mixture: [dense_tokens(models(mixture), prompt) for prompt in PROMPTS])


# --- planned ----------------------------------------------------------------------------------------------------------


@ALL
def test_layers_of_a_kind_are_a_group(models: Any, mixture: str) -> None:
    kinds = [KINDS[kind] for kind in MIXTURES[mixture]]
    assert kinds == [layer.kind for layer in models(mixture).loaded.description.layers]
    with models(mixture).engine() as engine:
        expected = {
            kind: tuple(f"layers.{index}.mixer" for index, layer_kind in enumerate(kinds) if layer_kind == kind)
            for kind in kinds
        }
        assert expected == {group.spec.kind: group.layers for group in engine.plan.groups}


@ALL
def test_plan_states_the_allocation_to_the_byte_and_wastes_little(models: Any, mixture: str) -> None:
    model = models(mixture)
    command = ["plan", str(model.path), "--dtype", "float32", "--cache-memory", "4MiB", "--json"]
    planned = run_json(*command)
    with model.engine() as engine:
        assert planned["total_bytes"] == engine.stats().cache_bytes
        for group, entry in zip(engine.plan.groups, planned["groups"], strict=True):
            tensors = [tensor for layer in group.layers for tensor in storage_of(engine).views[layer].values()]
            assert entry["page_bytes"] == sum(tensor[0].numel() * tensor.itemsize for tensor in tensors)


# --- equal to dense ---------------------------------------------------------------------------------------------------


SETTINGS = [(1, 7, 3), (16, 24, 8), (17, 2048, 8), (5, 2048, 1), (4, 3, 8)]


@pytest.mark.parametrize(
    ("mixture", "block_size", "chunk", "max_num_seqs", "prefix_caching"),
    few(4, cover_values(MIXTURES, [(*settings, caching) for settings in SETTINGS for caching in (True, False)])),
)
def test_tokens_equal_those_of_the_dense_forward(
    models: Any, references: Any, mixture: str, block_size: int, chunk: int, max_num_seqs: int, prefix_caching: bool
) -> None:
    expected = references(mixture)
    options = {"block_size": block_size, "max_num_batched_tokens": chunk, "max_num_seqs": max_num_seqs}
    with models(mixture).engine(prefix_caching=prefix_caching, self_check=True, **options) as engine:
        assert expected == served(engine)
        assert expected == served(engine)


@pytest.mark.parametrize("mixture", few(2, MIXTURES))
def test_the_probability_of_every_prompt_token_is_that_of_the_dense_forward(models: Any, mixture: str) -> None:
    model = models(mixture)
    prompts = [ids(4, 90), ids(9, 33)]
    with torch.inference_mode():
        logits = [model.loaded.model(torch.tensor([prompt])).logits[0].log_softmax(-1) for prompt in prompts]
    params = SamplingParams(max_new_tokens=1, prompt_logprobs=True)
    with model.engine(block_size=4, max_num_batched_tokens=24) as engine:
        for prompt, dense, output in zip(prompts, logits, engine.generate(prompts, params), strict=True):
            expected = dense[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
            assert output.prompt_logprobs is not None
            torch.testing.assert_close(torch.tensor(output.prompt_logprobs[1:]), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mistake_in_any_kind_of_layer_would_show(
    models: Any, references: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, model = references("each"), models("each")
    layer = f"layers.{MIXTURES['each'].index(kind)}.mixer"
    if kind == "mamba2":
        read = StateRound.read
        monkeypatch.setattr(StateRound, "read", lambda *args: {key: 0.9 * old for key, old in read(*args).items()})
    else:
        attend = AttentionLayer.__call__

        def turned(self: AttentionLayer, query: torch.Tensor, *rest: Any) -> torch.Tensor:
            return attend(self, query * 1.1 if self.spec.name == layer else query, *rest)

        monkeypatch.setattr(AttentionLayer, "__call__", turned)
        with pytest.raises(ModelError, match=f"from layer '{layer}' on"):
            model.engine(self_check=True)
    with model.engine() as engine:
        assert expected != served(engine)


# --- cached -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixture", few(2, MIXTURES))
def test_a_second_round_finds_the_prompts_of_the_first(models: Any, references: Any, mixture: str) -> None:
    expected = references(mixture)
    with models(mixture).engine(memory="16MiB", block_size=4, states={"checkpoints": "all"}) as engine:
        served(engine)
        before = engine.stats()
        assert expected == served(engine)
        after = engine.stats()
        # All full blocks of each prompt, except the one with the last token.
        hits = sum((len(prompt) - 1) // 4 * 4 for prompt in PROMPTS)
        assert hits == after.cached_prompt_tokens - before.cached_prompt_tokens
        computed = sum(map(len, PROMPTS)) - hits + sum(len(tokens) - 1 for tokens in expected)
        assert computed == after.computed_tokens - before.computed_tokens


def test_a_hit_ends_at_a_token_from_which_every_kind_of_layer_can_continue(models: Any, references: Any) -> None:
    expected = references("each")
    states = {"checkpoints": "all", "block_size": 12}
    with models("each").engine(block_size=4, states=states) as engine:
        served(engine)
        before = engine.stats()
        assert expected == served(engine)
        after = engine.stats()
        hits = sum((len(prompt) - 1) // 12 * 12 for prompt in PROMPTS)
        assert hits == after.cached_prompt_tokens - before.cached_prompt_tokens
        for new, old in zip(after.lookups, before.lookups, strict=True):
            assert hits == new.hit_tokens - old.hit_tokens
            # Blocks of windows and chunks are not kept at positions without a state, where no request can continue.
            goes_on = new.kind in ("full_attention", "mla")
            assert (hits < new.found_tokens - old.found_tokens) == goes_on, new.kind
        assert "mamba" == max(after.lookups, key=lambda lookups: lookups.times_limiting).kind


def test_a_shared_prefix_is_computed_once(models: Any) -> None:
    prefix = ids(11, 200)
    prompts = [[*prefix, *ids(12 + index, 20)] for index in range(3)]
    expected = [dense_tokens(models("each"), prompt, 3) for prompt in prompts]
    with models("each").engine(block_size=4, states={"checkpoints": "all"}, max_num_seqs=1) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=3))
        assert expected == [output.token_ids for output in outputs]
        assert 400 == engine.stats().cached_prompt_tokens
        assert 200 + 3 * (20 + 2) == engine.stats().computed_tokens


# --- preempted --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mixture", "prefix_caching", "host_memory"),
    few(2, cover_values(MIXTURES, product((True, False), (None, "4MiB")))),
)
def test_preempted_requests_give_the_same_tokens(
    models: Any, references: Any, mixture: str, prefix_caching: bool, host_memory: str | None
) -> None:
    expected = references(mixture)
    options: dict[str, Any] = {"max_model_len": 96, "max_num_batched_tokens": 12, "block_size": 5}
    options["states"] = {"checkpoints": "aligned" if prefix_caching else "none"}
    memory = models(mixture).tight_memory(75, **options) * 4 // 3
    options |= {"memory": memory, "max_num_seqs": 8, "host_memory": host_memory}
    with models(mixture).engine(prefix_caching=prefix_caching, **options) as engine:
        assert expected == served(engine)
        assert 0 < engine.stats().preemptions


# --- an encoder and a decoder with windows and cross-attention --------------------------------------------------------


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel.save(tmp_path_factory.mktemp("t5gemma"), "t5gemma")


@pytest.fixture(scope="module")
def translations(translator: TinyModel) -> Tokens:
    """The tokens of each prompt; each is computed by a dense forward of all tokens."""
    generated_tokens = []
    for prompt in encoder_prompts("t5gemma"):
        tokens = decoder_of(prompt)
        for _ in range(NUM_NEW_TOKENS):
            tokens.append(int(plain_logits(translator, "t5gemma", prompt.encoder, tokens)[-1].argmax()))
        generated_tokens.append(tuple(tokens[-NUM_NEW_TOKENS:]))
    return generated_tokens


def test_windows_full_and_cross_attention_have_a_group_each(translator: TinyModel) -> None:
    layers = translator.loaded.description.layers
    assert ["sliding_window", "cross_attention", "full_attention", "cross_attention"] * 2 == [
        layer.kind for layer in layers
    ]
    with translator.engine() as engine:
        assert {"sliding_window": 2, "cross_attention": 4, "full_attention": 2} == {
            group.spec.kind: len(group.layers) for group in engine.plan.groups
        }


@pytest.mark.parametrize(
    ("block_size", "chunk", "prefix_caching", "is_tight"),
    few(2, cover_pairs([(4, 12), (5, 7)], (True, False), (False, True))),
)
def test_a_decoder_with_windows_and_cross_attention_gives_the_tokens_of_its_dense_forward(
    translator: TinyModel,
    translations: Tokens,
    block_size: int,
    chunk: int,
    prefix_caching: bool,
    is_tight: bool,
) -> None:
    options: dict[str, Any] = {"block_size": block_size, "max_num_batched_tokens": chunk, "max_model_len": 96}
    if is_tight:
        options["memory"] = translator.tight_memory(65, {"encoder": 41}, **options)
    with translator.engine(prefix_caching=prefix_caching, max_num_seqs=8, self_check=True, **options) as engine:
        for _ in range(2):
            outputs = engine.generate(encoder_prompts("t5gemma"), GREEDY)
            assert translations == [output.token_ids for output in outputs]
            assert 0 == held_pages(engine)
        stats = engine.stats()
        assert is_tight == (stats.preemptions > 0)
        assert prefix_caching == (stats.cached_prompt_tokens > 0)
