"""Tiny models that choose their past by content, in float64: no choice then depends on how sums are rounded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from kvframe_transformers.testing import spread_weights

from kvframe import load_plugins
from kvframe.planning.recognise import find_adapter
from tests.models.census.shrink import tiny_config
from tests.models.serving import TinyModel

FAMILIES: Mapping[str, str] = {
    "axk2": "AutoModelForCausalLM",
    "deepseek_v32": "AutoModelForCausalLM",
    "deepseek_v4": "AutoModelForCausalLM",
    "dots3_note_text": "AutoModelForCausalLM",
    "glm5_next": "AutoModelForImageTextToText",
    "glm_moe_dsa": "AutoModelForCausalLM",
    "hy_v4": "AutoModelForCausalLM",
    "minimax_m3_vl_text": "AutoModelForCausalLM",
    "mistral_large4": "AutoModelForImageTextToText",
    "qwen4_exp_text": "AutoModelForCausalLM",
}
"""The families whose attention chooses by content, each with transformers' class that makes its models."""

_SEEDS = {"hy_v4": 3}
"""Other seeds than 0: with that one, two tokens of the family are as close as the rounding of its float32 parts."""


def save(path: Path, family: str) -> TinyModel:
    """Save and load a tiny random model of one of ``FAMILIES``; skip the test if this transformers does not have it."""
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    config = tiny_config(family)
    for part in (config, config.get_text_config()):
        part.eos_token_id = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEEDS.get(family, 0))
        model: Any = getattr(transformers, FAMILIES[family]).from_config(config, dtype=torch.float32).eval()
        spread_weights(model)
    model.generation_config.pad_token_id = 0
    model.save_pretrained(path)
    registry = load_plugins().registry
    loaded: Any = find_adapter(path, registry).load(path, device="cpu", dtype="float64")
    loaded.model.set_experts_implementation("eager")  # the other implementations take no float64
    return TinyModel(path, loaded, registry, dtype="float64")
