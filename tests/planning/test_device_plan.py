"""Plans of devices: five published models on one, two and eight of them, by hand arithmetic; decisions and advice."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import pytest
from kvframe_transformers import ranks
from kvframe_transformers.checkpoint import build_without_weights, read_config
from kvframe_transformers.testing import save_tiny
from kvframe_transformers.weight_bytes import count_weights
from transformers.quantizers import quantizer_mxfp4

from kvframe.cli.device_memory import device_to_dict
from kvframe.config.stack import Stack
from kvframe.hosting.device_plan import DevicePlan, default_reserve
from kvframe.hosting.setup import Setup
from kvframe.loading.plugins import load_plugins
from kvframe.planning.recognise import find_reader
from tests.support.commands import run, run_json, stdout_of, write

GIB = 2**30
LAYER_FILES = Path(__file__).resolve().parents[2] / "examples" / "layers"
LLAMA = LAYER_FILES / "llama_3_1_8b.toml"
YARN = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1, "mscale_all_dim": 1}

# The sizes that the publishers' config.json files name.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "dtype": "bfloat16",
    },
    "gemma-3-27b": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "query_pre_attn_scalar": 168,
        "sliding_window": 1024,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "dtype": "bfloat16",
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_local_experts": 32,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    },
    "qwen3-next-80b": {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "dtype": "bfloat16",
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
        "max_position_embeddings": 163840,
        "rope_scaling": YARN,
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
}


def llama_bytes(n: int) -> float:
    attention = 4096 * 128 * (32 + 2 * 8 + 32)
    divided = 2 * 128256 * 4096 + 32 * (attention + 3 * 4096 * 14336)
    return 2 * (divided / n + (2 * 32 + 1) * 4096)


def gemma_bytes(n: int) -> float:
    attention = 5376 * 128 * (32 + 2 * 16 + 32)
    divided = 262208 * 5376 + 62 * (attention + 3 * 5376 * 21504)  # the head is the embedding
    return 2 * (divided / n + 62 * (4 * 5376 + 2 * 128) + 5376)


def gpt_oss_bytes(n: int) -> float:
    """Return its bytes; transformers' plan divides nothing but the head."""
    experts = 24 * 32 * 2880 * 3 * 2880 * (4 + 8 / 32) / 8  # 4 bits, and a scale of 8 bits for 32 of them
    biases = 24 * 32 * 3 * 2880
    attention = 24 * (2880 * 64 * (64 + 2 * 8 + 64) + 64 * (64 + 2 * 8) + 2880 + 64)  # with biases and sinks
    router_and_norms = 24 * (2880 * 32 + 32 + 2 * 2880) + 2880
    return experts + 2 * (biases + attention + router_and_norms + 201088 * 2880 * (1 + 1 / n))


def qwen_bytes(n: int) -> float:
    full = 12 * 2048 * 256 * (2 * 16 + 2 * 2 + 16)  # queries have a gate
    linear = 36 * 2048 * (2 * 2048 + 2 * 4096 + 2 * 32 + 4096)
    experts = 48 * (512 + 1) * 3 * 2048 * 512
    divided = 2 * 151936 * 2048 + full + linear + experts
    convolution_and_gates = 36 * (8192 * 4 + 2 * 32 + 128)
    router_and_norms = 48 * (2048 * 512 + 2048 + 2 * 2048) + 12 * 2 * 256 + 2048
    return 2 * (divided / n + convolution_and_gates + router_and_norms)


def deepseek_bytes(n: int) -> float:
    """Return its bytes; transformers' plan divides its experts, embedding and head, and not its attention."""
    scale = 1 + 4 / 128**2
    experts = 58 * (256 + 1) * 3 * 7168 * 2048 + 3 * 3 * 7168 * 18432
    projections = 7168 * 1536 + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    # 576 columns have the scales of 640.
    attention = 61 * ((projections + 7168 * 576) + 4 / 128**2 * (projections + 7168 * 640))
    router = 58 * 256 * 7168
    norms = 61 * (2 * 7168 + 1536 + 512) + 7168
    embedding_and_head = 2 * 129280 * 7168
    return experts * scale / n + attention + 2 * (embedding_and_head / n + router + norms)


