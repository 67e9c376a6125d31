"""The models that are measured: the demo's trained hybrid, a larger random Llama, and a tiny one to try the script."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache"


def demo() -> Path:
    """Return the demo's model, trained now if it is not there: 4 layers, every second with a window of 32 tokens."""
    sys.path.insert(0, str(ROOT / "examples" / "demo"))
    from make_model import make_model

    path: Path = make_model().path
    return path


def llama() -> Path:
    """Return a random Llama of 32 million parameters."""
    return _llama("bench-llama-32m", vocab_size=8192, hidden_size=512, intermediate_size=1408, num_hidden_layers=8)


def tiny() -> Path:
    """Return a random Llama of two small layers."""
    return _llama("bench-llama-tiny", vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2)


def _llama(name: str, **sizes: int) -> Path:
    path = CACHE / name
    if not (path / "config.json").exists():
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
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            LlamaForCausalLM(config).save_pretrained(path)
    return path
