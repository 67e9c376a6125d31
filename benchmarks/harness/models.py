"""The models that are measured: the demo's trained hybrid, random ones of other kinds, tiny ones to try the scripts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from benchmarks.harness.machine import ROOT

CACHE = ROOT / ".cache"


def silence_transformers() -> None:
    """Let transformers print no progress and no warnings."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def demo() -> Path:
    """Return the demo's model, trained now if it is not there: 4 layers, every second with a window of 32 tokens."""
    sys.path.insert(0, str(ROOT / "examples" / "demo"))
    from make_model import make_model

    path: Path = make_model().path
    return path


def demo_copy_task() -> tuple[Callable[[torch.Generator], torch.Tensor], int]:
    """Return what draws a copy task of the demo's training, and how many of its last tokens are the answer."""
    sys.path.insert(0, str(ROOT / "examples" / "demo"))
    from make_model import SEGMENT_TOKENS, copy_task

    return copy_task, SEGMENT_TOKENS + 1


def llama() -> Path:
    """Return a random Llama of 32 million parameters."""
    return _llama("bench-llama-32m", vocab_size=8192, hidden_size=512, intermediate_size=1408, num_hidden_layers=8)


def llama_100m() -> Path:
    """Return a random Llama of 105 million parameters."""
    sizes = {"vocab_size": 16384, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12}
    return _llama("bench-llama-100m", **sizes)


def tiny() -> Path:
    """Return a random Llama of two small layers."""
    return _llama("bench-llama-tiny", vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2)


def gemma3n() -> Path:
    """Return a random Gemma 3n of 10 layers, the last 4 of which share the keys and values of earlier ones."""
    sizes = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": [512] * 10, "sliding_window": 512}
    return _gemma3n(
        "bench-gemma3n",
        num_kv_shared_layers=4,
        layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 2,
        **sizes,
    )


def tiny_gemma3n() -> Path:
    """Return a random Gemma 3n of 6 small layers, the last 2 of which share."""
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": [96] * 6, "sliding_window": 16}
    return _gemma3n(
        "bench-gemma3n-tiny", num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 3, **sizes
    )


def yoco() -> Path:
    """Return a random model of examples/yoco: 6 layers of its self-decoder, 6 of its cross-decoder."""
    return _yoco(
        "bench-yoco",
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=512,
        num_self_layers=6,
        num_cross_layers=6,
        head_size=32,
        window=512,
        max_model_len=16384,
    )


def tiny_yoco() -> Path:
    """Return the model that examples/yoco runs."""
    return _yoco("bench-yoco-tiny")


def yoco_plugins() -> Sequence[ModuleType]:
    """Return the manifest modules that the models of examples/yoco need."""
    import yoco_plugin

    return (yoco_plugin,)


def _gemma3n(name: str, layer_types: list[str], **sizes: Any) -> Path:
    def save(path: Path) -> None:
        config = Gemma3nTextConfig(
            num_hidden_layers=len(layer_types),
            layer_types=layer_types,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=sizes["hidden_size"] // 4,
            vocab_size_per_layer_input=sizes["vocab_size"],
            hidden_size_per_layer_input=32,
            laurel_rank=16,
            activation_sparsity_pattern=[0.0] * len(layer_types),
            max_position_embeddings=16384,
            initializer_range=0.1,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
            **sizes,
        )
        Gemma3nForCausalLM(config).save_pretrained(path)

    return _made(name, save)


def _yoco(name: str, **sizes: int) -> Path:
    sys.path.insert(0, str(ROOT / "examples" / "yoco"))
    from yoco_adapter import save_checkpoint
    from yoco_model import YocoConfig, make_random

    return _made(name, lambda path: save_checkpoint(make_random(YocoConfig(**sizes)), path))


def _made(name: str, save: Callable[[Path], None]) -> Path:
    """Return a model's folder, saved now with a fixed seed if it is not there."""
    path = CACHE / name
    if not (path / "config.json").exists():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            save(path)
    return path


def _llama(name: str, **sizes: int) -> Path:
    def save(path: Path) -> None:
        config = LlamaConfig(
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=2048,
            initializer_range=0.05,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
            tie_word_embeddings=False,
            **sizes,
        )
        LlamaForCausalLM(config).save_pretrained(path)

    return _made(name, save)
