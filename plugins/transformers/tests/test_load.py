"""Incomplete checkpoints are refused in one sentence; complete ones load without output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kvframe_transformers.adapter import TransformersAdapter
from kvframe_transformers.checkpoint import load_weights
from kvframe_transformers.model import TransformersModel
from kvframe_transformers.testing import save_tiny
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvframe.contract import ModelError, UnknownNameError


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        TransformersAdapter().load(path, device="cpu", dtype="float32")
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_loading_is_quiet_in_a_pipe(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path, "llama")
    TransformersAdapter().load(tmp_path, device="cpu", dtype="float32")
    assert ("", "") == tuple(capfd.readouterr())


def test_the_dtype_is_the_one_asked_for(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    model = TransformersAdapter().load(tmp_path, device="cpu", dtype="bfloat16")
    assert isinstance(model, TransformersModel)
    assert torch.bfloat16 == model.model.dtype


def test_an_unknown_dtype_is_refused_with_those_that_exist(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    with pytest.raises(UnknownNameError, match=r"no model dtype named 'float33'.*did you mean 'float32'"):
        TransformersAdapter().load(tmp_path, device="cpu", dtype="float33")


def test_a_config_file_has_no_weights(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    assert "is a config without weights" in refusal(tmp_path / "config.json")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    assert "no file named model.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize("num_bytes", [0, 4, 100, 20000])
def test_a_truncated_file_is_refused(num_bytes: int, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    assert refusal(tmp_path).startswith(f"the weights of {tmp_path} cannot be loaded: ")


def test_missing_weights_are_refused_and_not_made_up(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "has no 'model.layers.1.self_attn.q_proj.weight'" in refusal(tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(63)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "has another shape for 'model.norm.weight'" in refusal(tmp_path)


def test_a_model_without_tokenizer_takes_ids_only(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    model = TransformersAdapter().load(tmp_path, device="cpu", dtype="float32")
    assert model.decode([1, 2]) is None
    with pytest.raises(ModelError, match="has no tokenizer; give token ids instead of text"):
        model.encode("hello")


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "GemmaTokenizer", "BertTokenizer", "T5Tokenizer", "GPT2Tokenizer"])
def test_the_settings_of_a_tokenizer_alone_are_none(tmp_path: Path, kind: str) -> None:
    # From such a folder, transformers makes a tokenizer for which every text is unknown or empty.
    save_tiny(tmp_path, "llama")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    model = TransformersAdapter().load(tmp_path, device="cpu", dtype="float32")
    assert model.decode([1, 2]) is None
    with pytest.raises(ModelError, match="has no tokenizer; give token ids instead of text"):
        model.encode("hello")


def test_a_tokenizer_of_bytes_needs_no_vocabulary(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    model = TransformersAdapter().load(tmp_path, device="cpu", dtype="float32")
    assert "hello" == model.decode(model.encode("hello"))


def test_the_tokenizer_adds_its_special_tokens(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "hello": 1, "world": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="?").save_pretrained(tmp_path)
    model = TransformersAdapter().load(tmp_path, device="cpu", dtype="float32")
    assert [0, 1, 2] == model.encode("hello world")
    assert "hello world" == model.decode([0, 1, 2])


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert refusal(tmp_path).startswith(f"the tokenizer of {tmp_path} cannot be read: ")


def test_of_several_processes_each_loads_its_share_of_a_model_unless_one_runs_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, "llama")
    options_of_calls = []

    def without_other_processes(*arguments: Any, **options: Any) -> Any:
        options_of_calls.append(sorted(options))
        return load_weights(*arguments)

    monkeypatch.setattr("kvframe_transformers.adapter.load_weights", without_other_processes)
    monkeypatch.setenv("WORLD_SIZE", "2")
    # A torch that was built for GPUs names one on a machine without any.
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: None)
    description = TransformersAdapter().describe(tmp_path)
    share = TransformersAdapter().load(tmp_path, device="cpu", dtype="float32")
    alone = TransformersAdapter().load_whole(tmp_path, device="cpu", dtype="bfloat16")
    assert [["distributed_config"], []] == options_of_calls
    assert description == alone.description != share.description
    assert isinstance(alone, TransformersModel)
    assert torch.bfloat16 == alone.model.dtype
    with pytest.raises(ModelError, match="is a config without weights"):
        TransformersAdapter().load_whole(tmp_path / "config.json", device="cpu", dtype="float32")
