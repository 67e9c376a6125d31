"""Encoders, and decoders without their heads: their descriptions, and packed batches that give the plain states."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kvframe_transformers.adapter import TransformersAdapter
from kvframe_transformers.checkpoint import quiet
from kvframe_transformers.encoders import find_first_position, generates, num_unused_positions
from kvframe_transformers.testing import ENCODER_FAMILIES, FAMILIES, save_tiny, tiny_config, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from kvframe.contract import ModelError, Pooling

POOLING = "sentence_transformers.models.Pooling"


def prompt(length: int, seed: int) -> list[int]:
    # Without the ids that stand for padding.
    return torch.randint(4, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [prompt(3, 1), prompt(21, 2), prompt(1, 3), prompt(128, 4)]


def hidden_states(model: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [model(torch.tensor([ids]), use_cache=False).last_hidden_state[0] for ids in prompts]


# --- the description --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ENCODER_FAMILIES)
def test_an_encoder_is_described(family: str, tmp_path: Path) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    description = TransformersAdapter().describe(tmp_path)
    assert {"encoder_only"} == {layer.kind for layer in description.layers}
    assert (3, False) == (len(description.layers), description.generates)
    # Two rows of RoBERTa's tables stand for no position.
    assert 128 == description.max_model_len


@pytest.mark.parametrize(
    ("family", "architectures", "expected"),
    [
        ("bert", ["BertModel"], False),
        ("bert", ["BertForMaskedLM"], False),
        ("bert", ["BertForSequenceClassification"], False),
        ("bert", None, False),
        ("bert", ["BertLMHeadModel"], True),
        ("distilbert", ["DistilBertForMaskedLM"], False),
        ("llama", ["LlamaForCausalLM"], True),
        ("llama", None, True),
        ("llama", ["LlamaModel"], False),
        ("llama4", ["Llama4ForConditionalGeneration"], True),
        ("bart", ["BartModel"], True),
    ],
)
def test_a_config_says_whether_its_model_generates(family: str, architectures: Any, expected: bool) -> None:
    assert expected == generates(AutoConfig.for_model(family, architectures=architectures))


def test_an_encoder_that_was_made_a_decoder_of_generates() -> None:
    assert generates(AutoConfig.for_model("bert", is_decoder=True))


def test_a_window_in_both_directions_is_that_of_its_layer(tmp_path: Path) -> None:
    AutoConfig.for_model("modernbert", num_hidden_layers=3).save_pretrained(tmp_path)
    sizes = [
        (layer.options.get("window"), layer.options.get("lookahead"))
        for layer in TransformersAdapter().describe(tmp_path).layers
    ]
    assert [(None, None), (65, 64), (65, 64)] == sizes


# --- positions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "first"), [("bert", 0), ("distilbert", 0), ("roberta", 2), ("eurobert", 0)])
def test_a_model_counts_positions_from_what_it_looks_up(family: str, first: int) -> None:
    model = tiny_model(family)
    assert (first, first) == (find_first_position(model), num_unused_positions(model))


def test_a_model_that_counts_otherwise_than_its_table_says_is_refused() -> None:
    model: Any = tiny_model("bert")
    model.embeddings.position_embeddings.padding_idx = 4
    with pytest.raises(ModelError, match="BertModel counts positions from 0, and its table has 5 rows before"):
        find_first_position(model)


# --- packed batches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ENCODER_FAMILIES)
def test_packed_prompts_give_the_plain_hidden_states(family: str, tmp_path: Path, dense_layers: Any) -> None:
    expected = hidden_states(save_tiny(tmp_path, family), PROMPTS)
    model = TransformersAdapter().load(tmp_path, device="cpu", dtype="float32")
    layers = dense_layers(model.description.layers)
    model.attach(layers)
    for want, have in zip(expected, layers.run_packed(model, PROMPTS), strict=True):
        torch.testing.assert_close(have, want, rtol=0, atol=1e-4)
    model.self_check(partial(layers.run_packed, model))
    model.detach()
    for want, have in zip(expected, hidden_states(model.model, PROMPTS), strict=True):
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_without_its_head_gives_the_plain_hidden_states(
    family: str, tmp_path: Path, dense_layers: Any
) -> None:
    plain: Any = save_tiny(tmp_path, family)
    expected = hidden_states(plain.base_model, PROMPTS[:3])
    loaded = TransformersAdapter().load(tmp_path, device="cpu", dtype="float32")
    model = loaded.without_head()
    assert (True, False) == (loaded.description.generates, model.description.generates)
    # Rules of a stack can still name the layers.
    assert loaded.description.layers == model.description.layers
    layers = dense_layers(model.description.layers)
    model.attach(layers)
    for want, have in zip(expected, layers.run_packed(model, PROMPTS[:3]), strict=True):
        torch.testing.assert_close(have, want, rtol=0, atol=2e-4)
    model.self_check(partial(layers.run_packed, model))
    with pytest.raises(ModelError, match="serves another engine already"):
        loaded.attach(dense_layers(loaded.description.layers))


def test_a_wrong_mask_is_found_by_the_self_check(tmp_path: Path, dense_layers: Any) -> None:
    save_tiny(tmp_path, "bert")
    model = TransformersAdapter().load(tmp_path, device="cpu", dtype="float32")
    layers = dense_layers(model.description.layers)
    model.attach(layers)

    def one_by_one(prompts: list[list[int]], last_only: bool = False) -> list[torch.Tensor]:
        outputs = []
        for ids in prompts:
            # Token by token, none sees later tokens.
            layers.run_packed(model, [ids[:1]])
            outputs.append(torch.cat([layers.step(model, {0: [token]})[0] for token in ids]))
        return outputs

    with pytest.raises(ModelError, match=r"gives other hidden states in a packed batch than alone, from layer"):
        model.self_check(one_by_one)


def test_a_checkpoint_with_a_head_is_loaded_without_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with_head = AutoModelForMaskedLM.from_config(tiny_config("bert")).eval()
    with quiet():
        with_head.save_pretrained(tmp_path)
    model: Any = TransformersAdapter().load(tmp_path, device="cpu", dtype="float32")
    (expected,) = hidden_states(with_head.base_model, PROMPTS[:1])
    assert torch.equal(expected, hidden_states(model.model, PROMPTS[:1])[0])
    assert model.without_head() is model


def test_a_decoder_that_was_saved_without_a_head_is_for_its_hidden_states(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(tiny_config("llama")).eval()
    with quiet():
        plain.base_model.save_pretrained(tmp_path)
    model = TransformersAdapter().load(tmp_path, device="cpu", dtype="float32")
    assert not model.description.generates
    assert {"full_attention"} == {layer.kind for layer in model.description.layers}


# --- files of sentence-transformers -----------------------------------------------------------------------------------


def write_modules(folder: Path, *kinds: str, **pooling: Any) -> None:
    paths = {kind: f"{index}_{kind.rpartition('.')[2]}" for index, kind in enumerate(kinds)}
    (folder / "modules.json").write_text(
        json.dumps([{"idx": index, "path": paths[kind], "type": kind} for index, kind in enumerate(kinds)])
    )
    if POOLING in paths:
        (folder / paths[POOLING]).mkdir()
        (folder / paths[POOLING] / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **pooling}))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_tiny(tmp_path, "bert")
    return tmp_path


def pooling_of(folder: Path) -> Pooling | None:
    return TransformersAdapter().load(folder, device="cpu", dtype="float32").pooling()


def test_a_checkpoint_without_such_files_says_nothing(saved: Path) -> None:
    assert pooling_of(saved) is None


@pytest.mark.parametrize(
    ("pooling", "mode"),
    [
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
@pytest.mark.parametrize("normalizes", [True, False])
def test_pooling_and_normalizing_are_read(saved: Path, pooling: Any, mode: Any, normalizes: bool) -> None:
    more = ["sentence_transformers.models.Normalize"] if normalizes else []
    write_modules(saved, "sentence_transformers.models.Transformer", POOLING, *more, **pooling)
    assert Pooling(mode, normalizes) == pooling_of(saved)


@pytest.mark.parametrize(
    ("kinds", "pooling", "what"),
    [
        ([POOLING], {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        (
            [POOLING],
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "pooling_mode_cls_token and pooling_mode_mean_tokens",
        ),
        ([POOLING], {}, "no pooling mode"),
        ([POOLING], {"pooling_mode": 5}, "5"),
        ([POOLING], {"pooling_mode": [["mean"]]}, r"\['mean'\]"),
        ([POOLING], {"pooling_mode": {"mean": True}}, r"{'mean': True}"),
        ([POOLING, "sentence_transformers.models.Dense"], {"pooling_mode_cls_token": True}, "the module Dense"),
        (["sentence_transformers.models.Transformer"], {}, "no pooling"),
    ],
)
def test_what_kvframe_does_not_do_is_refused_by_name(saved: Path, kinds: list[str], pooling: Any, what: str) -> None:
    write_modules(saved, *kinds, **pooling)
    with pytest.raises(ModelError, match=f"asks for {what}, and kvframe makes embeddings of"):
        pooling_of(saved)


@pytest.mark.parametrize(
    ("config", "is_refused"),
    [
        ({"default_prompt_name": None, "prompts": {"query": "query: "}}, False),
        ({"default_prompt_name": "document", "prompts": {"query": "query: ", "document": ""}}, False),
        ({"default_prompt_name": "query", "prompts": {"query": "query: "}}, True),
    ],
)
def test_words_that_a_checkpoint_wants_before_each_text_are_not_left_out(
    saved: Path, config: Any, is_refused: bool
) -> None:
    write_modules(saved, POOLING, pooling_mode_mean_tokens=True)
    (saved / "config_sentence_transformers.json").write_text(json.dumps(config))
    if not is_refused:
        assert Pooling("mean", False) == pooling_of(saved)
        return
    with pytest.raises(ModelError, match="asks for the prompt 'query' before each text"):
        pooling_of(saved)


@pytest.mark.parametrize(("text", "why"), [("{", "cannot be read"), ('{"a": 1}', "holds a dict, not a list")])
def test_files_that_are_broken_say_so(saved: Path, text: str, why: str) -> None:
    (saved / "modules.json").write_text(text)
    with pytest.raises(ModelError, match=why):
        pooling_of(saved)
