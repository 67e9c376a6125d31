"""The adapter's description of encoder-decoder models, and its changes to one while an engine serves it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kvframe_transformers.adapter import TransformersAdapter
from kvframe_transformers.encoder_decoder import EncoderDecoderModel
from kvframe_transformers.testing import save_tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast

from kvframe.contract import ModelDescription, ModelError, RequestError

IDS = [5, 9, 17, 33, 2]


def describe(folder: Path, family: str, **overrides: Any) -> ModelDescription:
    AutoConfig.for_model(family, **overrides).save_pretrained(folder)
    return TransformersAdapter().describe(folder)


def load(folder: Path, family: str, **overrides: Any) -> EncoderDecoderModel:
    save_tiny(folder, family, **overrides)
    model = TransformersAdapter().load(folder, device="cpu", dtype="float32")
    assert isinstance(model, EncoderDecoderModel)
    return model


class Bound:
    """An engine's layer that returns zeros and keeps its bound parameters."""

    def __init__(self) -> None:
        self.parameters: Mapping[str, torch.Tensor] = {}

    def bind(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.parameters = parameters

    def __call__(self, query: Any, key: Any, value: Any, sinks: Any = None) -> torch.Tensor:
        return torch.zeros_like(query)


class Layers(Mapping[str, Bound]):
    """An engine's layers."""

    def __init__(self, names: Sequence[str]) -> None:
        self.skipped: tuple[str, ...] = ()
        self.kept_rows = None
        self.states: dict[str, Any] = {}
        self.entries: dict[str, Any] = {}
        self.layers = {name: Bound() for name in names}

    def __getitem__(self, name: str) -> Bound:
        return self.layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)


def layers_of(model: EncoderDecoderModel) -> Layers:
    return Layers([layer.name for layer in model.description.layers])


# --- the description --------------------------------------------------------------------------------------------------


def test_whisper_alternates_full_and_cross_attention(tmp_path: Path) -> None:
    heads = {"decoder_attention_heads": 20, "encoder_attention_heads": 20}
    description = describe(tmp_path, "whisper", d_model=1280, decoder_layers=4, **heads)
    assert ["full_attention", "cross_attention"] * 4 == [layer.kind for layer in description.layers]
    assert "model.decoder.layers.0.encoder_attn" == description.layers[1].name
    assert {"num_kv_heads": 20, "head_size": 64} == description.layers[1].options
    assert (448, {"encoder": 1500}) == (description.max_model_len, description.max_input_lens)


def test_bart_has_positions_for_both_sides(tmp_path: Path) -> None:
    description = describe(tmp_path, "bart", decoder_layers=2)
    assert (1024, {"encoder": 1024}) == (description.max_model_len, description.max_input_lens)
    assert {0.125} == {layer.query["scale"] for layer in description.layers}


def test_t5_adds_a_bias_by_distance_to_what_the_decoder_sees_of_itself(tmp_path: Path) -> None:
    description = describe(tmp_path, "t5", num_layers=2)
    bias = {"num_buckets": 32, "max_distance": 128, "bidirectional": False}
    assert [bias, None] * 2 == [layer.query.get("relative_bias") for layer in description.layers]
    assert {1.0} == {layer.query["scale"] for layer in description.layers}


@pytest.mark.parametrize(("options", "expected"), [({}, 512), ({"n_positions": 2048}, 2048)])
def test_t5_is_as_long_as_its_config_says_or_as_it_was_trained(
    options: dict[str, int], expected: int, tmp_path: Path
) -> None:
    description = describe(tmp_path, "t5", num_layers=1, **options)
    assert (expected, {"encoder": expected}) == (description.max_model_len, description.max_input_lens)


def test_a_model_that_only_decodes_brings_no_input(tmp_path: Path) -> None:
    assert {} == describe(tmp_path, "llama", num_hidden_layers=1).max_input_lens


# --- the inputs of requests -------------------------------------------------------------------------------------------


def test_ids_are_one_input_however_they_are_given(tmp_path: Path) -> None:
    model = load(tmp_path, "bart")
    prepared = [model.prepare_input("encoder", ids) for ids in (IDS, tuple(IDS), torch.tensor(IDS))]
    assert {5} == {prepared_input.num_tokens for prepared_input in prepared if prepared_input is not None}
    assert 1 == len({prepared_input.key for prepared_input in prepared if prepared_input is not None})
    other = model.prepare_input("encoder", [*IDS[:-1], 3])
    assert other is not None
    assert prepared[0] is not None
    assert other.key != prepared[0].key


def test_features_of_another_length_are_refused_in_the_models_own_words(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="Whisper expects the mel input features to be of length 100") as caught:
        load(tmp_path, "whisper").prepare_input("encoder", torch.zeros(80, 50))
    assert "bad_input" == caught.value.code


def test_an_input_of_another_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="takes no picture input"):
        load(tmp_path, "bart").prepare_input("picture", IDS)


