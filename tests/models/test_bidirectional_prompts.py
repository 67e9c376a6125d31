"""Models whose prompts see themselves in both directions, as PaliGemma's: every request's prompt is one range."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from kvframe_transformers.adapter import TransformersAdapter
from kvframe_transformers.checkpoint import quiet
from kvframe_transformers.testing import spread_weights
from transformers import AutoModelForImageTextToText, Gemma2Config, GemmaConfig, GenerationConfig, PaliGemmaConfig

from kvframe import Embedder, Engine, SamplingParams, Stack
from kvframe.contract import KVFrameError, ModelDescription, ModelError, RequestError
from tests.models.serving import ids
from tests.stacks import tables_of
from tests.support.engines import runner_of

NUM_NEW, WINDOW = 6, 32
PROMPTS = [ids(1, 3), ids(2, 21), ids(3, 10), ids(4, 1), ids(2, 21), [*ids(2, 21), *ids(5, 8)]]
GREEDY = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True)
_TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
_VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
TEXTS = {
    "paligemma": GemmaConfig(**_TEXT),
    "paligemma 2": Gemma2Config(**_TEXT, sliding_window=WINDOW, query_pre_attn_scalar=16),
}


@pytest.fixture(scope="module", params=TEXTS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("model") / request.param
    config = PaliGemmaConfig(
        text_config=TEXTS[request.param].to_dict(), vision_config=_VISION, projection_dim=64, image_token_index=127
    )
    torch.manual_seed(0)
    with quiet():
        model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
        spread_weights(model, 4.0)
        model.generation_config = GenerationConfig(max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0)
        model.save_pretrained(path)
    return path, model


def generated(model: Any, prompt: list[int]) -> tuple[int, ...]:
    """Return what ``generate`` adds to a prompt that is all prefix, as its processor makes it."""
    inputs = torch.tensor([prompt])
    types, mask = torch.zeros_like(inputs), torch.ones_like(inputs)
    with quiet():
        tokens = model.generate(input_ids=inputs, attention_mask=mask, token_type_ids=types)
    return tuple(tokens[0, len(prompt) :].tolist())


def make_stack(path: Path, **options: Any) -> Stack:
    usual = {"memory": "1MiB", "block_size": 4, "max_num_batched_tokens": 64, "max_model_len": 64}
    return Stack.from_mapping(tables_of(**{**usual, **options}))


@pytest.mark.parametrize("backend", ["torch", "cpu", "torch_reference"])
def test_tokens_are_those_of_generate_at_first_and_again(saved: tuple[Path, Any], backend: str) -> None:
    path, model = saved
    expected = [generated(model, prompt) for prompt in PROMPTS]
    stack = Stack.from_mapping(
        {
            "cache": {"memory": "1MiB", "block_size": 4},
            "limits": {"max_num_batched_tokens": 64, "max_model_len": 64},
            "rules": [{"layers": "*", "backend": backend}],
        }
    )
    with Engine.from_pretrained(path, stack=stack) as engine:
        for _ in range(2):
            assert expected == [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]


def test_a_model_in_memory_is_served_likewise(saved: tuple[Path, Any]) -> None:
    path, model = saved
    expected = [generated(model, prompt) for prompt in PROMPTS[:3]]
    with Engine.from_model(model, stack=make_stack(path)) as engine:
        assert expected == [output.token_ids for output in engine.generate(PROMPTS[:3], GREEDY)]


def test_samples_preempted_requests_drafts_and_steps_from_graphs_are_those_of_generate(saved: tuple[Path, Any]) -> None:
    path, model = saved
    prompts = [[*range(3 + index, 31 + index)] for index in range(5)]
    expected = [generated(model, prompt) for prompt in prompts]
    tables: dict[str, Any]
    tables = {
        "cache": {"memory": "160KiB", "block_size": 4, "audit": True},
        "limits": {"max_num_batched_tokens": 32, "max_model_len": 64},
    }
    with Engine.from_pretrained(path, stack=Stack.from_mapping(tables)) as engine:
        assert expected == [output.token_ids for output in engine.generate(prompts, GREEDY)]
        assert engine.stats().preemptions > 0
    with Engine.from_pretrained(path, stack=make_stack(path, drafts="ngram")) as engine:
        outputs = engine.generate(prompts[:1], attrs.evolve(GREEDY, n=2))
        assert [expected[0]] * 2 == [output.token_ids for output in outputs]
    tables = {
        "cache": {"memory": "1MiB", "block_size": 4},
        "limits": {"max_num_batched_tokens": 64, "max_model_len": 64},
        "model": {"graphs": [1, 4], "graph_query_lens": [1, 32]},
        "rules": [{"layers": "*", "backend": "cpu"}],
    }
    with Engine.from_pretrained(path, stack=Stack.from_mapping(tables)) as engine:
        runner: Any = runner_of(engine)
        for prompt, tokens in zip(PROMPTS[:3], [generated(model, prompt) for prompt in PROMPTS[:3]], strict=True):
            assert tokens == engine.generate([prompt], GREEDY)[0].token_ids
        assert {True, False} == {sizes.has_ranges for sizes in runner.graphs._graphs}
        assert set() == runner.graphs._reasons


def test_no_prefix_is_cached_because_its_state_depends_on_the_whole_prompt(saved: tuple[Path, Any]) -> None:
    path, _ = saved
    with Engine.from_pretrained(path, stack=make_stack(path)) as engine:
        lookups = [engine.generate([ids(2, 24)], GREEDY)[0].cached for _ in range(2)]
        assert [0, 0] == [cached.num_tokens for cached in lookups if cached is not None]
        with pytest.raises(RequestError, match="the tokens of its prompts see each other in both directions") as caught:
            engine.pin_prefix(ids(2, 24))
    assert "no_prefix_caching" == caught.value.code


def test_its_hidden_states_are_embedded_alike(saved: tuple[Path, Any]) -> None:
    path, model = saved
    with torch.inference_mode(), quiet():
        states = [
            model.model(torch.tensor([prompt]), token_type_ids=torch.zeros(1, len(prompt), dtype=torch.int64))
            for prompt in PROMPTS
        ]
    expected = torch.stack([state.last_hidden_state[0].mean(0) for state in states])
    with Embedder.from_pretrained(path, stack=make_stack(path), pooling="mean", normalize=False) as embedder:
        embeddings = torch.tensor([output.embedding for output in embedder.embed(PROMPTS)])
    torch.testing.assert_close(embeddings, expected, rtol=0, atol=1e-3 * float(expected.abs().max()))


def test_a_prompt_that_exceeds_a_step_or_a_window_is_refused(saved: tuple[Path, Any]) -> None:
    path, _ = saved
    with Engine.from_pretrained(path, stack=make_stack(path, max_num_batched_tokens=40)) as engine:
        fits, too_long = engine.generate([ids(1, WINDOW), ids(1, 45)], GREEDY)
    assert (NUM_NEW, "refused") == (len(fits.token_ids), too_long.finish_reason)
    assert too_long.error is not None
    assert "computes a prompt in one step, which has at most 40" in too_long.error


def test_a_prompt_one_token_longer_than_a_window_is_refused(saved: tuple[Path, Any]) -> None:
    path, model = saved
    prompt = ids(1, WINDOW + 1)
    with Engine.from_pretrained(path, stack=make_stack(path)) as engine:
        if path.name == "paligemma 2":
            with pytest.raises(RequestError, match=f"the prompt has {WINDOW + 1} tokens"):
                engine.generate([prompt], GREEDY)
        else:
            assert generated(model, prompt) == engine.generate([prompt], GREEDY)[0].token_ids


@pytest.mark.parametrize("saved", ["paligemma"], indirect=True)
def test_a_description_without_it_is_found_by_the_self_check(
    saved: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = saved
    describe = TransformersAdapter.describe

    def forgetful(self: Any, folder: Path) -> ModelDescription:
        return attrs.evolve(describe(self, folder), bidirectional_prompts=False)

    assert TransformersAdapter().describe(path).bidirectional_prompts
    monkeypatch.setattr(TransformersAdapter, "describe", forgetful)
    monkeypatch.setattr("kvframe_transformers.adapter.sees_whole_prompts", lambda *_: False)
    with pytest.raises(ModelError, match="gives other logits in a packed batch than alone"):
        Engine.from_pretrained(path, stack=make_stack(path))


def test_a_backend_that_honours_no_ranges_is_refused_at_the_start(
    saved: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvframe_torch.backend import TorchBackend

    path, _ = saved
    capabilities = TorchBackend.capabilities
    monkeypatch.setattr(TorchBackend, "capabilities", attrs.evolve(capabilities, masks=capabilities.masks - {"ranges"}))
    stack = Stack.from_mapping({"cache": {"memory": "1MiB"}, "rules": [{"layers": "*", "backend": "torch"}]})
    with pytest.raises(KVFrameError, match="does not honour bidirectional ranges, and every prompt of"):
        Engine.from_pretrained(path, stack=stack)
