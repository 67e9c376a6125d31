"""Prompts from files: text, JSON, JSON lines and token ids."""

from pathlib import Path

import pytest
from kvframe_engine.commands.prompts import read_prompt_token_ids, read_prompts

from kvframe.contract.errors import RequestError


def write(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_text_file_holds_one_prompt_a_line(tmp_path: Path) -> None:
    assert read_prompts(write(tmp_path, "p.txt", "one two\n\n  three\n")) == ["one two", "  three"]


def test_a_json_file_holds_a_list(tmp_path: Path) -> None:
    assert read_prompts(write(tmp_path, "p.json", '["a\\nb", "c"]')) == ["a\nb", "c"]


def test_json_lines_hold_strings_or_objects_with_a_prompt(tmp_path: Path) -> None:
    assert read_prompts(write(tmp_path, "p.jsonl", '"a"\n{"prompt": "b", "id": 1}\n')) == ["a", "b"]


@pytest.mark.parametrize("text", ["[[1, 2], [3]]", "[1, 2]\n[3]\n"])
def test_token_ids_come_as_a_list_of_lists_or_as_lines(tmp_path: Path, text: str) -> None:
    assert read_prompt_token_ids(write(tmp_path, "p.json", text)) == [[1, 2], [3]]


def test_one_flat_list_of_token_ids_is_one_prompt(tmp_path: Path) -> None:
    assert read_prompt_token_ids(write(tmp_path, "p.json", "[1, 2]")) == [[1, 2]]


def test_an_empty_list_of_token_ids_stays_for_the_engine_to_refuse(tmp_path: Path) -> None:
    assert read_prompt_token_ids(write(tmp_path, "p.json", "[[1], []]")) == [[1], []]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("p.txt", "\n\n", "holds no prompt"),
        ("p.json", '["a"', r"p.json is not valid JSON"),
        ("p.json", '["a", 2]', r"p.json\[1\]: a prompt is a string, not 2"),
        ("p.jsonl", '"a"\n{"text": "b"}', "p.jsonl line 2: a prompt is a string, not null"),
    ],
)
def test_a_bad_file_of_prompts_is_named_with_its_place(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        read_prompts(write(tmp_path, name, text))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1]\n[2", "line 2 is not valid JSON"),
        ("[[1], [2.0]]", r"\[1\]: a prompt is a list of token ids \(whole numbers\), not \[2.0\]"),
        ("[[1], [true]]", r"\[1\]: a prompt is a list of token ids \(whole numbers\), not \[true\]"),
        ('{"a": 1}', "prompts are JSON lists of token ids"),
        ("[]", "holds no prompt"),
    ],
)
def test_a_bad_file_of_token_ids_is_named_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        read_prompt_token_ids(write(tmp_path, "p.json", text))


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"none.txt cannot be read: No such file"):
        read_prompts(tmp_path / "none.txt")


def test_a_file_that_is_no_text_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError, match=r"is not UTF-8 text"):
        read_prompts(path)