def test_inputs_are_encoded_as_transformers_does_and_packed_in_their_order(tmp_path: Path) -> None:
    model, sizes = load(tmp_path, "bart"), []
    plain: Any = model.model
    inputs = [model.prepare_input("encoder", ids) for ids in (IDS, [7], IDS[::-1])]
    with torch.inference_mode():
        expected = [
            plain.get_encoder()(input_ids=prepared_input.data[None]).last_hidden_state[0]
            for prepared_input in inputs
            if prepared_input
        ]
    model.attach(layers_of(model))
    encoder = plain.get_encoder()
    handle = encoder.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    model.compute_inputs({"encoder": [prepared_input for prepared_input in inputs if prepared_input is not None]})
    handle.remove()
    torch.testing.assert_close(model._states[0], torch.cat(expected), rtol=0, atol=1e-5)
    assert [(2, 5), (1, 1)] == sizes
    model.compute_inputs({})
    assert (1, 2, 64) == tuple(model._states.shape)


@pytest.mark.parametrize(
    ("generation", "expected"), [({}, [3]), ({"forced_bos_token_id": 7}, [3, 7]), ({"decoder_start_token_id": 4}, [4])]
)
def test_a_request_starts_with_what_the_generation_config_forces(
    generation: dict[str, int], expected: list[int], tmp_path: Path
) -> None:
    model = load(tmp_path, "bart")
    for name, value in generation.items():
        setattr(model.model.generation_config, name, value)
    assert expected == model.start_token_ids()


def test_a_model_whose_configs_name_no_start_token_says_so(tmp_path: Path) -> None:
    model = load(tmp_path, "t5", decoder_start_token_id=None)
    model.model.generation_config.decoder_start_token_id = None
    with pytest.raises(ModelError, match="does not say which token a request starts with"):
        model.start_token_ids()


def test_text_for_the_decoder_follows_the_start_token_without_special_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "one": 5, "two": 6, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(tmp_path)
    model = load(tmp_path, "bart")
    assert [3, 5, 6] == model.start_token_ids("one two")
    prepared = model.prepare_input("encoder", "two one two")
    assert prepared is not None
    assert [6, 5, 6] == prepared.data.tolist()


# --- attaching --------------------------------------------------------------------------------------------------------


def test_all_layers_of_t5_read_the_first_ones_table(tmp_path: Path) -> None:
    model = load(tmp_path, "t5")
    layers = layers_of(model)
    model.attach(layers)
    table = model.model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    for name, layer in layers.items():
        if name.endswith("SelfAttention"):
            assert torch.equal(table, layer.parameters["relative_bias"])
        else:
            assert {} == layer.parameters


def test_each_layer_of_umt5_reads_its_own_table(tmp_path: Path) -> None:
    model = load(tmp_path, "umt5")
    layers = layers_of(model)
    model.attach(layers)
    for index, block in enumerate(model.model.decoder.block):
        bound = layers[f"decoder.block.{index}.layer.0.SelfAttention"].parameters["relative_bias"]
        assert torch.equal(block.layer[0].SelfAttention.relative_attention_bias.weight, bound)


def test_a_step_makes_no_bias_of_all_pairs_of_its_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(tmp_path, "t5")
    model.attach(layers_of(model))
    attention = type(model.model.decoder.block[0].layer[0].SelfAttention)
    monkeypatch.setattr(attention, "compute_bias", lambda *_, **__: pytest.fail("it made one"))
    model.compute_inputs({})
    model.forward(torch.tensor(IDS), torch.arange(5), torch.tensor([4]))


@pytest.mark.parametrize("family", ["bart", "t5", "whisper"])
def test_detaching_leaves_the_model_as_it_was(family: str, tmp_path: Path) -> None:
    model = load(tmp_path, family)
    plain: Any = model.model

    def logits() -> torch.Tensor:
        main_input = torch.ones(1, 80, 100) if family == "whisper" else torch.tensor([IDS])
        with torch.inference_mode():
            output = plain(**{plain.main_input_name: main_input}, decoder_input_ids=torch.tensor([[3, 4]]))
        logits_of_plain: torch.Tensor = output.logits
        return logits_of_plain

    before, implementation = logits(), plain.config._attn_implementation
    model.attach(layers_of(model))
    assert any(module._forward_pre_hooks for module in plain.modules())
    model.detach()
    model.detach()
    assert torch.equal(before, logits())
    assert implementation == plain.config._attn_implementation
    assert not any(module._forward_pre_hooks for module in plain.modules())


def test_a_layer_that_refuses_its_table_leaves_the_model_detached(tmp_path: Path) -> None:
    model = load(tmp_path, "t5")
    layers = layers_of(model)
    layers.layers["decoder.block.1.layer.0.SelfAttention"].bind = lambda parameters: pytest.fail("no")  # type: ignore[method-assign]
    with pytest.raises(pytest.fail.Exception):
        model.attach(layers)
    assert not any(module._forward_pre_hooks for module in model.model.modules())
    model.attach(layers_of(model))


def test_an_encoder_decoder_model_gives_no_embeddings(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has an encoder and a decoder"):
        load(tmp_path, "bart").without_head()
