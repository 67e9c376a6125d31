"""``kvframe embed`` on tiny models on disk: text in, one line of JSON for each out, or a few words for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from click.testing import CliRunner, Result
from kvframe_transformers.testing import save_tiny
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvframe.cli import main
from tests.programs import run_program
from tests.support.commands import without_start, write

WORDS = ["[PAD]", "[CLS]", "[SEP]", "the", "cat", "sat", "on", "a", "mat"]


@attrs.frozen
class Models:
    """Checkpoints in one folder: ``encoder`` has a tokenizer and says to normalize, ``decoder`` has neither."""

    folder: Path
    encoder: Any
    decoder: Any


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    encoder = folder / "encoder"
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(encoder)
    steps = ("Transformer", "Pooling", "Normalize")
    modules = [{"type": f"sentence_transformers.models.{step}", "path": step} for step in steps]
    write(encoder / "modules.json", modules)
    (encoder / "Pooling").mkdir()
    write(encoder / "Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    return Models(folder, save_tiny(encoder, "bert"), save_tiny(folder / "decoder", "qwen3"))


@pytest.fixture
def here(saved: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with the models, ``texts.txt`` and ``ids.json``."""
    for model in saved.folder.iterdir():
        (tmp_path / model.name).symlink_to(model)
    write(tmp_path / "texts.txt", "the cat sat\n\non a mat\n")
    write(tmp_path / "ids.json", [[5, 6, 7], list(range(20, 60))])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["embed", *arguments])


def run_json(*arguments: str) -> list[Any]:
    result = run(*arguments, "--json")
    assert (0, "") == (result.exit_code, without_start(result.stderr)), result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def states(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([token_ids])).last_hidden_state[0]
    return found


def test_each_text_is_an_object_on_a_line(here: Path, saved: Models) -> None:
    first, second = run_json("encoder", "--texts", "texts.txt")
    assert ["text", "token_ids", "num_tokens", "embedding", "finish_reason", "error"] == list(first)
    assert ("the cat sat", [1, 3, 4, 5, 2], 5) == (first["text"], first["token_ids"], first["num_tokens"])
    assert ("on a mat", "computed", None) == (second["text"], second["finish_reason"], second["error"])
    expected = torch.nn.functional.normalize(states(saved.encoder, [1, 3, 4, 5, 2]).mean(0), dim=0)
    torch.testing.assert_close(torch.tensor(first["embedding"]), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("pooling", "row"), [("cls", 0), ("last", -1)])
def test_options_override_the_checkpoint(here: Path, saved: Models, pooling: str, row: int) -> None:
    found = run_json("encoder", "--token-ids", "ids.json", "--pooling", pooling, "--no-normalize")
    expected = states(saved.encoder, [5, 6, 7])[row]
    torch.testing.assert_close(torch.tensor(found[0]["embedding"]), expected, rtol=0, atol=1e-4)


def test_a_decoder_gives_its_last_token(here: Path, saved: Models) -> None:
    found = run_json("decoder", "--token-ids", "ids.json", "--memory", "8MiB")
    expected = states(saved.decoder.base_model, list(range(20, 60)))[-1]
    torch.testing.assert_close(torch.tensor(found[1]["embedding"]), expected, rtol=0, atol=1e-4)
    assert (None, 40) == (found[1]["text"], found[1]["num_tokens"])


def test_people_see_size_length_and_the_first_numbers(here: Path) -> None:
    result = run("encoder", "--texts", "texts.txt")
    lines = result.stdout.splitlines()
    assert (0, "the cat sat", "on a mat") == (result.exit_code, lines[0], lines[3])
    assert lines[1].startswith("5 tokens, 64 dimensions, length 1.0000: ")
    assert lines[1].endswith(" …")


