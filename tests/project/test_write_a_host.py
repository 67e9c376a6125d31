"""The host of ``examples/write_a_host.py`` serves models of every kind of state as ``generate`` does."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from kvframe_transformers.testing import save_tiny
from transformers import AutoModelForCausalLM

from kvframe import Stack

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "write_a_host.py"
NUM_NEW = 8
PROMPTS = [[*range(5, 45), 60 + index] for index in range(4)] + [[7, 8, 9]]


@pytest.fixture(scope="module")
def host_class() -> Any:
    return runpy.run_path(str(EXAMPLE))["Host"]


def expected(path: Path, prompt: list[int]) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None)
    return list(tokens[0].tolist())


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "jamba", "deepseek_v3"])
def test_it_serves_what_generate_gives_and_finds_prefixes(host_class: Any, family: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, family)
    tables = {
        "cache": {"memory": "4MiB", "block_size": 4},
        "model": {"device": "cpu", "dtype": "float32"},
        "limits": {"max_num_seqs": 3, "max_num_batched_tokens": 16},
    }
    host = host_class(str(tmp_path), Stack.from_mapping(tables))
    expected_tokens = [expected(tmp_path, prompt) for prompt in PROMPTS]
    for _ in range(2):
        requests = host.generate(PROMPTS, NUM_NEW)
        assert expected_tokens == [list(request.token_ids) for request in requests]
    assert all(request.num_hit >= 32 for request in requests[:4])
    assert 0 == host.manager.num_held_pages


def test_it_is_short() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 150
