"""Save a system prompt's pages in one process, and load them in another, which need not compute them.

    python examples/save_a_system_prompt.py

It makes a random model and saves the prefix. A second process measures how long a question after it waits for its
first token: with the prompt computed, and with it loaded.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from kvframe import Engine, SamplingParams, Stack
from kvframe.contract import KVFrameError

SYSTEM_PROMPT = [number * number % 499 for number in range(2000)]
QUESTION = [*SYSTEM_PROMPT, 7, 8, 9]


def save_model(path: Path) -> None:
    """Save a random model of four layers, three of which see a window of 512 tokens."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=500,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=512,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        max_position_embeddings=4096,
        initializer_range=0.1,
    )
    Gemma3ForCausalLM(config).save_pretrained(path)


def engine_of(model: Path) -> Engine:
    """Return an engine for the model."""
    return Engine.from_pretrained(model, stack=Stack.from_mapping({"cache": {"memory": "64MiB"}}))


def save(model: Path, file: Path) -> None:
    """Compute the system prompt and save it, in the first process."""
    with engine_of(model) as engine:
        (saved,) = engine.save_prefixes(file, [SYSTEM_PROMPT])
    print(f"saved {saved.num_tokens} of {len(SYSTEM_PROMPT)} tokens in {file.stat().st_size:,} bytes")


def first_token(engine: Engine) -> tuple[int, float]:
    """Return the first token after the question, and the seconds until it came."""
    started = time.perf_counter()
    (output,) = engine.generate([QUESTION], SamplingParams(max_new_tokens=1))
    return output.token_ids[0], time.perf_counter() - started


def ask(model: Path, file: Path) -> None:
    """In the second process, ask with the system prompt computed, then with the system prompt loaded."""
    with engine_of(model) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=1))
        computed, computing = first_token(engine)
        engine.reset_prefix_cache()
        started = time.perf_counter()
        (prefix,) = engine.load_prefixes(file)
        loading = time.perf_counter() - started
        before = engine.stats().cached_prompt_tokens
        loaded, waiting = first_token(engine)
        num_found = engine.stats().cached_prompt_tokens - before
    print(f"loaded {prefix.num_tokens} tokens in {1000 * loading:.0f} ms; the question found {num_found} of them")
    print(f"first token: {1000 * computing:.0f} ms with them computed, {1000 * waiting:.0f} ms with them loaded")
    print(f"the same token: {computed == loaded}")


def main(arguments: Sequence[str]) -> None:
    """Be the first process, which starts the second; or the second, with a model and a file as arguments."""
    if arguments:
        ask(*map(Path, arguments))
        return
    with tempfile.TemporaryDirectory() as folder:
        model, file = Path(folder, "model"), Path(folder, "system_prompt.safetensors")
        save_model(model)
        save(model, file)
        sys.stdout.flush()
        subprocess.run([sys.executable, __file__, str(model), str(file)], check=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KVFrameError as error:
        sys.exit(f"error: {error}")
