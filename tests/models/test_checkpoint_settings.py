"""A checkpoint's ``generation_config.json`` means what it means to ``generate()``."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from kvframe_transformers.testing import save_tiny
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from kvframe import Engine, Prompt, SamplingParams, Stack, describe
from kvframe.contract.errors import ModelError, RequestError
from tests.models.serving import PROMPTS
from tests.support.commands import run_json

NUM_NEW_TOKENS = 24
SOME = PROMPTS[1:4]
STACK = Stack.from_mapping({"cache": {"memory": "4MiB"}})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("settings") / "m"
    save_tiny(path, "llama")
    return path


def write(folder: Path, **entries: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **entries}))


def expected_of(folder: Path) -> list[tuple[int, ...]]:
    """Return what transformers generates after ``SOME`` by the checkpoint's own settings."""
    loader: Any = AutoModelForCausalLM
    model = loader.from_pretrained(folder).eval()
    with torch.inference_mode():
        generated = [model.generate(torch.tensor([prompt]), max_new_tokens=NUM_NEW_TOKENS)[0] for prompt in SOME]
    return [tuple(tokens[len(prompt) :].tolist()) for tokens, prompt in zip(generated, SOME, strict=True)]


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[tuple[int, ...]]:
    """What transformers generates without settings."""
    write(folder)
    return expected_of(folder)


def tokens_of(folder: Path, prompts: Any) -> list[tuple[int, ...]]:
    with Engine.from_pretrained(folder, stack=STACK) as engine:
        params = engine.default_params(max_new_tokens=NUM_NEW_TOKENS)
        return [output.token_ids for output in engine.generate(prompts, params)]


SETTINGS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "suppress_tokens": {"suppress_tokens": [*range(0, 128, 3)]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [*range(1, 128, 2)]},
    "bad_words_ids": {"bad_words_ids": [[89], [2], *([token, other] for token in range(60) for other in (42, 70))]},
    "min_new_tokens": {"eos_token_id": [*range(0, 128, 2)], "min_new_tokens": 5},
    "all": {"repetition_penalty": 0.8, "no_repeat_ngram_size": 3, "suppress_tokens": [*range(64)], "top_k": 3},
    "sampling with one token": {"do_sample": True, "top_k": 1, "repetition_penalty": 1.3},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_generate(folder: Path, plain: list[tuple[int, ...]], name: str) -> None:
    write(folder, **SETTINGS[name])
    expected = expected_of(folder)
    assert plain != expected
    assert expected == tokens_of(folder, SOME)


def test_an_encoder_decoder_is_read_likewise(tmp_path: Path) -> None:
    save_tiny(tmp_path / "m", "bart")
    settings: dict[str, Any] = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "begin_suppress_tokens": [5, 9]}
    entries = json.loads((tmp_path / "m" / "generation_config.json").read_text())
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps({**entries, **settings}))
    loader: Any = AutoModelForSeq2SeqLM
    model = loader.from_pretrained(tmp_path / "m").eval()
    prompts = [[5, 9, 17, 40, 2], [8, 4, 66, 23, 11, 90, 2]]
    with torch.inference_mode():
        expected = [
            # The first token is the one that the decoder starts with.
            model.generate(torch.tensor([prompt]), max_new_tokens=NUM_NEW_TOKENS)[0, 1:].tolist()
            for prompt in prompts
        ]
    assert [tuple(tokens) for tokens in expected] == tokens_of(
        tmp_path / "m", [Prompt(encoder=prompt) for prompt in prompts]
    )


def test_a_request_without_parameters_gets_those_of_the_checkpoint(folder: Path) -> None:
    write(folder, do_sample=True, temperature=0.7, top_k=-1, top_p=0.9, min_p=0.1, max_new_tokens=5)
    expected = SamplingParams(temperature=0.7, top_p=0.9, min_p=0.1, max_new_tokens=5)
    with Engine.from_pretrained(folder, stack=STACK) as engine:
        assert expected == engine.default_params()
        assert 0.0 == engine.default_params(temperature=0).temperature
        assert 5 == len(engine.generate([PROMPTS[1]])[0].token_ids)
        with pytest.raises(RequestError, match="top_k must be a whole number"):
            engine.default_params(top_k=-3)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.7, "top_k": 5}, {}),
        ({"do_sample": True}, {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}),
        ({"do_sample": True, "temperature": 0.0, "top_k": 0}, {"temperature": 0.0, "top_k": 0, "top_p": 1.0}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"bad_words_ids": [[2], [5]]}, {"bad_words_ids": [[5]]}),
        ({"bad_words_ids": [[2]]}, {}),
    ],
    ids=["none", "unused", "usual", "greedy", "penalty", "without ends", "ends only"],
)
def test_what_a_description_says(folder: Path, entries: dict[str, Any], expected: dict[str, Any]) -> None:
    write(folder, **entries)
    sampling = describe(folder).sampling
    assert expected == {name: sampling[name] for name in expected}
    assert bool(expected) == bool(sampling)


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"do_sample": True, "temperature": "hot"}, "temperature must be 0"),
        ({"do_sample": True, "top_p": 1.5}, "top_p must be above 0"),
        ({"repetition_penalty": -1.0}, "repetition_penalty must be a positive number"),
        ({"suppress_tokens": [5, 128]}, r"holds 128; the model has the tokens \[0, 128\)"),
        ({"bad_words_ids": [5]}, "bad_words_ids must be a list of non-empty lists"),
    ],
    ids=["temperature", "top_p", "penalty", "token", "words"],
)
def test_settings_that_cannot_be_meant_are_refused_at_the_start(
    folder: Path, entries: dict[str, Any], says: str
) -> None:
    write(folder, **entries)
    with pytest.raises(ModelError, match=f"the sampling parameters of m cannot be meant: .*{says}"):
        Engine.from_pretrained(folder, stack=STACK)


def test_settings_that_are_not_served_are_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(folder, num_beams=4, forced_decoder_ids=[[1, 7]], epsilon_cutoff=0.0, length_penalty=2.0)
    with caplog.at_level(logging.WARNING, "kvframe"), Engine.from_pretrained(folder, stack=STACK):
        pass
    assert [
        "m: its generation config has entries that are not served: forced_decoder_ids = [[1, 7]], num_beams = 4"
    ] == caplog.messages


def test_a_model_in_memory_is_read_likewise(folder: Path) -> None:
    write(folder, repetition_penalty=1.3, max_new_tokens=6)
    loader: Any = AutoModelForCausalLM
    model = loader.from_pretrained(folder).eval()
    with Engine.from_model(model, stack=STACK) as engine:
        assert SamplingParams(repetition_penalty=1.3, max_new_tokens=6) == engine.default_params()


def test_the_command_line_takes_the_settings_unless_it_names_others(folder: Path) -> None:
    write(folder, suppress_tokens=[*range(0, 128, 3)], max_new_tokens=7)
    prompt = PROMPTS[1]

    def generated(*options: str) -> Any:
        arguments = ["generate", str(folder), "--memory", "4MiB", "--prompt-token-ids", "-", "--json", *options]
        return run_json(*arguments, input=json.dumps(prompt))["outputs"][0]["token_ids"]

    expected = tokens_of(folder, [prompt])[0]
    assert [*expected[:7]] == generated()
    assert [*expected[:4]] == generated("--max-new-tokens", "4")
    penalised = generated("--repetition-penalty", "1.5")
    write(folder, suppress_tokens=[*range(0, 128, 3)], repetition_penalty=1.5)
    assert [*tokens_of(folder, [prompt])[0][:7]] == penalised
