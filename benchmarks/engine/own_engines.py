"""kvframe's engine and transformers' ``generate()``, for processes that serve batches."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from transformers import StoppingCriteria

from benchmarks.engine.peers import load_plain
from benchmarks.engine.stepping import (
    MAX_NUM_BATCHED_TOKENS,
    BatchEngine,
    Prompts,
    Served,
    Setting,
    SteppedEngine,
    cpu_seconds,
)
from benchmarks.harness.models import silence_transformers
from kvframe import Engine, SamplingParams, Stack
from kvframe.attention.layer import AttentionLayer


class KVFrame(SteppedEngine):
    """The default stack without prefix caching."""

    def __init__(self, setting: Setting) -> None:
        """Load a model."""
        super().__init__()
        silence_transformers()
        cache = {"memory": setting.memory, "prefix_caching": False}
        engine = {
            "dtype": setting.dtype,
            "compile": setting.is_compiled,
            "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
            "max_num_seqs": setting.max_num_seqs,
        }
        plugin = {"transformers": {"pack_weights": setting.is_packed}}
        stack = Stack.from_mapping({"cache": cache, "engine": engine, "plugin": plugin})
        self._engine = Engine.from_pretrained(setting.path, stack=stack)
        self._numbers: dict[str, int] = {}
        adapter: Any = self._engine.model
        self.model_clock.watch(*((adapter, "compiled") if setting.is_compiled else (adapter.model, "forward")))
        self.attention_clock.watch(AttentionLayer, "__call__")

    def add(self, prompts: Prompts, num_new_tokens: int) -> None:
        """Add the requests."""
        params = SamplingParams(max_new_tokens=num_new_tokens, ignore_eos=True)
        self._numbers = {self._engine.add_request(prompt, params): index for index, prompt in enumerate(prompts)}

    def has_unfinished(self) -> bool:
        """Ask the engine."""
        return self._engine.has_unfinished

    def step(self) -> list[tuple[int, list[int]]]:
        """Do a step."""
        return [(self._numbers[each.request_id], list(each.new_token_ids)) for each in self._engine.step()]

    def close(self) -> None:
        """Detach the model."""
        self._engine.close()


class FirstToken(StoppingCriteria):
    """Never stops, and reads the clock after the first token.

    Attributes:
        time: When all prompts had a token.
    """

    def __init__(self) -> None:
        """Wait for it."""
        self.time = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Stop no prompt."""
        self.time = self.time or time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Transformers(BatchEngine):
    """``generate()`` on the whole batch, whose prompts have one length."""

    def __init__(self, setting: Setting) -> None:
        """Load a model."""
        silence_transformers()
        self._model = load_plain(Path(setting.path), getattr(torch, setting.dtype))

    def serve(self, prompts: Prompts, num_new_tokens: int) -> Served:
        """Serve a batch."""
        first = FirstToken()
        start, cpu = time.perf_counter(), cpu_seconds()
        input_ids = torch.tensor(prompts)
        output = self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=num_new_tokens,
            stopping_criteria=[first],
        )
        return {
            "tokens": output[:, input_ids.shape[1] :].tolist(),
            "seconds": time.perf_counter() - start,
            "first_seconds": first.time - start,
            "cpu_seconds": cpu_seconds() - cpu,
        }
