"""Serve batches with kvframe's engine and in transformers' two ways: ``generate()`` and continuous batching."""

from __future__ import annotations

import copy
import itertools
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, StoppingCriteria

from benchmarks.engine.stepping import (
    Answers,
    BatchEngine,
    Prompts,
    Served,
    Setting,
    SteppedEngine,
    cpu_seconds,
)
from benchmarks.harness.models import plugins_of, silence_transformers
from kvframe import Engine, SamplingParams, Stack
from kvframe.attention.layer import AttentionLayer

PAGE_SIZE = 16
"""Tokens of a page of transformers' continuous batching on a CPU; on a GPU, pages have its default size."""


class KVFrame(SteppedEngine):
    """kvframe's engine: the default stack with a cache of a fixed size."""

    def __init__(self, setting: Setting, model: Any = None) -> None:
        """Load a model unless one is given."""
        super().__init__()
        silence_transformers()
        drafts: dict[str, Any] = {"name": "ngram", "max_drafts": setting.max_drafts}
        if setting.draft_model:
            drafts |= {"name": "draft_model", "model": setting.draft_model}
        model_options = {
            "device": setting.device,
            "dtype": setting.dtype,
            "graphs": "auto" if setting.graphs else "off",
            "compile": setting.is_compiled,
            **({"drafts": drafts} if setting.max_drafts else {}),
            **({"prefill_skipping": "decode_only"} if setting.is_skipping else {}),
        }
        tables = {
            "cache": {"memory": setting.memory, "prefix_caching": setting.prefix_caching},
            "model": model_options,
            "limits": {
                "max_num_batched_tokens": setting.max_num_batched_tokens,
                "max_num_seqs": setting.max_num_seqs,
                **({"max_model_len": setting.max_model_len} if setting.max_model_len else {}),
            },
            "plugin": {"transformers": {"pack_weights": setting.is_packed}},
        }
        plugins, stack = plugins_of(Path(setting.path).name), Stack.from_mapping(tables)
        if model is None:
            self._engine = Engine.from_pretrained(setting.path, stack=stack, plugins=plugins)
        else:
            self._engine = Engine.from_model(model, stack=stack, plugins=plugins)
        self._sampling: dict[str, Any] = {"ignore_eos": True, "temperature": setting.temperature, "seed": 0}
        self._numbers: dict[str, int] = {}
        adapter: Any = self._engine.model
        self.model_clock.watch(*((adapter, "compiled") if setting.is_compiled else (adapter.model, "forward")))
        self.attention_clock.watch(AttentionLayer, "__call__")

    def add(self, prompts: Prompts, num_new_tokens: int) -> None:
        """Add the requests."""
        params = SamplingParams(max_new_tokens=num_new_tokens, **self._sampling)
        self._numbers = {self._engine.add_request(prompt, params): index for index, prompt in enumerate(prompts)}

    def has_unfinished(self) -> bool:
        """Return whether a request has not ended."""
        return self._engine.has_unfinished

    def step(self) -> list[tuple[int, list[int]]]:
        """Run a step."""
        outputs = self._engine.step()
        assert all(output.error is None for output in outputs), [output.error for output in outputs]
        return [(self._numbers[output.request_id], list(output.new_token_ids)) for output in outputs]

    def serve(self, prompts: Prompts, num_new_tokens: int) -> Served:
        """Serve a batch. The cache's bytes and the drafts are counted since the model was loaded."""
        served = super().serve(prompts, num_new_tokens)
        stats = self._engine.stats()
        drafts = {"draft_tokens": stats.draft_tokens, "accepted_draft_tokens": stats.accepted_draft_tokens}
        return {**served, "cache_bytes": stats.peak_bytes_held, **drafts}

    def close(self) -> None:
        """Detach the model from the engine."""
        self._engine.close()


def load_model(setting: Setting, path: str = "") -> Any:
    """Return a model of transformers, the setting's unless a path is given. It is greedy and ignores end tokens."""
    model: Any = AutoModelForCausalLM.from_pretrained(path or setting.path, dtype=getattr(torch, setting.dtype))
    model = model.to(setting.device).eval()
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    return model


def make_sharing(settings: Sequence[Setting]) -> list[KVFrame]:
    """Return an engine of kvframe for each setting; if there are several, they compute with the same weights."""
    if len(settings) == 1:
        return [KVFrame(settings[0])]
    silence_transformers()
    model = load_model(settings[0])
    weights = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
    # An engine takes a model for itself, so each gets modules of its own around the weights.
    return [KVFrame(setting, copy.deepcopy(model, dict(weights))) for setting in settings]


