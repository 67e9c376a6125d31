"""A checkpoint cannot cause a download of code, or any network access."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from kvframe_transformers.adapter import TransformersAdapter
from kvframe_transformers.testing import save_tiny
from transformers.integrations import hub_kernels

from kvframe.contract import ModelError


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that opens a connection or loads a kernel from the Hub."""

    def refuse(*arguments: Any, **options: Any) -> None:
        pytest.fail(f"asked for {arguments[1:] or options}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for name in ("get_kernel", "load_and_register_attn_kernel"):
        monkeypatch.setattr(hub_kernels, name, refuse)


def save(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """Save a tiny model whose config has further fields."""
    save_tiny(folder, family)
    change(folder / "config.json", **changes)
    return folder


def change(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, **changes}))


def load(folder: Path) -> None:
    TransformersAdapter().load(folder, device="cpu", dtype="float32")


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation", "_attn_implementation_internal"])
@pytest.mark.parametrize(
    "value",
    ["kernels-community/flash-attn", "a-stranger/kernel@main:function", "flash_attention_2", {"": "a/b"}, "nonsense"],
)
def test_the_attention_that_a_checkpoint_names_is_not_used(field: str, value: Any, tmp_path: Path) -> None:
    load(save(tmp_path, **{field: value}))


def test_the_attention_that_a_part_of_a_checkpoint_names_is_not_used(tmp_path: Path) -> None:
    save_tiny(tmp_path, "t5gemma")
    sides = json.loads((tmp_path / "config.json").read_text())
    setting = {"attn_implementation": "a-stranger/kernel"}
    change(tmp_path / "config.json", **{side: sides[side] | setting for side in ("encoder", "decoder")})
    load(tmp_path)


def test_the_experts_that_a_checkpoint_names_are_not_used(tmp_path: Path) -> None:
    load(save(tmp_path, "mixtral", experts_implementation="a-stranger/kernel"))


def test_code_beside_the_weights_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')")
    save(tmp_path, auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "a-stranger/repo--evil.Model"})
    change(tmp_path / "tokenizer_config.json", auto_map={"AutoTokenizer": ["a-stranger/repo--evil.Tokenizer", None]})
    load_refused(tmp_path, "the tokenizer of ")


def load_refused(folder: Path, start: str) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert str(caught.value).startswith(start)
    return str(caught.value)


def test_a_model_of_code_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "a-stranger/repo--evil.Config"}})
    )
    load_refused(tmp_path, f"the config of {tmp_path} names the architecture 'evil', which transformers ")


def test_another_place_that_a_config_names_is_not_asked(tmp_path: Path) -> None:
    load(save(tmp_path, _name_or_path="a-stranger/model", base_model_name_or_path="a-stranger/model"))


def test_an_adapter_is_refused_and_its_base_is_not_asked_for(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "adapter_config.json").write_text(
        '{"base_model_name_or_path": "a-stranger/model", "peft_type": "LORA"}'
    )
    assert "merge it into its model" in load_refused(tmp_path, f"{tmp_path} holds an adapter")


@pytest.mark.parametrize("method", ["mxfp4", "fp8", "gptq", "bitsandbytes", "stranger"])
def test_a_quantization_that_a_checkpoint_names_fetches_nothing(method: str, tmp_path: Path) -> None:
    save(tmp_path, quantization_config={"quant_method": method})
    with suppress(ModelError):  # transformers lacks what such a method needs
        load(tmp_path)


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_labels", "vocab_size"])
def test_a_size_that_no_model_has_is_refused_at_once(field: str, tmp_path: Path) -> None:
    save(tmp_path, **{field: 10**12})
    with pytest.raises(ModelError):
        load(tmp_path)
