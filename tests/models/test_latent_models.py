"""Models with latent attention: the tokens of ``generate()``, from a cache of latents, with all schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvframe_engine.requests.request import SamplingParams
from kvframe_mla.backend import MLABackend
from kvframe_mla.cost import Cost

from kvframe.contract.errors import ModelError
from tests.covering import cover_pairs, few
from tests.models.serving import GREEDY, PROMPTS, TinyModel, ids, served
from tests.support.engines import storage_of

FAMILIES = ("deepseek_v2", "deepseek_v3", "minicpm3")
LATENT, ROPE, LAYERS = 16, 8, 3


@pytest.mark.parametrize(
    ("family", "block_size", "chunk", "max_num_seqs", "prefix_caching"),
    few(3, cover_pairs(FAMILIES, [(1, 7, 3), (16, 24, 8), (17, 2048, 8), (5, 2048, 1), (4, 1, 8)], (True, False))),
)
def test_tokens_equal_those_of_generate(
    models: Any, references: Any, family: str, block_size: int, chunk: int, max_num_seqs: int, prefix_caching: bool
) -> None:
    expected = references(family)
    options = {"block_size": block_size, "max_num_batched_tokens": chunk, "max_num_seqs": max_num_seqs}
    with models(family).engine(prefix_caching=prefix_caching, **options) as engine:
        assert expected == served(engine)
        assert prefix_caching == (engine.stats().cached_prompt_tokens > 0)


@pytest.mark.parametrize(
    ("family", "prefix_caching", "host_memory"), few(2, cover_pairs(FAMILIES, (True, False), (None, "1MiB")))
)
def test_preempted_requests_give_the_same_tokens(
    models: Any, references: Any, family: str, prefix_caching: bool, host_memory: str | None
) -> None:
    expected = references(family)
    options: dict[str, Any] = {"max_model_len": 96, "max_num_batched_tokens": 12, "block_size": 5, "max_num_seqs": 8}
    memory = models(family).tight_memory(75, **options)
    options["host_memory"] = host_memory
    with models(family).engine(memory=memory, prefix_caching=prefix_caching, **options) as engine:
        assert expected == served(engine)
        assert 0 < engine.stats().preemptions


@pytest.mark.parametrize("family", few(2, FAMILIES))
def test_a_second_round_finds_the_prompts_of_the_first(models: Any, references: Any, family: str) -> None:
    expected = references(family)
    with models(family).engine(block_size=4) as engine:
        served(engine)
        before = engine.stats()
        assert expected == served(engine)
        hits = sum((len(prompt) - 1) // 4 * 4 for prompt in PROMPTS)
        assert hits == engine.stats().cached_prompt_tokens - before.cached_prompt_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_takes_its_latent_and_its_rotated_part_in_every_layer(models: Any, family: str) -> None:
    with models(family).engine(block_size=16) as engine:
        (group,) = engine.plan.groups
        assert (LAYERS, LAYERS * (LATENT + ROPE) * 4) == (len(group.layers), group.page_bytes // 16)
        (shape,) = {tuple(tensor.shape[1:]) for views in storage_of(engine).views.values() for tensor in views.values()}
        assert (16, LATENT + ROPE) == shape


def test_both_forms_of_attention_run(models: Any, references: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forms: set[bool] = set()
    absorbs = Cost.absorbs

    def noting(self: Cost, *lengths: Any) -> Any:
        result = absorbs(self, *lengths)
        forms.update(result.tolist())
        return result

    monkeypatch.setattr(Cost, "absorbs", noting)
    expected = references("deepseek_v3")
    with models("deepseek_v3").engine(block_size=4) as engine:
        assert expected == served(engine)
    assert {True, False} == forms


def test_a_long_request_is_served_beside_others(models: Any) -> None:
    model, prompts = models("deepseek_v3"), [ids(9, 300), ids(1, 20)]
    expected = [model.reference(prompt, 40) for prompt in prompts]
    with model.engine(block_size=16, max_num_batched_tokens=64) as engine:
        assert expected == [output.token_ids for output in engine.generate(prompts, SamplingParams(max_new_tokens=40))]


def test_a_cache_in_bfloat16_serves_a_model_in_float32(models: Any) -> None:
    with models("deepseek_v3").engine(dtype="bfloat16") as engine:
        (group,) = engine.plan.groups
        assert LAYERS * (LATENT + ROPE) * 2 == group.page_bytes // group.spec.block_size
        assert 10 == len(engine.generate([PROMPTS[3]], GREEDY)[0].token_ids)


# --- what the adapter does to the model -------------------------------------------------------------------------------


def latent_module(model: TinyModel) -> Any:
    loaded: Any = model.loaded
    return loaded.model.model.layers[1].self_attn


def test_every_module_has_its_own_expansion_between_steps(models: Any, references: Any) -> None:
    model = models("deepseek_v3")
    module = latent_module(model)
    with model.engine(self_check=True):
        assert "expand_kv" not in vars(module)
        assert references("deepseek_v3")[1] == model.reference(PROMPTS[1])


def test_an_up_projection_with_a_bias_is_refused(models: Any, references: Any) -> None:
    model = models("deepseek_v3")
    module = latent_module(model)
    module.kv_b_proj.bias = torch.nn.Parameter(torch.ones(len(module.kv_b_proj.weight)))
    try:
        with pytest.raises(ModelError, match=r"'model.layers.1.self_attn' .* by the weights of kv_b_proj alone"):
            model.engine()
    finally:
        module.kv_b_proj.bias = None
    assert "expand_kv" not in vars(module)
    assert references("deepseek_v3")[1] == model.reference(PROMPTS[1])


def test_wrong_latents_are_found_by_the_self_check(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write_kv = MLABackend.write_kv

    def without_rotation(self: MLABackend, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> None:
        write_kv(self, key, torch.zeros_like(value), *rest)

    monkeypatch.setattr(MLABackend, "write_kv", without_rotation)
    with pytest.raises(ModelError, match=r"other logits in a packed batch than alone, from layer 'model.layers.0\."):
        models("deepseek_v3").engine(self_check=True)
