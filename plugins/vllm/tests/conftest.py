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
    "Gemma3nText": {  # the last two layers read the caches of the third and the second
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "layer_types": [*["sliding_attention"] * 2, "full_attention", "full_attention", "sliding_attention"],
        "sliding_window": 40,
        "vocab_size_per_layer_input": 256,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 5,
    },
    "DeepseekV2": {  # of these sizes only does vLLM compute latents on a CPU in float32
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "kv_lora_rank": 512,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "first_k_dense_replace": 2,
        "rope_parameters": {  # as the published models: vLLM's kernel for other positions is wrong for such queries
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 256,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
    },
    "Bloom": {"num_hidden_layers": 2, "hidden_size": 128, "num_key_value_heads": 4},  # ALiBi
    "Llama4Text": {
        "num_hidden_layers": 4,
        "attention_chunk_size": 64,
        "num_local_experts": 2,
        "intermediate_size_mlp": 128,
        "no_rope_layers": [1, 1, 1, 0],
        "attn_temperature_tuning": False,
    },
}
ENGINE = {"max_model_len": 256, "block_size": 32, "max_num_batched_tokens": 96, "max_num_seqs": 64}
STACK = '[[rules]]\nlayers = "*"\nbackend = "cpu"\n[[rules]]\nkind = "mla"\noptional = true\nbackend = "mla"\n'
TORCH = STACK.replace('"cpu"', '"torch"')
SKIP = '[model]\nprefill_skipping = "decode_only"\n'


RAISING = """import functools
import kvframe_cpu.backend

def register():
    calls, attend = [0], kvframe_cpu.backend.CpuBackend.attend
    @functools.wraps(attend)
    def fail(self, layer, query, *args, **options):
        calls[0] += 1
        if calls[0] > 9:
            raise ValueError("no such tile")
        return attend(self, layer, query, *args, **options)

    kvframe_cpu.backend.CpuBackend.attend = fail
"""


FAILURE = "backend 'kvframe-cpu:cpu', of layer 'model.layers.1.self_attn.attn': attend() failed in line"


def make_model(family: str, folder: Path) -> Path:
    """Save a random model, with weights so large that its attention is far from uniform."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**SIZES, **MODELS[family]})
    model_class = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(6)
    model.save_pretrained(folder)
    if family == "Gemma3nText":
        add_unused_norms(folder / "model.safetensors", model.config)
    return folder


def add_unused_norms(weights: Path, config: Any) -> None:
    """Give layers that read other layers' caches the norms of keys that published checkpoints have for them.

    transformers leaves them out of what it saves, and vLLM 0.29 wants them.
    """
    from safetensors.torch import load_file, save_file

    first = config.num_hidden_layers - config.num_kv_shared_layers
    names = [f"model.layers.{layer}.self_attn.k_norm.weight" for layer in range(first, config.num_hidden_layers)]
    save_file(
        {**load_file(weights), **{name: torch.ones(config.head_dim) for name in names}}, weights, {"format": "pt"}
    )


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
        environment["PYTHONPATH"] = on_path(plugins)
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
    process = start(model, settings, stack, plugins, **variables)
    assert process.returncode == 0, process.stderr[-3000:]
    return result_of(process)


def result_of(process: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return what a run of the script reported."""
    (line,) = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return result


def on_path(folders: list[Path]) -> str:
    """Return a path for Python: these folders, and then the path of this process."""
    return os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH", "")]))


def make_plugin(folder: Path, name: str, code: str, group: str, entry: str) -> Path:
    """Make an installed module with an entry point, in a folder for the path."""
    installed = folder / f"{name}-1.0.dist-info"
    installed.mkdir(parents=True)
    (folder / f"{name}.py").write_text(code, encoding="utf-8")
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    api = f"[kvframe.v1.api]\n{name} = v1_0\n" if group == "kvframe.v1" else ""
    (installed / "entry_points.txt").write_text(f"[{group}]\n{name} = {entry}\n{api}", encoding="utf-8")
    return folder


def make_metadata(folder: Path) -> Path:
    """Return a folder with what the command ``vllm`` reads of a distribution vllm; the CPU build is named vllm-cpu."""
    import vllm

    installed = folder / "vllm-metadata" / f"vllm-{vllm.__version__}.dist-info"
    installed.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm.__version__.partition('+')[0]}+cpu\n"
    (installed / "METADATA").write_text(metadata, encoding="utf-8")
    return installed.parent


def dense_tokens(folder: Path, prompts: list[list[int]], num_new: int, lives: list[Any]) -> list[list[int]]:
    """Generate greedily by transformers, each layer under a dense mask that is made of what is live at each token.

    ``lives`` has a function of a position for each layer, which returns ranges of tokens.
    """
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    max_tokens = max(map(len, prompts)) + num_new
    masks = []
    for live in lives:
        mask = torch.full((max_tokens, max_tokens), float("-inf")).fill_diagonal_(0.0)
        for n in range(max_tokens):
            for start, stop in live(n):
                mask[n, start:stop] = 0.0
        masks.append(mask)

    def give(mask: torch.Tensor) -> Any:
        def hook(module: Any, args: Any, options: dict[str, Any]) -> Any:
            num = options["hidden_states"].shape[1]
            return args, {**options, "attention_mask": mask[None, None, :num, :num]}

        return hook

    for layer, mask in zip(model.model.layers, masks, strict=True):
        layer.self_attn.register_forward_pre_hook(give(mask), with_kwargs=True)
    outputs = []
    with torch.no_grad():
        for prompt in prompts:
            tokens = list(prompt)
            for _ in range(num_new):
                tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
            outputs.append(tokens[len(prompt) :])
    return outputs


class Vllm:
    """What the tests run vLLM with."""

    engine = ENGINE
    stack, torch, skip = STACK, TORCH, SKIP
    raising, failure = RAISING, FAILURE
    make_prompts = staticmethod(make_prompts)
    make_plugin, make_metadata = staticmethod(make_plugin), staticmethod(make_metadata)
    start, on_path = staticmethod(start), staticmethod(on_path)
    dense_tokens = staticmethod(dense_tokens)
    serve, result_of = staticmethod(serve), staticmethod(result_of)

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make_model(self, family: str) -> Path:
        return make_model(family, self.folder / family)


@pytest.fixture(scope="session")
def vllm_runs(tmp_path_factory: pytest.TempPathFactory) -> Vllm:
    """Return what starts vLLM, with a folder for models."""
    return Vllm(tmp_path_factory.mktemp("vllm"))