class Transformers(BatchEngine):
    """A model as transformers loads it by default; it has no end tokens, so that all requests are equally long."""

    def __init__(self, setting: Setting) -> None:
        """Load a model."""
        silence_transformers()
        self._model: Any = load_model(setting)


class FirstToken(StoppingCriteria):
    """Reads the clock when all prompts have a token (``time`` is 0 before it), and never stops generating."""

    time = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Stop no prompt."""
        self.time = self.time or time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Generate(Transformers):
    """``model.generate()`` on one batch, padded on the left to the longest prompt; with drafts, prompt by prompt."""

    def __init__(self, setting: Setting) -> None:
        """Load a model."""
        super().__init__(setting)
        self._options: dict[str, Any] = {}
        if setting.draft_model:
            self._options["assistant_model"] = assistant = load_model(setting, setting.draft_model)
            assistant.generation_config.num_assistant_tokens = setting.max_drafts
        elif setting.max_drafts:
            self._options["prompt_lookup_num_tokens"] = setting.max_drafts

    def serve(self, prompts: Prompts, num_new_tokens: int) -> Served:
        """Serve a batch."""
        tokens: list[list[int]] = []
        start, cpu = time.perf_counter(), cpu_seconds()
        # Prompt lookup and an assistant model take one prompt at a time.
        for batch in [[prompt] for prompt in prompts] if self._options else [prompts]:
            first, longest = FirstToken(), max(map(len, batch))
            padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in batch]
            mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch]
            output = self._model.generate(
                torch.tensor(padded, device=self._model.device),
                attention_mask=torch.tensor(mask, device=self._model.device),
                max_new_tokens=num_new_tokens,
                stopping_criteria=[first],
                return_dict_in_generate=True,
                **self._options,
            )
            tokens += output.sequences[:, longest:].tolist()
        return {
            "tokens": tokens,
            "seconds": time.perf_counter() - start,
            "first_seconds": first.time - start,
            "waits": [first.time - start] * len(prompts),
            "cpu_seconds": cpu_seconds() - cpu,
            "cache_bytes": sum(
                state.nbytes
                for layer in output.past_key_values.layers
                for state in vars(layer).values()
                if isinstance(state, torch.Tensor)
            ),
        }


class ContinuousBatching(Transformers):
    """transformers' own continuous batching, its manager kept alive between batches."""

    def __init__(self, setting: Setting) -> None:
        """Load a model and start the manager."""
        super().__init__(setting)
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # It misses optional packages.
        page_size = PAGE_SIZE if setting.device == "cpu" else ContinuousBatchingConfig.page_size
        config = ContinuousBatchingConfig(
            page_size=page_size,
            num_blocks=setting.max_num_seqs * -(-setting.max_model_len // page_size + 1),
            max_batch_tokens=setting.max_num_batched_tokens,
            allow_block_sharing=setting.prefix_caching,
        )
        self._running = self._model.continuous_batching_context_manager(
            generation_config=self._model.generation_config, continuous_batching_config=config, warmup=False
        )
        self._manager = self._running.__enter__()

    def serve(self, prompts: Prompts, num_new_tokens: int) -> Served:
        """Add the requests and wait for all results."""
        start, cpu = time.perf_counter(), cpu_seconds()
        names = self._manager.add_requests(
            inputs=[list(prompt) for prompt in prompts], max_new_tokens=num_new_tokens, record_timestamps=True
        )
        results: dict[str, Any] = {}
        while len(results) < len(names):
            result = self._manager.get_result(timeout=1)
            if result is None:
                assert self._manager.is_running(), "the generation thread ended"
            elif result.is_finished():
                assert result.error is None, result.error
                results[result.request_id] = result
        seconds = {"seconds": time.perf_counter() - start, "cpu_seconds": cpu_seconds() - cpu}
        waits = [results[name].timestamps[0] - start for name in names]
        return {
            "tokens": [list(results[name].generated_tokens) for name in names],
            **seconds,
            "first_seconds": max(waits),
            "waits": waits,
            "cache_bytes": None,
        }

    def close(self) -> None:
        """Stop the manager's thread."""
        self._running.__exit__(None, None, None)


def load(system: str, answers: type[Answers] = Answers) -> tuple[dict[str, str], Answers]:
    """Return the versions that a system's figures depend on, and the answering object."""
    package = system.partition(" ")[0]
    transformers = ContinuousBatching if system == "transformers continuous batching" else Generate

    def make(settings: Sequence[Setting]) -> Sequence[BatchEngine]:
        torch.cuda.empty_cache()  # The models of the last question were released.
        return make_sharing(settings) if package == "kvframe" else [transformers(setting) for setting in settings]

    return answers.of(make, package)
