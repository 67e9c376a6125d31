"""Running vLLM for tests: small random models, prompts, and a script in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).with_name("serve_offline.py")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"num_hidden_layers": 2},
    "Mistral": {"num_hidden_layers": 2, "sliding_window": 48},
    "Gemma3Text": {
        "num_hidden_layers": 3,
        "sliding_window": 40,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 32,
    },
}
ENGINE = {"max_model_len": 256, "block_size": 32, "max_num_batched_tokens": 96, "max_num_seqs": 64}
STACK = '[[rules]]\nlayers = "*"\nbackend = "torch"\n'


def make_model(family: str, folder: Path) -> Path:
    """Save a random model, with weights so large that its attention is far from uniform."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**SIZES, **MODELS[family])
    model_class = (
        transformers.Gemma3ForCausalLM if family == "Gemma3Text" else getattr(transformers, f"{family}ForCausalLM")
    )
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(6)
    model.save_pretrained(folder)
    return folder


def make_prompts(num: int) -> list[list[int]]:
    """Return prompts of 5 to 200 tokens; half of them begin with the same 100 tokens."""
    draw = torch.Generator().manual_seed(1)

    def tokens(num: int) -> list[int]:
        return torch.randint(1, 256, (num,), generator=draw).tolist()

    shared = tokens(100)
    return [(shared if index % 2 else []) + tokens(5 + index * 37 % 95) for index in range(num)]


def start(
    model: Path, settings: dict[str, Any], stack: str | None, plugins: list[Path] | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the script on a model, with a stack or on vLLM's own backend, with further modules and variables."""
    environment = {
        **{key: value for key, value in os.environ.items() if key != "KVFRAME_STACK"},
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    if plugins is not None:
        environment["PYTHONPATH"] = os.pathsep.join(map(str, plugins))
    if stack is not None:
        path = model.parent / "stack.toml"
        path.write_text(stack, encoding="utf-8")
        environment["KVFRAME_STACK"] = str(path)
    command = [sys.executable, str(SCRIPT), str(model), json.dumps(settings)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


def serve(
    model: Path, settings: dict[str, Any], stack: str | None, plugins: list[Path] | None = None, **variables: str
) -> dict[str, Any]:
    """Return what the script reports."""
    done = start(model, settings, stack, plugins, **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


class Vllm:
    """What the tests run vLLM with."""

    engine = ENGINE
    stack = STACK
    make_prompts = staticmethod(make_prompts)
    start = staticmethod(start)
    serve = staticmethod(serve)

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make_model(self, family: str) -> Path:
        return make_model(family, self.folder / family)


@pytest.fixture(scope="session")
def vllm_runs(tmp_path_factory: pytest.TempPathFactory) -> Vllm:
    """Return what starts vLLM, with a folder for models."""
    return Vllm(tmp_path_factory.mktemp("vllm"))
