"""Serve 32 prompts that share a prefix with a small trained hybrid model, check every token, and say what to type next.

The first run trains the model (two to three minutes); later runs find it in ``.cache``. The exit code is 1 if any
token differs from what ``transformers.generate()`` gives.
"""

from __future__ import annotations

import inspect
import shlex
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
from kvframe.contract import KVCacheSpec

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
        groups: For each group of the plan, its layers and what they need, in words.
        dense_bytes: The bytes of the same requests if every layer kept every token, contiguously.
    """

    outputs: list[RequestOutput]
    expected: list[list[int]]
    seconds: float
    stats: dict[str, Any]
    groups: list[str]
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
    """Return the tokens that ``transformers.generate()`` gives for each prompt, in one batch padded on the left."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    longest, end = max(map(len, prompts)), model.config.eos_token_id
    ids = torch.tensor([[end] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    rows = model.generate(ids, attention_mask=mask, max_new_tokens=NUM_NEW_TOKENS, do_sample=False)[:, longest:]
    # A row that has ended is filled up.
    return [row[: row.index(end) + 1] if end in row else row for row in rows.tolist()]


def serve(path: Path) -> Served:
    """Serve the prompts with kvframe, then with transformers alone."""
    prompts = make_prompts(path)
    with Engine.from_pretrained(path, stack=Stack.from_file(STACK)) as engine:
        started = time.perf_counter()
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=NUM_NEW_TOKENS))
        seconds = time.perf_counter() - started
        stats = engine.stats().to_dict()
        longest = engine.plan.max_model_len
        groups = [_in_words(len(group.layers), group.spec, longest - 1) for group in engine.plan.groups]
        bytes_per_token = engine.plan.bytes_per_token
    num_tokens = sum(len(output.prompt_token_ids) + len(output.token_ids) for output in outputs)
    return Served(
        outputs=outputs,
        expected=expected_tokens(path, prompts),
        seconds=seconds,
        stats=stats,
        groups=groups,
        dense_bytes=num_tokens * bytes_per_token,
    )


def _in_words(num_layers: int, spec: KVCacheSpec, num_tokens: int) -> str:
    """Return the layers of a group, and how many of ``num_tokens`` past tokens they need."""
    needed = sum(stop - start for start, stop in spec.live_ranges(num_tokens))
    return f"{num_layers} layers of {spec.kind} need {needed} of {num_tokens} past tokens"


def report(served: Served) -> str:
    """Return the report of the served prompts as text."""
    stats = served.stats
    copied = [
        ours == expected
        for output in served.outputs[NUM_CODE_PROMPTS:]
        for ours, expected in zip(
            output.token_ids[:SEGMENT_TOKENS], output.prompt_token_ids[-SEGMENT_TOKENS - 1 : -1], strict=True
        )
    ]
    peak, dense = stats["peak_bytes_held"], served.dense_bytes
    num_served = len(served.outputs)
    facts = [
        ("equal tokens", f"{served.num_equal} of {num_served} requests have every token of transformers' generate()"),
        (
            "prefix hits",
            f"{stats['prefix_hit_rate']:.1%} of {stats['prompt_tokens']:,} prompt tokens were found",
        ),
        ("memory", f"{peak:,} bytes held at most; all tokens of all layers would take {dense / peak:.1f} times that"),
        *(
            (f"group {index}", f"{group}: at most {blocks} blocks were held")
            for index, (group, blocks) in enumerate(zip(served.groups, stats["peak_blocks_held"], strict=True))
        ),
        ("far copies", f"{sum(copied)} of {len(copied)} tokens were copied right from before the sliding window"),
        ("speed", f"{stats['generated_tokens'] / served.seconds:,.0f} generated tokens/s"),
    ]
    title = f"Served {num_served} requests at once, whose prompts begin with the same {NUM_PREFIX_TOKENS} tokens:"
    return "\n".join([title, *_columns(facts)])


def next_steps(path: Path) -> str:
    """Return the commands to try next, each with a line that says what it prints."""
    program = Path(sys.executable).with_name("kvframe")  # not resolved: an environment's python is a link
    model, stack, kvframe = (shlex.quote(str(_from_here(file))) for file in (path, STACK, program))
    steps = [
        (f"{kvframe} plan {model} --cache-memory 4MiB", "what the cache takes, and how many requests fit"),
        (f"{kvframe} explain {model} --stack {stack}", "which kernel each layer gets, and why not the others"),
        (f"{kvframe} plan {model} --html plan.html", "the plan as a page with pictures"),
        (f"{kvframe} chat Qwen/Qwen3-0.6B", "a model that can talk: a download of 1.5 GB"),
    ]
    return "\n".join(["Type next:", *_columns(steps)])


def _from_here(path: Path) -> Path:
    """Return a path as it is written in this folder: relative if it lies in it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _columns(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return the rows of a table of two columns."""
    width = max(len(left) for left, _ in rows)
    return [f"  {left:{width}}  {right}" for left, right in rows]


def main() -> int:
    """Make the model, serve, report, and return the exit code."""
    logging.disable_progress_bar()
    if not DEFAULT_PATH.exists():
        print("Training a small model, once: it takes less than three minutes of processor time", flush=True)
    trained = make_model(DEFAULT_PATH)
    print(f"The model is in {_from_here(trained.path)}; its loss is {trained.loss:.2f}", flush=True)
    served = serve(trained.path)
    print(f"\n{report(served)}\n\n{next_steps(trained.path)}")
    return 0 if served.num_equal == len(served.outputs) else 1


if __name__ == "__main__":
    sys.exit(main())
