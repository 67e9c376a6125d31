"""The layer files of published models agree with transformers' models of the published configs, and waste nothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import transformers

from kvframe.config.stack import Stack
from kvframe.contract.description import ModelDescription
from kvframe.contract.specs import KVCacheSpec, QuerySpec
from kvframe.loading.plugins import load_plugins
from kvframe.loading.registry import Registry
from kvframe.planning.layer_file import read_layer_file
from kvframe.planning.layer_specs import make_layer_specs
from kvframe.planning.recognise import describe_model
from tests.covering import few
from tests.support.commands import run, run_json

LAYER_FILES = Path(__file__).resolve().parents[2] / "examples" / "layers"
PUBLISHED = tuple(path.name for path in sorted(LAYER_FILES.iterdir()) if path.name != "shared_caches.toml")

# The published sizes that differ from transformers' defaults.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_3_1_8b.toml": (
        "Llama",
        {"num_key_value_heads": 8, "intermediate_size": 14336, "max_position_embeddings": 131072},
    ),
    "gemma_3_27b.json": (
        "Gemma3Text",
        {
            "num_hidden_layers": 62,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "sliding_window": 1024,
            "query_pre_attn_scalar": 168,
        },
    ),
    "gemma_3n_e4b.toml": ("Gemma3nText", {}),
    "llama_4_scout.toml": ("Llama4Text", {"max_position_embeddings": 10485760}),
    "gpt_oss_20b.toml": ("GptOss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "deepseek_v3.toml": (
        "DeepseekV3",
        {
            "max_position_embeddings": 163840,
            "rope_scaling": {
                "type": "yarn",
                "factor": 40,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "qwen3_next_80b.toml": ("Qwen3Next", {"max_position_embeddings": 262144}),
    "jamba_mini.toml": ("Jamba", {}),
    "falcon_h1_7b.toml": (
        "FalconH1",
        {
            "num_hidden_layers": 44,
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_d_ssm": 3072,
            "mamba_n_heads": 24,
            "mamba_d_head": 128,
            "mamba_d_state": 256,
            "max_position_embeddings": 262144,
        },
    ),
    "whisper_large_v3.toml": (
        "Whisper",
        {
            "d_model": 1280,
            "encoder_layers": 32,
            "decoder_layers": 32,
            "encoder_attention_heads": 20,
            "decoder_attention_heads": 20,
            "num_mel_bins": 128,
        },
    ),
}
MODELS = {"Gemma3Text": "Gemma3", "Gemma3nText": "Gemma3n", "Llama4Text": "Llama4"}
HEADS = {"Whisper": "ConditionalGeneration"}


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_plugins().registry


def kinds_of_layers(
    description: ModelDescription, registry: Registry, *, with_query: bool
) -> Counter[tuple[KVCacheSpec | None, bool, QuerySpec | None]]:
    """Return the kinds of caches that layers keep or share, with the number of layers of each."""
    layers = make_layer_specs(description, registry, Stack(), "bfloat16")
    return Counter((layer.spec, layer.shares_with is None, layer.query if with_query else None) for layer in layers)


@pytest.mark.parametrize("file", few(5, CONFIGS))
def test_a_layer_file_equals_the_layers_of_the_published_config(file: str, tmp_path: Path, registry: Registry) -> None:
    name, options = CONFIGS[file]
    config = getattr(transformers, f"{name}Config")(**options)
    config.architectures = [f"{MODELS.get(name, name)}For{HEADS.get(name, 'CausalLM')}"]
    config.save_pretrained(tmp_path)
    expected, layer_file = describe_model(tmp_path / "config.json", registry), read_layer_file(LAYER_FILES / file)
    # Gemma 3's layer file has no query sides, because planning does not need them.
    expected_layers, found_layers = (
        kinds_of_layers(description, registry, with_query=file != "gemma_3_27b.json")
        for description in (expected, layer_file)
    )
    assert expected_layers == found_layers
    assert (expected.max_model_len, expected.max_input_lens) == (layer_file.max_model_len, layer_file.max_input_lens)


@pytest.mark.parametrize("file", PUBLISHED)
def test_a_published_model_is_planned_and_wastes_next_to_nothing(file: str) -> None:
    arguments = ["plan", str(LAYER_FILES / file), "--cache-memory", "80GB", "--dtype", "bfloat16"]
    plan = run_json(*arguments)
    assert plan["waste_fraction"] <= 0.01
    assert plan["total_bytes"] >= 0.99 * 80e9
    assert plan["max_concurrency"] >= (0 if file == "llama_4_scout.toml" else 4)
    assert 0 == run(*arguments).exit_code
