"""The adapter's description of a config, without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kvframe_transformers.adapter import TransformersAdapter
from kvframe_transformers.testing import save_tiny, tiny_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from kvframe.contract import ModelError


def write_config(folder: Path, model_type: str, **overrides: Any) -> Path:
    """Save a config of published size as config.json; return the file."""
    config = AutoConfig.for_model(model_type, **overrides)
    config.save_pretrained(folder)
    return folder / "config.json"


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        TransformersAdapter().describe(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_recognises_folders_and_files_with_a_model_type(tmp_path: Path) -> None:
    file = write_config(tmp_path, "llama")
    assert [True, True] == [TransformersAdapter().recognises(path) for path in (tmp_path, file)]


@pytest.mark.parametrize("content", ["{}", "[1]", "not json", '{"layers": []}'])
def test_does_not_recognise_other_json(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    assert not TransformersAdapter().recognises(tmp_path)


def test_does_not_recognise_a_folder_without_config_or_another_file(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text('{"model_type": "llama"}')
    assert [False, False] == [TransformersAdapter().recognises(path) for path in (tmp_path, tmp_path / "notes.txt")]


def test_gemma3_alternates_windows_and_full_attention(tmp_path: Path) -> None:
    layers = TransformersAdapter().describe(write_config(tmp_path, "gemma3_text", num_hidden_layers=6)).layers
    assert ["sliding_window"] * 5 + ["full_attention"] == [layer.kind for layer in layers]
    assert "model.layers.0.self_attn" == layers[0].name
    assert {"num_kv_heads": 4, "head_size": 256, "window": 4096} == layers[0].options
    assert {"num_kv_heads": 4, "head_size": 256} == layers[5].options
    assert {"num_heads": 8, "head_size": 256, "scale": 0.0625, "soft_cap": None, "has_sinks": False} == layers[0].query


def test_a_composite_gemma3_config_is_read_for_its_text_model(tmp_path: Path) -> None:
    description = TransformersAdapter().describe(write_config(tmp_path, "gemma3"))
    assert {"sliding_window": 22, "full_attention": 4} == {
        kind: sum(layer.kind == kind for layer in description.layers) for kind in ("sliding_window", "full_attention")
    }
    assert 131072 == description.max_model_len


def test_gemma2_has_a_soft_cap(tmp_path: Path) -> None:
    layers = TransformersAdapter().describe(write_config(tmp_path, "gemma2")).layers
    assert {50.0} == {layer.query["soft_cap"] for layer in layers}


def test_gpt_oss_has_sinks_and_alternates(tmp_path: Path) -> None:
    layers = TransformersAdapter().describe(write_config(tmp_path, "gpt_oss")).layers
    assert {True} == {layer.query["has_sinks"] for layer in layers}
    assert [128, None] * 18 == [layer.options.get("window") for layer in layers]


def test_gemma3n_layers_share_the_cache_of_the_last_layer_of_their_kind(tmp_path: Path) -> None:
    tiny_config("gemma3n_text").save_pretrained(tmp_path)
    layers = TransformersAdapter().describe(tmp_path).layers
    assert [None] * 4 + ["model.layers.2.self_attn", "model.layers.3.self_attn"] == [
        layer.shares_with for layer in layers
    ]


class Work(TorchDispatchMode):
    """Counts torch's operations, and the bytes of the tensors that they create on devices other than meta."""

    def __init__(self) -> None:
        super().__init__()
        self.num_operations = self.num_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [
            leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta"
        ]
        self.num_operations += 1
        self.num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return result


