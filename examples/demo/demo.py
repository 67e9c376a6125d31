"""Serve 32 prompts that share a prefix with a small trained hybrid model, and check every token.

The first run trains the model (two to three minutes); later runs find it in ``.cache``. The exit code is 1 if any
token differs from what ``transformers.generate()`` gives.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from make_model import DEFAULT_PATH, SEGMENT_TOKENS, VOCAB_SIZE, copy_prompt, make_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from kvframe import Engine, RequestOutput, SamplingParams, Stack

STACK = Path(__file__).with_name("stack.toml")
NUM_CODE_PROMPTS, NUM_COPY_PROMPTS = 26, 6
NUM_PREFIX_TOKENS = 256
NUM_NEW_TOKENS = 48


@attrs.frozen(kw_only=True)
class Served:
    """The results of one run of the demo.

    Attributes:
        outputs: One output for each prompt.
        expected: The tokens that ``transformers.generate()`` gives.
        seconds: The time of kvframe's run, prompts included.
        stats: The engine's statistics, as plain values.
        group_names: For each cache group, its kind and layers in words.
        dense_bytes: The bytes of the same requests if every layer kept every token, contiguously.
    """

    outputs: list[RequestOutput]
    expected: list[list[int]]
    seconds: float
    stats: dict[str, Any]
    group_names: list[str]
    dense_bytes: int

    @property
    def num_equal(self) -> int:
        """Requests whose tokens are all as expected."""
        return sum(list(output.token_ids) == tokens for output, tokens in zip(self.outputs, self.expected, strict=True))


def make_prompts(path: Path) -> list[list[int]]:
    """Return token ids of prompts that share a prefix of library source: code to continue, and segments to copy."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    source = tokenizer.encode(inspect.getsource(textwrap))
    prefix, rest = source[:NUM_PREFIX_TOKENS], source[NUM_PREFIX_TOKENS:]
    endings = [rest[37 * index : 37 * index + 12 + index] for index in range(NUM_CODE_PROMPTS)]
    random = torch.Generator().manual_seed(0)
    for _ in range(NUM_COPY_PROMPTS):
        segment = torch.randint(3, VOCAB_SIZE, (SEGMENT_TOKENS,), generator=random)
        endings.append(copy_prompt(segment).tolist())
    return [prefix + ending for ending in endings]


def expected_tokens(path: Path, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Return the tokens of ``transformers.generate()`` for each prompt alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        ones = torch.ones_like(ids)
        tokens.append(model.generate(ids, attention_mask=ones, max_new_tokens=NUM_NEW_TOKENS, do_sample=False))
    return [row[0, len(prompt) :].tolist() for row, prompt in zip(tokens, prompts, strict=True)]


def serve(path: Path) -> Served:
    """Serve the prompts with kvframe, then with transformers alone."""
    prompts = make_prompts(path)
    with Engine.from_pretrained(path, stack=Stack.from_file(STACK)) as engine:
        started = time.perf_counter()
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=NUM_NEW_TOKENS))
        seconds = time.perf_counter() - started
        stats = engine.stats().to_dict()
        names = [f"{group.spec.kind}, {len(group.layers)} layers" for group in engine.plan.groups]
        bytes_per_token = engine.plan.bytes_per_token
    num_tokens = sum(len(output.prompt_token_ids) + len(output.token_ids) for output in outputs)
    return Served(
        outputs=outputs,
        expected=expected_tokens(path, prompts),
        seconds=seconds,
        stats=stats,
        group_names=names,
        dense_bytes=num_tokens * bytes_per_token,
    )


def report(served: Served) -> str:
    """Return the results as text."""
    lines = []
    for index, output in enumerate(served.outputs):
        if index % 5 == 0:
            lines.append(f"[{index:2}] {output.text!r}")
    stats = served.stats
    copied = [
        ours == asked
        for output in served.outputs[NUM_CODE_PROMPTS:]
        for ours, asked in zip(
            output.token_ids[:SEGMENT_TOKENS], output.prompt_token_ids[-SEGMENT_TOKENS - 1 : -1], strict=True
        )
    ]
    held, dense = stats["peak_bytes_held"], served.dense_bytes
    facts = [
        ("requests", f"{len(served.outputs)}, sharing {NUM_PREFIX_TOKENS} tokens"),
        ("speed", f"{stats['generated_tokens'] / served.seconds:,.0f} generated tokens/s"),
        ("prefix hits", f"{stats['prefix_hit_rate']:.1%} of {stats['prompt_tokens']:,} prompt tokens"),
        *(
            ("blocks held, at most", f"{blocks} ({name})")
            for name, blocks in zip(served.group_names, stats["peak_blocks_held"], strict=True)
        ),
        ("bytes held, at most", f"{held:,}"),
        ("every layer full", f"{dense:,} bytes if contiguous: {dense / held:.1f} times as much"),
        ("copied right", f"{sum(copied)} of {len(copied)} tokens, each from before the sliding window"),
        ("equal to generate()", f"{served.num_equal} of {len(served.outputs)} requests, token by token"),
    ]
    width = max(len(name) for name, _ in facts)
    return "\n".join([*lines, "", *(f"{name:{width}}  {value}" for name, value in facts)])


def main() -> int:
    """Make the model, serve, report, and return the exit code."""
    logging.disable_progress_bar()
    trained = make_model(DEFAULT_PATH)
    print(f"{'found' if trained.cached else 'trained'} {trained.path}: loss {trained.loss:.2f}, ", end="")
    print(f"{trained.copied:.1%} of copied tokens right")
    served = serve(trained.path)
    print(report(served))
    return 0 if served.num_equal == len(served.outputs) else 1


if __name__ == "__main__":
    sys.exit(main())
