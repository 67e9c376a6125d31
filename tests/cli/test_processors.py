"""Logits processors on the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from kvframe_engine.testing.logits_processors import byte_tokenizer_json
from kvframe_transformers.testing import save_tiny
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from kvframe.cli import main


def test_a_processor_is_named_with_its_options(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    save_tiny(folder, "llama", vocab_size=257, eos_token_id=256)
    tokenizer = Tokenizer.from_str(byte_tokenizer_json())
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)

    def run(*options: str) -> Any:
        arguments = ["--memory", "4MiB", "--device", "cpu", "--prompt", "a", "--json", *options]
        return CliRunner().invoke(main, ["generate", str(folder), *arguments])

    result = run("--processor", json.dumps({"name": "guided", "regex": "[0-9]{2}-[0-9]"}))
    assert 0 == result.exit_code, result.output
    assert re.fullmatch("[0-9]{2}-[0-9]", json.loads(result.stdout)["outputs"][0]["text"])
    refused = run("--processor", "guided")
    assert 2 == refused.exit_code
    assert "guided takes one of" in refused.stderr
