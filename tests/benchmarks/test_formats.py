"""The benchmark of formats runs, and what is recorded keeps what the project promises."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import click
import pytest
from kvframe_transformers.testing import save_tiny
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from benchmarks.attention import formats
from tests.benchmarks.calling import ROOT, measured, page_of, record_of

FORMATS = ("fp8_tensor", "fp8_token_head", "int4_token_head", "int8_token_head")
PLAIN = ("float32", "float16", "bfloat16")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, folder = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("results")
    save_tiny(model, "llama", vocab_size=512)
    letters = {letter: index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(model)
    sizes = [
        "--texts",
        "2",
        "--context",
        "32",
        "--repeats",
        "1",
        "--threads",
        "1",
        "--backend",
        "torch",
        "--backend",
        "cpu",
    ]
    return measured(folder, "attention.formats", *sizes, "--model", str(model))


def test_every_format_is_measured_in_every_way(results: Path) -> None:
    record = record_of("formats", results)
    for part in (record["model"]["ways"], record["memory"]):
        assert (*PLAIN, *FORMATS) == tuple(part)
    rows = record["speed"]["rows"]
    assert {
        (backend, dtype, name)
        for backend in ("torch", "cpu")
        for dtype in ("float32", "bfloat16")
        for name in ("plain", *FORMATS)
    } == {(row["backend"], row["dtype"], row["format"]) for row in rows}
    exact = record["model"]["ways"]["float32"]
    assert 0 == exact["logprob_difference_max"]


def test_the_page_has_a_row_for_each(results: Path) -> None:
    page = page_of("formats", results)
    rows = re.findall(r"^\| `([a-z0-9_]+)` \|", page, re.M)
    assert 2 * [*PLAIN, *FORMATS] == rows[:14]
    assert "torch" in rows[14:]


def test_the_other_texts_are_not_what_the_model_was_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "demo"))
    trained_on = set(importlib.import_module("make_model").MODULES)
    assert set(formats.LEARNED) <= trained_on
    assert not set(formats.OTHER) & trained_on


def test_a_copy_task_asks_for_the_segment_between_its_last_marks() -> None:
    for prompt, answer in formats.make_copy_tasks(3):
        assert (2, 0) == (prompt[-1], answer[-1])
        assert [1, *answer[:-1], 2] == prompt[-42:]
        assert (4, 4, 3) == (prompt.count(1), prompt.count(2), prompt.count(0))


def test_copied_tokens_count_one_by_one() -> None:
    tasks = [([9], [3, 4, 5, 0]), ([9], [6, 7, 8, 0])]
    assert 6 / 8 == formats.share_right([[3, 4, 5, 0, 17], [6, 3, 8, 8, 17]], tasks)
    assert formats.share_right([], []) is None


def test_a_model_that_does_not_copy_is_not_measured_by_copies() -> None:
    formats.check_copying(0.96)
    formats.check_copying(None)
    with pytest.raises(click.ClickException, match=r"copies 90\.0% of the tokens right; it has to copy 95%"):
        formats.check_copying(0.9)


# --- the recorded run -------------------------------------------------------------------------------------------------


def test_a_token_takes_what_its_format_says() -> None:
    # 32 layers, keys and values of 8 heads of 128.
    vectors = 32 * 2 * 8
    expected = {
        "bfloat16": 256,
        "fp8_tensor": 128,
        "fp8_token_head": 132,
        "int8_token_head": 132,
        "int4_token_head": 68,
    }
    measured = record_of("formats")["memory"]
    assert {name: vectors * size for name, size in expected.items()} == {
        name: measured[name]["bytes_per_token"] for name in expected
    }


def test_fewer_bits_cost_little_on_the_trained_model() -> None:
    ways = record_of("formats")["model"]["ways"]
    exact = ways["float32"]["perplexity"]
    assert ways["int8_token_head"]["perplexity"] / exact < 1.002
    for name in ("fp8_tensor", "fp8_token_head"):
        assert ways[name]["perplexity"] / exact < 1.02
    assert ways["int4_token_head"]["perplexity"] / exact < 1.1
