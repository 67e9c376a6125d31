"""Make the measured models: the demo's trained hybrid, random models of other kinds, and tiny ones to try scripts."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    Gemma3ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.utils import logging

from benchmarks.harness.demo import DEMO, demo_path
from benchmarks.harness.edit_model import save_edit_model
from benchmarks.harness.machine import ROOT

YOCO = ROOT / "examples" / "yoco"
WITHOUT_END: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


def silence_transformers() -> None:
    """Let transformers print no progress and no warnings."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def path_of(name: str) -> Path:
    """Return the folder of the demo's model or of a random one; make the model if it is missing."""
    if name == "demo":
        return demo_path()
    path = ROOT / ".cache" / name
    if not (path / "config.json").exists():
        save_random(name, path)
    return path


def save_random(name: str, path: Path, dtype: torch.dtype = torch.float32) -> None:
    """Draw a random model from a fixed seed, on torch's default device, and save it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            RANDOM[name](path)
    finally:
        torch.set_default_dtype(before)


def plugins_of(name: str) -> Sequence[ModuleType]:
    """Return the manifest modules of plugins that a model needs and that are not installed."""
    if "yoco" not in name:
        return ()
    sys.path.insert(0, str(YOCO))
    import yoco_plugin

    return (yoco_plugin,)


def demo_copy_task() -> tuple[Callable[[torch.Generator], torch.Tensor], int]:
    """Return the function that draws a copy task of the demo's training, and the number of tokens of an answer."""
    sys.path.insert(0, str(DEMO))
    from make_model import SEGMENT_TOKENS, copy_task

    return copy_task, SEGMENT_TOKENS + 1


def _llama(
    path: Path,
    vocab_size: int,
    hidden: int,
    mlp: int,
    layers: int,
    heads: int = 8,
    kv_heads: int = 4,
    longest: int = 2048,
) -> None:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=longest,
        initializer_range=0.05,
        tie_word_embeddings=False,
        dtype=torch.get_default_dtype(),
        **WITHOUT_END,
    )
    LlamaForCausalLM(config).save_pretrained(path)


def _gemma3(path: Path, types: str, window: int, **sizes: int) -> None:
    small = {
        "vocab_size": 256,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    config = Gemma3TextConfig(
        num_hidden_layers=len(types),
        layer_types=["sliding_attention" if kind == "w" else "full_attention" for kind in types],
        sliding_window=window,
        max_position_embeddings=2048,
        initializer_range=0.1,
        dtype=torch.get_default_dtype(),
        **{**small, **sizes},
        **WITHOUT_END,
    )
    Gemma3ForCausalLM(config).save_pretrained(path)


def _bamba(
    path: Path, layers: int, attention: Sequence[int], vocab_size: int, hidden: int, mlp: int, heads: int
) -> None:
    config = BambaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        attn_layer_indices=[*attention],
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        mamba_n_heads=2 * heads,
        mamba_d_head=hidden // heads,
        mamba_d_state=128 if hidden >= 1024 else 16,
        max_position_embeddings=2048,
        initializer_range=0.05,
        dtype=torch.get_default_dtype(),
        **WITHOUT_END,
    )
    BambaForCausalLM(config).save_pretrained(path)


def _gemma3n(path: Path, types: str, shared: int, window: int, hidden: int, mlp: int, vocab_size: int) -> None:
    config = Gemma3nTextConfig(
        num_hidden_layers=len(types),
        layer_types=["sliding_attention" if kind == "w" else "full_attention" for kind in types],
        num_kv_shared_layers=shared,
        sliding_window=window,
        hidden_size=hidden,
        intermediate_size=[mlp] * len(types),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        vocab_size=vocab_size,
        vocab_size_per_layer_input=vocab_size,
        hidden_size_per_layer_input=32,
        laurel_rank=16,
        activation_sparsity_pattern=[0.0] * len(types),
        max_position_embeddings=16384,
        initializer_range=0.1,
        **WITHOUT_END,
    )
    Gemma3nForCausalLM(config).save_pretrained(path)


def _demo_deep(path: Path) -> None:
    """Save the demo's model with 20 further layers, whose outputs are zero: it computes the same tokens."""
    small = Gemma3ForCausalLM.from_pretrained(demo_path())
    settings = small.config.to_dict()
    settings["layer_types"] = [*settings["layer_types"], *["sliding_attention"] * 20]
    settings["num_hidden_layers"] = len(settings["layer_types"])
    deep = Gemma3ForCausalLM(Gemma3TextConfig(**settings))
    deep.load_state_dict(small.state_dict(), strict=False)
    for layer in deep.model.layers[small.config.num_hidden_layers :]:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    deep.save_pretrained(path)
    for file in demo_path().glob("tokenizer*"):
        shutil.copy(file, path)


def _yoco(path: Path, **sizes: int) -> None:
    sys.path.insert(0, str(YOCO))
    from yoco_adapter import save_checkpoint
    from yoco_model import YocoConfig, make_random

    save_checkpoint(make_random(YocoConfig(**sizes)), path)


RANDOM: Mapping[str, Callable[[Path], None]] = {
    "bench-demo-deep": _demo_deep,
    "bench-demo-edit": save_edit_model,
    "bench-llama-tiny": partial(_llama, vocab_size=256, hidden=64, mlp=128, layers=2),
    # Heads of 32, the smallest that vLLM's attention on a CPU takes.
    "bench-llama-small": partial(_llama, vocab_size=256, hidden=128, mlp=256, layers=2, heads=4, kv_heads=2),
    "bench-gemma3-small": partial(_gemma3, types="wwwf", window=32),
    # 32 and 105 million parameters, and a fourth of the layers of Llama 3 with 8 billion.
    "bench-llama-32m": partial(_llama, vocab_size=8192, hidden=512, mlp=1408, layers=8),
    "bench-llama-100m": partial(_llama, vocab_size=16384, hidden=768, mlp=2048, layers=12),
    "bench-llama-8b": partial(
        _llama, vocab_size=32768, hidden=4096, mlp=14336, layers=8, heads=32, kv_heads=8, longest=4096
    ),
    # The sizes of Llama 3.2 and Gemma 3 with a billion parameters, and a hybrid of states and attention of that size.
    "bench-llama-1b": partial(_llama, vocab_size=32768, hidden=2048, mlp=8192, layers=16, heads=32, kv_heads=8),
    "bench-gemma3-1b": partial(
        _gemma3,
        types=(5 * "w" + "f") * 4 + "ww",
        window=512,
        vocab_size=32768,
        hidden_size=1152,
        intermediate_size=6912,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
    ),
    "bench-bamba-1b": partial(
        _bamba, layers=24, attention=(5, 11, 17, 23), vocab_size=32768, hidden=2048, mlp=8192, heads=32
    ),
    "bench-bamba-tiny": partial(_bamba, layers=3, attention=(1,), vocab_size=256, hidden=64, mlp=128, heads=4),
    # The last layers share the keys and values of earlier ones; w is a layer with a window, f one without.
    "bench-gemma3n": partial(_gemma3n, types=2 * "wwwwf", shared=4, window=512, hidden=128, mlp=512, vocab_size=1024),
    "bench-gemma3n-tiny": partial(_gemma3n, types=3 * "wf", shared=2, window=16, hidden=64, mlp=96, vocab_size=128),
    # The tiny one is the one that examples/yoco runs.
    "bench-yoco": partial(
        _yoco,
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=512,
        num_self_layers=6,
        num_cross_layers=6,
        head_size=32,
        window=512,
        max_model_len=16384,
    ),
    "bench-yoco-tiny": _yoco,
}
"""By name, the function that saves a random model into a folder."""