def test_a_671b_config_is_described_without_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, make, module_types = write_config(tmp_path, "deepseek_v3"), torch.nn.Module.__init__, []

    def make_counted(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        module_types.append(type(module))
        make(module, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "__init__", make_counted)
    with Work() as work:
        layers = TransformersAdapter().describe(file).layers
    assert len(module_types) < 30 * 61, "the model is built once, with the experts of a layer in one module"
    assert work.num_operations < 300 * 61, "the model runs once"
    assert work.num_bytes < 2**20, "weights and masks of published size are on the meta device"
    assert 61 == len(layers)
    assert {"mla"} == {layer.kind for layer in layers}
    assert {"latent_size": 512, "rope_size": 64, "head_size_v": 128} == layers[0].options
    assert (128, 192) == (layers[0].query["num_heads"], layers[0].query["head_size"])


def test_llama4_is_chunked_with_full_layers_between(tmp_path: Path) -> None:
    layers = TransformersAdapter().describe(write_config(tmp_path, "llama4_text", num_hidden_layers=4)).layers
    assert [("chunked_local", 8192)] * 3 + [("full_attention", None)] == [
        (layer.kind, layer.options.get("chunk")) for layer in layers
    ]


def test_a_dynamic_rotary_embedding_needs_no_data(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    file = write_config(tmp_path, "llama", num_hidden_layers=2, rope_parameters=rope)
    assert 2 == len(TransformersAdapter().describe(file).layers)


@pytest.mark.parametrize("family", ["gemma3_text", "gemma3n_text", "gemma4_text"])
def test_a_dynamic_rotary_embedding_of_one_layer_type_needs_no_data(family: str, tmp_path: Path) -> None:
    usual = tiny_config(family).rope_parameters
    dynamic = {**usual, "sliding_attention": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
    save_tiny(tmp_path, family, rope_parameters=dynamic)
    layers = TransformersAdapter().describe(tmp_path).layers
    assert {"sliding_window", "full_attention"} == {layer.kind for layer in layers}


def test_long_rope_limits_the_length_to_where_requests_are_independent(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 48,
        "long_factor": [2.0] * 48,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 1024,
    }
    file = write_config(
        tmp_path, "phi3", num_hidden_layers=2, rope_parameters=rope, original_max_position_embeddings=1024
    )
    assert 1024 == TransformersAdapter().describe(file).max_model_len


def test_the_generation_config_says_what_ends_a_request(tmp_path: Path) -> None:
    write_config(tmp_path, "llama", num_hidden_layers=1, eos_token_id=2)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert {7, 9} == TransformersAdapter().describe(tmp_path).eos_token_ids


@pytest.mark.parametrize(
    ("config", "expected"), [({}, {2}), ({"eos_token_id": None}, set()), ({"eos_token_id": 5}, {5})]
)
def test_a_generation_config_without_end_tokens_leaves_those_of_the_config(
    tmp_path: Path, config: dict[str, Any], expected: set[int]
) -> None:
    write_config(tmp_path, "llama", num_hidden_layers=1, eos_token_id=2)
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert expected == TransformersAdapter().describe(tmp_path).eos_token_ids


@pytest.mark.parametrize("wrong", ["</s>", 2.5, True, {"id": 2}, [[2]], [2, "x"]], ids=str)
def test_end_tokens_that_are_none_are_refused(tmp_path: Path, wrong: Any) -> None:
    write_config(tmp_path, "llama", num_hidden_layers=1)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
    with pytest.raises(ModelError, match="must be a token id or a list of them, not"):
        TransformersAdapter().describe(tmp_path)


def test_without_generation_config_the_config_says_it(tmp_path: Path) -> None:
    write_config(tmp_path, "llama", num_hidden_layers=1, eos_token_id=2)
    assert {2} == TransformersAdapter().describe(tmp_path).eos_token_ids


def test_a_folder_is_named_by_its_name(tmp_path: Path) -> None:
    save_tiny(tmp_path / "small-llama", "llama")
    assert "small-llama" == TransformersAdapter().describe(tmp_path / "small-llama").name


def test_a_state_mixer_is_a_layer_without_a_query_side(tmp_path: Path) -> None:
    save_tiny(tmp_path, "bamba")
    mixer, attention, _ = TransformersAdapter().describe(tmp_path).layers
    assert ("model.layers.0.mamba", "mamba", {}) == (mixer.name, mixer.kind, mixer.query)
    # The scan's state is float32 for any dtype of the model; the convolution's inputs have the model's dtype.
    assert {
        "conv_shapes": ((160, 4),),
        "conv_dtypes": ("auto",),
        "recurrent_shapes": ((8, 16, 8),),
        "recurrent_dtypes": ("float32",),
    } == mixer.options
    assert ("model.layers.1.self_attn", "full_attention") == (attention.name, attention.kind)


def test_layers_of_both_kinds_come_in_the_order_they_run(tmp_path: Path) -> None:
    save_tiny(tmp_path, "falcon_h1")
    names = [layer.name.removeprefix("model.layers.") for layer in TransformersAdapter().describe(tmp_path).layers]
    assert ["0.mamba", "0.self_attn", "1.mamba", "1.self_attn"] == names


def test_a_family_with_mixers_may_have_none(tmp_path: Path) -> None:
    path = write_config(tmp_path, "lfm2", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    assert ["full_attention"] * 2 == [layer.kind for layer in TransformersAdapter().describe(path).layers]


def test_a_model_without_positions_takes_a_million_tokens(tmp_path: Path) -> None:
    path = write_config(tmp_path, "mamba2", num_hidden_layers=1)
    assert 1_048_576 == TransformersAdapter().describe(path).max_model_len


def test_bidirectional_attention_is_refused_by_its_layer(tmp_path: Path) -> None:
    # Its name makes it look like a generator, but it is not a decoder: tokens would see later ones.
    message = refusal(write_config(tmp_path, "bert", architectures=["BertLMHeadModel"]))
    assert message.startswith("layer 'bert.encoder.layer.0.attention.self' of ")
    assert "looks at tokens that come later" in message


def test_attention_past_the_interface_is_refused(tmp_path: Path) -> None:
    assert "(FalconForCausalLM) has no attention layer that goes through transformers' attention interface" in refusal(
        write_config(tmp_path, "falcon", alibi=True)
    )


def test_each_call_of_a_module_is_a_layer(tmp_path: Path) -> None:
    """DiffLlama attends twice with the same keys, and with other values."""
    layers = TransformersAdapter().describe(write_config(tmp_path, "diffllama", num_hidden_layers=2)).layers
    assert [f"model.layers.{layer}.self_attn{call}" for layer in (0, 1) for call in ("", "#2")] == [
        layer.name for layer in layers
    ]
    assert {None} == {layer.shares_with for layer in layers}


def test_a_model_that_makes_no_text_is_refused(tmp_path: Path) -> None:
    assert "has the architecture 'vit', for which transformers has no text model" in refusal(
        write_config(tmp_path, "vit")
    )


def test_an_unknown_model_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nosuch"}')
    assert "names the architecture 'nosuch', which transformers" in refusal(tmp_path)


def test_a_config_without_model_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert "names no model_type" in refusal(tmp_path)


def test_a_wrong_value_is_refused_with_the_field(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "big"}')
    assert "Field 'hidden_size' expected int" in refusal(tmp_path)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    assert "holds no model config" in refusal(tmp_path)


def test_a_model_that_takes_no_positions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvframe_transformers.discovery.computes_waves", lambda _: False)
    assert "(PegasusXForConditionalGeneration) takes no position_ids" in refusal(write_config(tmp_path, "pegasus_x"))
