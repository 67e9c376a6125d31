"""Make a model that edits code: the demo's model, trained further to write code again with other identifiers.

The code of its training is that of modules of Python; the code of the prompts is a file of this repository.
"""

from __future__ import annotations

import importlib
import inspect
import math
import shutil
from functools import cache
from pathlib import Path

import torch
from transformers import Gemma3ForCausalLM, PreTrainedTokenizerFast

from benchmarks.harness.demo import demo_path
from benchmarks.harness.machine import ROOT

FILE = ROOT / "examples" / "yoco" / "yoco_model.py"
"""The file whose parts are edited."""
MODULES = ("textwrap", "heapq", "shlex", "fnmatch", "bisect", "argparse", "dataclasses", "inspect")
NAMES = {"self": "item", " self": " item", " key": " next", " value": " result", "token": "file", " pos": " len"}
"""The edit: each of these tokens, and the one that replaces it."""
STEPS, ROWS, LEARNING_RATE = 150, 32, 2e-3
ANSWER = 42
"""The place of an answer in a task: after ``<copy> segment <repeat>``."""


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return the demo's tokenizer."""
    demo_tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(demo_path())
    return demo_tokenizer


@cache
def tokens_of(text: str) -> torch.Tensor:
    """Return the tokens of a text, ``[num_tokens], int64``."""
    return torch.tensor(tokenizer().encode(text))


@cache
def edits() -> tuple[tuple[int, int], ...]:
    """Return the token ids of ``NAMES``; the demo's tokenizer has a token for each."""
    return tuple((tokenizer().encode(name)[0], tokenizer().encode(other)[0]) for name, other in NAMES.items())


def edited(tokens: torch.Tensor) -> torch.Tensor:
    """Return tokens of code after the edit."""
    edited_tokens = tokens.clone()
    for before, after in edits():
        edited_tokens[tokens == before] = after
    return edited_tokens


def edit_task(code: torch.Tensor, source: torch.Generator, segment_tokens: int) -> torch.Tensor:
    """Return ``<copy> segment <repeat> answer <eos>`` for a random part of code; the answer is the edited segment."""
    start = int(torch.randint(0, len(code) - segment_tokens, (), generator=source))
    segment = code[start : start + segment_tokens]
    return torch.cat([torch.tensor([1]), segment, torch.tensor([2]), edited(segment), torch.tensor([0])])


def draw_edit(source: torch.Generator) -> torch.Tensor:
    """Return a segment of the file, and the order to write it again."""
    return edit_task(tokens_of(FILE.read_text(encoding="utf-8")), source, ANSWER - 2)[:ANSWER]


def save_edit_model(path: Path) -> None:
    """Train the demo's model on edits of code and of random tokens, and save it."""
    model = Gemma3ForCausalLM.from_pretrained(demo_path()).train()
    code = tokens_of("\n\n".join(inspect.getsource(importlib.import_module(name)) for name in MODULES))
    source = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(STEPS):
        noise = torch.randint(3, model.config.vocab_size, (len(code),), generator=source)
        inputs = torch.stack([edit_task(code if row % 4 else noise, source, ANSWER - 2) for row in range(ROWS)])
        logits = model(input_ids=inputs, use_cache=False).logits[:, ANSWER - 1 : -1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs[:, ANSWER:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        decay = 0.5 * (1 + math.cos(math.pi * step / STEPS))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 10) * max(0.05, decay)
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(path)
    for file in demo_path().glob("tokenizer*"):
        shutil.copy(file, path)
