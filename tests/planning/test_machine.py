"""Which device and dtype a model gets if the stack names none."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from kvframe_transformers.testing import save_tiny, tiny_model

from kvframe import Engine, SamplingParams, Stack, load_plugins
from kvframe.config import stack as stack_module
from kvframe.contract.errors import ModelError, PluginError
from kvframe.planning import recognise
from kvframe.planning.recognise import cpu_multiplies, find_reader, with_dtype
from tests.planning.test_recognise import Noting, found
from tests.support.commands import run

NAMED = Stack.from_mapping({"model": {"device": "cpu", "dtype": "float64"}})
REGISTRY = load_plugins().registry


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint in bfloat16."""
    path = tmp_path_factory.mktemp("machine") / "tiny"
    tiny_model("llama").to(torch.bfloat16).save_pretrained(path)
    return path


def on_a_cpu_with(monkeypatch: pytest.MonkeyPatch, *features: str) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(features, True), raising=False)


@pytest.mark.parametrize(("has_gpu", "device"), [(True, "cuda"), (False, "cpu")])
def test_a_gpu_is_taken_if_there_is_one(monkeypatch: pytest.MonkeyPatch, has_gpu: bool, device: str) -> None:
    monkeypatch.setattr(stack_module, "has_gpu", lambda: has_gpu)
    assert device == Stack().with_device().model.device
    assert NAMED is NAMED.with_device()


@pytest.mark.parametrize(
    ("dtype", "features", "expected"),
    [
        ("float32", (), True),
        ("float64", (), True),
        ("bfloat16", ("avx2",), False),
        ("bfloat16", ("avx512_bf16",), True),
        ("bfloat16", ("amx_bf16",), True),
        ("float16", ("avx512_bf16",), False),
        ("float16", ("avx512_fp16",), True),
    ],
)
def test_which_dtypes_a_cpu_computes_itself(
    monkeypatch: pytest.MonkeyPatch, dtype: str, features: tuple[str, ...], expected: bool
) -> None:
    on_a_cpu_with(monkeypatch, *features)
    assert expected == cpu_multiplies(dtype)


def test_a_torch_that_does_not_know_the_cpu_takes_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert (True, False) == (cpu_multiplies("float32"), cpu_multiplies("bfloat16"))


def dtype_of(path: Path, device: str = "cpu", **options: Any) -> str:
    stack = Stack.from_mapping({"model": {"device": device}})
    return with_dtype(stack, path, find_reader(path, REGISTRY), **options).model.dtype


def test_the_dtype_is_the_checkpoint_s_unless_a_cpu_would_lose_by_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, folder: Path
) -> None:
    on_a_cpu_with(monkeypatch, "avx512_bf16")
    with caplog.at_level(logging.INFO, "kvframe"):
        assert "bfloat16" == dtype_of(folder)
        on_a_cpu_with(monkeypatch)
        assert ["bfloat16"] * 2 == [dtype_of(folder, "cuda:1"), dtype_of(folder, runs_here=False)]
        assert [] == caplog.messages
        assert "float32" == dtype_of(folder)
    assert [
        "tiny is in bfloat16, which this CPU computes more slowly than float32: it runs in float32; "
        'dtype = "bfloat16" in the stack\'s [model] keeps its dtype'
    ] == caplog.messages
    assert "float64" == with_dtype(NAMED, folder, find_reader(folder, REGISTRY)).model.dtype


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"dtype": None}, "float32"),
        ({"dtype": "float8_e4m3fn"}, "float32"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": None, "torch_dtype": "float64"}, "float64"),
    ],
)
def test_what_a_config_says(tmp_path: Path, folder: Path, entries: dict[str, Any], expected: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    config_entries = {name: value for name, value in {**config, **entries}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config_entries))
    assert expected == dtype_of(tmp_path, runs_here=False)


def test_a_layer_file_may_name_its_dtype(tmp_path: Path) -> None:
    layers = 'max_model_len = 64\n[[layers]]\nname = "a"\nkind = "full_attention"\nnum_kv_heads = 1\nhead_size = 8\n'
    for text, expected in ((layers, "float32"), (f'dtype = "float16"\n{layers}', "float16")):
        (tmp_path / "layers.toml").write_text(text)
        assert expected == dtype_of(tmp_path / "layers.toml", "cuda")
    (tmp_path / "layers.toml").write_text(f'dtype = "int8"\n{layers}')
    with pytest.raises(ModelError, match="dtype must be one of float64, float32, float16, bfloat16, not 'int8'"):
        dtype_of(tmp_path / "layers.toml")


class Wrong(Noting):
    def dtype_of(self, path: Path) -> str | None:
        return "fp4"


def test_an_adapter_that_names_no_dtype_of_a_model_is_named() -> None:
    assert found(Noting()).dtype_of(Path("x")) is None
    with pytest.raises(PluginError, match=r"dtype_of\(\) must return None or one of float64.*, not 'fp4'"):
        found(Wrong()).dtype_of(Path("x"))


# --- what runs and is planned -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("features", "dtype"), [((), "float32"), (("avx512_bf16",), "bfloat16")])
def test_an_engine_runs_a_checkpoint_in_the_chosen_dtype(
    monkeypatch: pytest.MonkeyPatch, folder: Path, features: tuple[str, ...], dtype: str
) -> None:
    on_a_cpu_with(monkeypatch, *features)
    monkeypatch.setattr(stack_module, "has_gpu", lambda: False)
    left = Stack.from_mapping({"cache": {"memory": "4MiB"}})
    explicit = attrs.evolve(left, model=attrs.evolve(left.model, device="cpu", dtype=dtype))
    params = SamplingParams(max_new_tokens=6)
    tokens = []
    for stack in (left, explicit):
        with Engine.from_pretrained(folder, stack=stack) as engine:
            assert ("cpu", dtype) == (engine.stack.model.device, engine.stack.model.dtype)
            tokens.append(engine.generate([[5, 9, 17, 3]], params)[0].token_ids)
    assert tokens[0] == tokens[1]


def test_a_draft_model_runs_in_the_dtype_of_the_model(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    on_a_cpu_with(monkeypatch, "avx512_bf16")
    save_tiny(tmp_path / "draft", "llama", num_hidden_layers=1)
    stack = Stack.from_mapping(
        {
            "cache": {"memory": "4MiB"},
            "model": {"device": "cpu", "drafts": {"name": "draft_model", "model": str(tmp_path / "draft")}},
        }
    )
    with Engine.from_pretrained(folder, stack=stack) as engine:
        assert "bfloat16" == engine.stack.model.dtype
        assert 6 == len(engine.generate([[5, 9, 17, 3]], SamplingParams(max_new_tokens=6))[0].token_ids)


LLAMA_3_1_8B = {
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
}


def test_a_plan_is_for_the_dtype_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_a_cpu_with(monkeypatch)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_1_8B))
    result = run("plan", str(tmp_path), "--cache-memory", "1GiB")
    assert 0 == result.exit_code, result.output
    # 32 layers x 8 heads x 128 x keys and values x 2 bytes
    assert "one more token  128.00 KiB" in result.stdout
    result = run("plan", str(tmp_path), "--cache-memory", "1GiB", "--dtype", "float32")
    assert "one more token  256.00 KiB" in result.stdout


def test_the_features_of_a_cpu_are_names_that_torch_has() -> None:
    features = getattr(torch.cpu, "get_capabilities", dict)()
    if features.get("architecture") == "x86_64":
        names = [name for names in recognise._CPU_FEATURES.values() for name in names if "avx" in name or "amx" in name]
        assert set(names) <= set(features)