# The weights of a rank, the bytes of a token at first and at the greatest length, those of a request's states.
HAND: dict[str, tuple[Callable[[int], float], Callable[[int], tuple[int, int]]]] = {
    "llama-3.1-8b": (llama_bytes, lambda n: (32 * 2 * (8 // n) * 128 * 2,) * 2),
    "gemma-3-27b": (gemma_bytes, lambda n: (62 * 2 * (16 // n) * 128 * 2, 10 * 2 * (16 // n) * 128 * 2)),
    "gpt-oss-20b": (gpt_oss_bytes, lambda n: (24 * 2 * 8 * 64 * 2, 12 * 2 * 8 * 64 * 2)),
    # Two heads: each of eight ranks has one of them.
    "qwen3-next-80b": (qwen_bytes, lambda n: (12 * 2 * (1 if n > 1 else 2) * 256 * 2,) * 2),
    "deepseek-v3": (deepseek_bytes, lambda n: (61 * (512 + 64) * 2,) * 2),
}


def read(path: Path, stack: Stack | None = None) -> DevicePlan:
    """Return the plan of a device of 80 GB."""
    registry = load_plugins().registry
    reader = find_reader(path, registry)
    setup = Setup.read(path, stack or Stack(), registry, runs_here=False, reader=reader)
    memory = 80 * 10**9
    return DevicePlan(
        path=path, reader=reader, whole=setup, num_ranks=1, memory_bytes=memory, reserved_bytes=default_reserve(memory)
    )


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], DevicePlan]:
    """Plans by the names of models, each read once."""

    @cache
    def of(name: str) -> DevicePlan:
        folder = tmp_path_factory.mktemp(name)
        write(folder / "config.json", CONFIGS[name])
        return read(folder)

    return of


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_model_is_counted_as_by_hand(name: str, published: Callable[[str], DevicePlan]) -> None:
    device_plan = published(name)
    (layer_file,) = LAYER_FILES.glob(f"{re.sub('[-.]', '_', name)}.*")
    assert read(layer_file).weight_bytes == device_plan.weight_bytes
    weights, token = HAND[name]
    for num_ranks in (1, 2, 8):
        device = attrs.evolve(device_plan, num_ranks=num_ranks)
        expected = weights(num_ranks)
        # Each weight that is divided is rounded up.
        assert expected <= device.weight_bytes < expected + 10_000
        left = 72 * 10**9 - device.weight_bytes
        assert left == device.cache_bytes
        fits = {"llama-3.1-8b": 1, "gemma-3-27b": 1, "gpt-oss-20b": 1, "qwen3-next-80b": 8, "deepseek-v3": 16}[name]
        assert (num_ranks >= fits) == (device.plan is not None) == (device.longest_request > 0)
        if device.plan is None:
            continue
        plan = device.plan
        assert token(num_ranks) == (plan.bytes_per_token, plan.growing_bytes_per_token)
        assert CONFIGS[name]["max_position_embeddings"] == device.longest_request
        if name == "llama-3.1-8b":
            page = 16 * plan.bytes_per_token
            assert ((left - page) // page // 64, (left - page) // page // 8192) == (
                plan.max_concurrency(1024),
                plan.max_concurrency(),
            )
        if name == "qwen3-next-80b":  # transformers' plan leaves states whole on each rank
            state = 36 * (8192 * 4 * 2 + 32 * 128 * 128 * 4)
            assert 0 == plan.bytes_per_request % state


def test_what_to_change_is_tried(published: Callable[[str], DevicePlan]) -> None:
    device = published("deepseek-v3")
    assert ("more ranks: --tensor-parallel 16",) == device.changes
    sixteen = attrs.evolve(device, num_ranks=16)
    assert (True, ()) == (sixteen.longest_request > 0, sixteen.changes)
    qwen = published("qwen3-next-80b")
    changes = qwen.changes
    assert "more ranks of another engine: --tensor-parallel 4" == changes[0]
    assert changes[1].startswith("a checkpoint with weights of 4 bits, about 41.7 GiB")
    (note,) = device_to_dict(attrs.evolve(qwen, num_ranks=8))["notes"]
    assert "has 16 heads and 2 key-value heads" in note


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    write(tmp_path / "config.json", CONFIGS["llama-3.1-8b"])
    return tmp_path


def test_the_command_decides(llama: Path) -> None:
    output = stdout_of("plan", llama, "--memory", "24GiB")
    assert "  the device       24.00 GiB (25,769,803,776 bytes)\n" in output
    assert "  weights          14.96 GiB: 8,030,261,248 parameters in bfloat16\n" in output
    assert "  reserve          2.40 GiB for activations and the runtime (--reserve)\n" in output
    # A block of 16 tokens takes 2 MiB.
    left = 24 * GIB - 2 * 8_030_261_248 - 24 * GIB // 10
    longest = (left // 2**21 - 1) * 16
    assert f"  longest request  {longest:,} of 131,072 tokens\n" in output
    assert f"What to change, one of\n  1  fewer tokens: --max-model-len {longest}\n" in output
    assert "  2  another format of the cache: [cache] format = 'int4_token_head'\n" in output
    assert "  3  more ranks: --tensor-parallel 2\n" in output
    assert f"a run gets this cache by --memory {left >> 20}MiB\n" in output
    device = run_json("plan", LLAMA, "--memory", "24GiB", "--reserve", "1GiB", "--tensor-parallel", 2)["device"]
    assert (True, 131072, [], GIB) == (
        device["starts"],
        device["longest_request"],
        device["changes"],
        device["reserved_bytes"],
    )


def test_nothing_fits_is_exit_code_1(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    result = run("plan", LLAMA, "--memory", "16GB", "--html", page)
    assert (1, "") == (result.exit_code, result.stderr)
    assert "  starts      no: the weights and the reserve take 16.45 GiB\n" in result.stdout
    assert "  1  more ranks: --tensor-parallel 2\n" in result.stdout
    assert '"starts": false' in page.read_text()
    result = run("plan", LLAMA, "--memory", "16GB", "--json")
    assert (1, False, 0) == (
        result.exit_code,
        *(json.loads(result.stdout)["device"][key] for key in ("starts", "cache_bytes")),
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--memory", "80GB", "--cache-memory", "1GiB"), "give one of --memory, the device's, and --cache-memory"),
        (("--reserve", "1GiB"), "--reserve is a part of --memory"),
        (("--memory", "80GB"), "layers.json does not say how many bytes its weights take"),
        (("--cache-memory", "1GiB", "--tensor-parallel", "3"), "has num_kv_heads = 2, which 3 ranks do not divide"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(options: tuple[str, ...], says: str, tmp_path: Path) -> None:
    layers = {"name": "l", "kind": "full_attention", "num_kv_heads": 2, "head_size": 64, "query": {"num_heads": 12}}
    path = write(tmp_path / "layers.json", {"max_model_len": 4096, "layers": [layers]})
    result = run("plan", path, *options)
    assert (2, "", 1) == (result.exit_code, result.stdout, len(result.stderr.splitlines()))
    assert says in result.stderr


def test_a_layer_file_names_its_weights(tmp_path: Path) -> None:
    layers = {"name": "l", "kind": "full_attention", "num_kv_heads": 2, "head_size": 64, "query": {"num_heads": 8}}
    file = {"max_model_len": 4096, "weights": "10GiB", "layers": [layers]}
    path = write(tmp_path / "layers.json", file)
    device = run_json("plan", path, "--memory", "8GiB", "--tensor-parallel", 4)["device"]
    assert (5 * GIB // 2, "as the file says, divided by 4") == (device["weight_bytes"], device["weights"])
    plan = run_json("plan", path, "--cache-memory", "1GiB", "--tensor-parallel", 4)
    assert 2 * 64 * 4 == plan["bytes_per_token"]  # one of two heads
    write(tmp_path / "layers.json", file | {"weights": "much"})
    assert "weights: 'much' is not a size" in run("plan", path, "--memory", "8GiB").stderr


def test_quantized_weights_are_those_in_files_if_there_are_any(tmp_path: Path) -> None:
    write(tmp_path / "config.json", CONFIGS["gpt-oss-20b"])
    write(tmp_path / "model.safetensors.index.json", {"metadata": {"total_size": 14 * 10**9}, "weight_map": {}})
    assert 14 * 10**9 == read(tmp_path).weight_bytes


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 64}, 4 + 16 / 64),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8 + 16 / 64),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"input_activations": {"num_bits": 16}, "weights": {"num_bits": 4, "group_size": 32}}
                },
                "ignore": ["lm_head"],
            },
            4 + 16 / 32,
        ),
        ({"quant_method": "unheard-of"}, 16),
    ],
)
def test_bits_of_a_quantized_weight_are_those_of_its_config(
    quantization: dict[str, Any], bits: float, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}
    save_tiny(tmp_path, "llama", num_hidden_layers=2, head_dim=64, tie_word_embeddings=False, **sizes)
    config = read_config(tmp_path)
    vocabulary = config.vocab_size
    config.quantization_config = quantization
    weights = count_weights(build_without_weights(config, "tiny"), None, "bfloat16", 1)
    expected = 2 * 7 * 64 * 64 * bits / 8 + 2 * (2 * vocabulary * 64 + 5 * 64)
    assert expected == weights.num_bytes


