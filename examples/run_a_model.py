"""Generate with a Hugging Face model through kvframe's paged cache.

    python examples/run_a_model.py MODEL_FOLDER "a prompt" "another prompt"

Without arguments it makes a tiny random model, which has no tokenizer, and gives it token ids instead of text.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import MistralConfig, MistralForCausalLM

from kvframe import Engine, SamplingParams, Stack
from kvframe.contract import KVFrameError


def save_tiny_model(path: Path) -> None:
    """Save a random Mistral of two layers whose queries see a window of 32 tokens."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=32,
        max_position_embeddings=512,
        initializer_range=0.15,
    )
    MistralForCausalLM(config).save_pretrained(path)


def run(path: Path, prompts: Sequence[str | Sequence[int]]) -> None:
    """Serve ``prompts`` as one batch, then stream the first one again."""
    stack = Stack.from_mapping({"cache": {"memory": "64MiB"}})
    params = SamplingParams(max_new_tokens=24)
    with Engine.from_pretrained(path, stack=stack) as engine:
        for output in engine.generate(prompts, params):
            print(output.error or output.text or list(output.token_ids))
        print("streamed: ", end="")
        for output in engine.stream(prompts[0], params):
            print(output.new_text or list(output.new_token_ids), end=" ", flush=True)
        stats = engine.stats()
        print(f"\n{stats.generated_tokens} tokens in {stats.steps} steps, {stats.peak_bytes_held:,} bytes held at most")
        print(f"{stats.cached_prompt_tokens} of {stats.prompt_tokens} prompt tokens came from the prefix cache")


def main(arguments: Sequence[str]) -> None:
    """Run the model and the prompts of the command line, or a tiny random model."""
    if arguments:
        path, *texts = arguments
        run(Path(path), texts or ["def "])
        return
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_model(Path(folder))
        run(Path(folder), [list(range(1, 40)), list(range(1, 60)), [7, 8, 9]])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KVFrameError as error:
        sys.exit(f"error: {error}")