def test_texts_come_from_json_and_from_standard_input(here: Path) -> None:
    by_file = run_json("encoder", "--texts", "texts.txt")
    write(here / "texts.json", ["the cat sat", "on a mat"])
    write(here / "texts.jsonl", '{"text": "the cat sat"}\n"on a mat"\n')
    assert by_file == run_json("encoder", "--texts", "texts.json") == run_json("encoder", "--texts", "texts.jsonl")
    piped = CliRunner().invoke(main, ["embed", "encoder", "--texts", "-", "--json"], input="the cat sat\non a mat\n")
    assert by_file == [json.loads(line) for line in piped.stdout.splitlines()]


def test_a_refused_text_is_named_in_its_place_and_the_others_finish(here: Path) -> None:
    write(here / "texts.json", ["the cat", "", "a " * 200, "mat"])
    result = run("encoder", "--texts", "texts.json", "--json")
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert 1 == result.exit_code
    assert ["computed", "refused", "refused", "computed"] == [each["finish_reason"] for each in found]
    assert [None, "the text is empty", None] == [found[0]["error"], found[1]["error"], found[3]["error"]]
    assert "the prompt has 202 tokens, but a request has at most 128" == found[2]["error"]
    assert (None, None) == (found[1]["embedding"], found[2]["embedding"])
    shown = run("encoder", "--texts", "texts.json").stdout
    assert "refused: the text is empty" in shown


def test_a_text_that_is_no_unicode_is_refused_and_printed(here: Path) -> None:
    (here / "texts.jsonl").write_text('"the cat"\n"\\ud800"\n')
    result = run("encoder", "--texts", "texts.jsonl", "--json")
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [("the cat", "computed"), ("\ud800", "refused")] == [(each["text"], each["finish_reason"]) for each in found]
    shown = run("encoder", "--texts", "texts.jsonl").stdout
    assert "\\ud800\nrefused: the prompt is not Unicode text" in shown


@pytest.mark.parametrize("given", [[], ["--texts", "texts.txt", "--token-ids", "ids.json"]])
def test_texts_come_from_one_place(here: Path, given: list[str]) -> None:
    result = run("encoder", *given)
    assert 2 == result.exit_code
    assert "give texts by one of --texts and --token-ids" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere", "--texts", "texts.txt"], "there is no file or folder nowhere"),
        (["encoder", "--texts", "missing.txt"], "missing.txt cannot be read"),
        (["encoder", "--texts", "empty.txt"], "empty.txt holds no text"),
        (["decoder", "--texts", "texts.txt", "--memory", "8MiB"], "decoder has no tokenizer"),
    ],
)
def test_a_mistake_is_one_sentence(here: Path, arguments: list[str], says: str) -> None:
    write(here / "empty.txt", "\n")
    result = run(*arguments)
    assert 2 == result.exit_code
    assert without_start(result.stderr).startswith("kvframe: error: ")
    assert says in result.stderr
    assert 1 == without_start(result.stderr).count("\n")


def test_generating_with_an_encoder_names_this_command(here: Path) -> None:
    result = CliRunner().invoke(main, ["generate", "encoder", "--prompt", "the cat"])
    assert 2 == result.exit_code
    assert "encoder does not generate text" in result.stderr
    assert "`kvframe embed`" in result.stderr


def test_plan_and_explain_say_that_nothing_is_kept(here: Path) -> None:
    note = "no layer keeps anything of the past: each prompt is computed in one step, and no prefix is cached"
    for command in ("plan", "explain"):
        shown = CliRunner().invoke(main, [command, "encoder"])
        assert (0, 1) == (shown.exit_code, " ".join(shown.stdout.split()).count(note))
        found = json.loads(CliRunner().invoke(main, [command, "encoder", "--json"]).stdout)
        assert note == found["note"]
    assert found["layers"][0]["group"] is None
    assert "no cache is needed" in CliRunner().invoke(main, ["plan", "encoder"]).stdout


def test_it_prints_nothing_but_its_start_in_a_pipe(here: Path) -> None:
    done = run_program("-m", "kvframe", "embed", "encoder", "--texts", "texts.txt", "--json", cwd=here)
    assert (0, "", 2) == (done.returncode, without_start(done.stderr), len(done.stdout.splitlines()))