def test_a_draft_model_is_counted_too(llama: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    save_tiny(draft, "llama", vocab_size=128256, max_position_embeddings=131072)
    stack = Stack.from_mapping({"model": {"drafts": {"name": "draft_model", "model": str(draft)}}})
    model = build_without_weights(read_config(draft), "draft")
    number = 8_030_261_248 + sum(parameter.numel() for parameter in model.parameters())
    assert 2 * number == read(llama, stack).weight_bytes


def test_a_plan_of_ranks_says_that_a_package_divides_models(
    published: Callable[[str], DevicePlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    device_plan = published("llama-3.1-8b")
    monkeypatch.setattr(ranks, "find_spec", lambda name: None)
    assert [] == device_to_dict(attrs.evolve(device_plan))["notes"]
    (note,) = device_to_dict(attrs.evolve(device_plan, num_ranks=2))["notes"]
    assert note.endswith("; pip install kvframe-transformers[ranks]")


def test_explain_says_what_a_run_would_lack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path / "config.json", CONFIGS["gpt-oss-20b"] | {"num_hidden_layers": 2, "num_local_experts": 4})
    sentence = "on this machine transformers turns its mxfp4 weights into 16 bits when it loads them"
    assert sentence in " ".join(stdout_of("explain", tmp_path).split())
    monkeypatch.setattr(quantizer_mxfp4, "is_accelerate_available", lambda: False)
    sentence = (
        "loading its mxfp4 weights fails on this machine: ImportError: Using mxfp4 requires Accelerate: `pip install "
        "accelerate`"
    )
    assert sentence in " ".join(stdout_of("explain", tmp_path, "--html", tmp_path / "page.html").split())
    assert [sentence] == run_json("explain", tmp_path)["lacks"]
    assert sentence in (tmp_path / "page.html").read_text()
    assert [sentence] == run_json("plan", tmp_path, "--memory", "8GiB")["device"]["notes"]
