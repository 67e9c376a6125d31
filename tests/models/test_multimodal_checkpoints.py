"""Checkpoints of models that also take pictures or sound serve text, and load only what text needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kvframe_transformers.adapter import TransformersAdapter
from kvframe_transformers.checkpoint import quiet
from kvframe_transformers.testing import spread_weights
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, Gemma3nConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nMultimodalEmbedder

from kvframe import Engine, Prompt, SamplingParams, Stack
from kvframe.contract import ModelError
from tests.covering import keep
from tests.models.census.compare import Verdict, compare
from tests.models.census.shrink import tiny_config
from tests.models.serving import GREEDY, ids

STACK = Stack.from_mapping({"cache": {"memory": "2MiB"}, "limits": {"max_num_batched_tokens": 64}})
IMAGES = [
    "llava",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "mistral3",
    "internvl",
    "idefics3",
    "smolvlm",
    "aya_vision",
    "glm4v",
    "gemma4_unified",
    "git",
]
SOUND = ["qwen2_audio", "voxtral"]


@pytest.mark.parametrize("family", keep(IMAGES, "qwen2_vl", "gemma4_unified"))
def test_its_tokens_are_those_of_generate(family: str) -> None:
    assert Verdict("equal") == compare("text with images", family)


@pytest.mark.parametrize("family", keep(SOUND, "qwen2_audio"))
def test_the_tokens_of_a_model_of_sound_are_those_of_generate(family: str) -> None:
    assert Verdict("equal") == compare("encoder-decoders", family)


def saved(path: Path, family: str) -> Any:
    """Save a tiny random model, and return it."""
    torch.manual_seed(0)
    with quiet():
        model = AutoModelForMultimodalLM.from_config(tiny_config(family), dtype=torch.float32).eval()
        spread_weights(model)
        model.save_pretrained(path)
    return model


@pytest.mark.parametrize(
    ("family", "towers"),
    [
        ("llava", ["model.vision_tower", "model.multi_modal_projector"]),
        ("qwen2_vl", ["model.visual"]),
        ("qwen2_audio", ["model.audio_tower", "model.multi_modal_projector"]),
    ],
)
def test_a_tower_takes_no_memory_and_its_weights_are_not_read(family: str, towers: list[str], tmp_path: Path) -> None:
    model = saved(tmp_path, family)
    num_weights = {name: weight.numel() for name, weight in model.named_parameters()}
    idle = sum(count for name, count in num_weights.items() if name.startswith(tuple(towers)))
    assert idle > 10_000
    # In the file, names are those of the whole model or older ones.
    words = {tower.rpartition(".")[2] for tower in towers}
    weights = load_file(tmp_path / "model.safetensors")
    text_weights = {name: weight for name, weight in weights.items() if words.isdisjoint(name.split("."))}
    assert len(text_weights) < len(weights)
    save_file(text_weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded: Any = TransformersAdapter().load(tmp_path, device="cpu", dtype="float32")
    assert sum(num_weights.values()) - idle == sum(weight.numel() for weight in loaded.model.parameters())
    with pytest.raises(ModelError, match=f"the part '{towers[0]}' was not loaded"):
        loaded.model.get_submodule(towers[0])()


@pytest.mark.parametrize("family", ["qwen3_vl", "glm4v"])
def test_a_model_in_memory_whose_text_config_names_no_end_is_served(family: str, tmp_path: Path) -> None:
    model = saved(tmp_path, family)
    input_ids = torch.tensor([ids(3, 24)])
    with torch.inference_mode():
        expected = model.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), do_sample=False, max_new_tokens=10
        )
    with Engine.from_model(model, stack=STACK) as engine:
        (output,) = engine.generate([Prompt(decoder=ids(3, 24))], GREEDY)
    assert tuple(expected[0, 24:].tolist()) == output.token_ids


def test_a_tower_of_a_library_that_is_not_installed_is_not_needed(tmp_path: Path) -> None:
    """Gemma 3n's vision tower needs timm, so that this checkpoint is made of its text model."""
    config = Gemma3nConfig(
        text_config=tiny_config("gemma3n_text").to_dict(),
        audio_config=tiny_config("gemma3n_audio").to_dict(),
        vision_config={"hidden_size": 64},
    )
    torch.manual_seed(0)
    text = AutoModelForCausalLM.from_config(config.text_config, dtype=torch.float32).eval()
    spread_weights(text)
    config.architectures = ["Gemma3nForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    weights = {
        name.replace("model.", "model.language_model.", 1): weight.clone() for name, weight in text.state_dict().items()
    }
    del weights["lm_head.weight"]  # it is tied
    # They run for text too.
    for name, others in {"model.embed_vision": config.vision_config, "model.embed_audio": config.audio_config}.items():
        with quiet():
            part = Gemma3nMultimodalEmbedder(others, config.text_config)
        weights |= {f"{name}.{key}": weight.clone() for key, weight in part.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    input_ids = torch.tensor([ids(3, 24)])
    with torch.inference_mode():
        expected = text.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), do_sample=False, max_new_tokens=10
        )
    with Engine.from_pretrained(tmp_path, stack=STACK) as engine:
        (output,) = engine.generate([ids(3, 24)], SamplingParams(max_new_tokens=10, ignore_eos=True))
    assert tuple(expected[0, 24:].tolist()) == output.token_ids
