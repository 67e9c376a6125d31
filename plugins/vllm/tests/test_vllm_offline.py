"""Small random models in vLLM, offline and in one process: on kvframe's layers, and on vLLM's own.

``make vllm`` runs these in an environment that has vLLM. Others skip them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make vllm"),
    pytest.mark.filterwarnings("ignore"),
]

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


def start(model: Path, settings: dict[str, Any], stack: str | None) -> subprocess.CompletedProcess[str]:
    """Run the script on a model, with a stack or on vLLM's own backend."""
    environment = {
        **{key: value for key, value in os.environ.items() if key != "KVFRAME_STACK"},
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    if stack is not None:
        path = model.parent / "stack.toml"
        path.write_text(stack, encoding="utf-8")
        environment["KVFRAME_STACK"] = str(path)
    command = [sys.executable, str(SCRIPT), str(model), json.dumps(settings)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


def serve(model: Path, settings: dict[str, Any], stack: str | None) -> dict[str, Any]:
    """Return what the script reports."""
    done = start(model, settings, stack)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


@pytest.mark.parametrize("family", MODELS)
def test_tokens_equal_those_of_vllms_own_backend(family: str, tmp_path: Path) -> None:
    model = make_model(family, tmp_path / "model")
    settings = {"engine": ENGINE, "prompts": make_prompts(64), "max_tokens": 12}
    own, hosted = serve(model, settings, None), serve(model, settings, STACK)

    assert own["tokens"] == hosted["tokens"]
    # Prefixes were found. Of windows, vLLM caches only those at the end of a prompt.
    assert max(sum(own["cached"]), 1000) <= sum(hosted["cached"])
    # Every layer ran here in every step, and nothing was copied on the way.
    assert ["HostedImpl"] == hosted["impls"]
    assert ["LiveBlockManager"] == hosted["managers"]
    num_steps = set(hosted["calls"]["attend"].values())
    assert len(num_steps) == 1
    num_computed = sum(map(len, settings["prompts"])) - sum(hosted["cached"])
    assert min(num_steps) >= num_computed // ENGINE["max_num_batched_tokens"] > 30
    assert hosted["layers"] == sorted(hosted["calls"]["attend"]) == sorted(hosted["calls"]["write"])
    assert {"pages": 0, "output": 0} == hosted["copies"]
    assert 0 == hosted["held_blocks"]
    # The control: without a stack kvframe computes nothing.
    assert {"write": {}, "attend": {}} == own["calls"]
    assert "HostedImpl" not in own["impls"]


def test_a_layer_that_stayed_on_vllms_own_backend_ends_the_start(tmp_path: Path) -> None:
    model = make_model("Llama", tmp_path / "model")
    settings = {"engine": ENGINE, "prompts": [[1, 2, 3]], "max_tokens": 1, "foreign": "model.layers.1."}
    done = start(model, settings, STACK)
    assert done.returncode != 0
    assert "layer 'model.layers.1.self_attn.attn' would run on vLLM's own CPUAttentionBackend" in done.stderr


@pytest.mark.parametrize(
    ("stack", "message"),
    [
        ('[[rules]]\nlayers = "*"\nbackend = "no_such"\n', "there is no backend named 'no_such'"),
        ('[[rules]]\nlayers = "*"\nbackend = { name = "torch", tile = 3 }\n', "tile"),
        ('[[rules]]\nlayers = "no_such.*"\nbackend = "torch"\n', "is for no layer of"),
        ('[cache]\nformat = "no_such"\n', "no_such"),
        ('[[rules]]\nlayers = "*"\nspec = { num_sink_tokens = 3 }\n', "num_sink_tokens"),
    ],
)
def test_what_kvframe_refuses_ends_the_start_in_its_words(stack: str, message: str, tmp_path: Path) -> None:
    model = make_model("Llama", tmp_path / "model")
    done = start(model, {"engine": ENGINE, "prompts": [[1, 2, 3]], "max_tokens": 1}, stack)
    assert done.returncode != 0
    assert message in done.stderr


def test_the_installed_vllm_has_every_name() -> None:
    from kvframe_vllm.names import missing_names

    assert [] == missing_names()


def test_another_version_of_vllm_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import kvframe_vllm
    import vllm

    from kvframe import KVFrameError

    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    monkeypatch.setenv("KVFRAME_STACK", "stack.toml")
    with pytest.raises(KVFrameError, match=r"no adapter for vLLM 0\.99\.1; it has one for 0\.32"):
        kvframe_vllm.register()
