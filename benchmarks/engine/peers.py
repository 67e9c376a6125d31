"""What is measured: kvframe, and the two ways in which transformers serves a batch, each with a model of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from kvframe import Engine, SamplingParams, Stack

Prompts = Sequence[Sequence[int]]
MAX_NUM_BATCHED_TOKENS = 2048


class System(ABC):
    """One way to generate a batch greedily, with set-up done: only ``generate`` is timed."""

    name: str

    @abstractmethod
    def generate(self, prompts: Prompts, num_new_tokens: int) -> list[list[int]]:
        """Return exactly ``num_new_tokens`` tokens for each prompt."""

    def cache_bytes(self) -> int | None:
        """Return the most bytes of keys and values that the last batch held; None if it cannot be known."""
        return None

    def close(self) -> None:  # noqa: B027
        """Give everything back that is kept between batches."""


class KVFrame(System):
    """kvframe's engine, with the stack's defaults but for the memory."""

    name = "kvframe"

    def __init__(self, path: Path, *, memory: str, prefix_caching: bool) -> None:
        """Load the model in ``path``.

        Args:
            path: A checkpoint.
            memory: Of the cache.
            prefix_caching: Whether requests share blocks.
        """
        cache = {"memory": memory, "prefix_caching": prefix_caching}
        engine = {"max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS}
        self.engine = Engine.from_pretrained(path, stack=Stack.from_mapping({"cache": cache, "engine": engine}))

    def generate(self, prompts: Prompts, num_new_tokens: int) -> list[list[int]]:
        """Serve the batch."""
        params = SamplingParams(max_new_tokens=num_new_tokens, ignore_eos=True)
        outputs = self.engine.generate(prompts, params)
        assert all(output.error is None for output in outputs), [output.error for output in outputs]
        return [list(output.token_ids) for output in outputs]

    def cache_bytes(self) -> int:
        """Return the most bytes that blocks held so far."""
        return self.engine.stats().peak_bytes_held

    def close(self) -> None:
        """Detach the model."""
        self.engine.close()


def load_plain(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load a model as transformers does by default, with no end tokens, so that every request is equally long."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    return model


class PaddedGenerate(System):
    """``model.generate()``: one batch, padded on the left to the longest prompt."""

    name = "transformers generate()"

    def __init__(self, path: Path) -> None:
        """Load the model in ``path``."""
        self.model = load_plain(path)
        self._cache_bytes = 0

    def generate(self, prompts: Prompts, num_new_tokens: int) -> list[list[int]]:
        """Pad and generate."""
        longest = max(map(len, prompts))
        input_ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        output = self.model.generate(
            input_ids, attention_mask=mask, max_new_tokens=num_new_tokens, return_dict_in_generate=True
        )
        tensors = [state for layer in output.past_key_values.layers for state in (layer.keys, layer.values)]
        self._cache_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        tokens: list[list[int]] = output.sequences[:, longest:].tolist()
        return tokens

    def cache_bytes(self) -> int:
        """Return the bytes of the cache at the end of the last batch."""
        return self._cache_bytes


class ContinuousBatching(System):
    """transformers' own continuous batching, its manager kept alive between batches."""

    name = "transformers continuous batching"

    def __init__(self, path: Path, *, num_tokens: int, page_size: int, prefix_caching: bool) -> None:
        """Load the model in ``path``; the manager starts with the first batch.

        Args:
            path: A checkpoint.
            num_tokens: Tokens that the cache has room for.
            page_size: Tokens per page.
            prefix_caching: Whether requests share blocks.
        """
        self.model = load_plain(path)
        self._config = ContinuousBatchingConfig(
            page_size=page_size,
            num_blocks=-(-num_tokens // page_size),
            max_batch_tokens=MAX_NUM_BATCHED_TOKENS,
            allow_block_sharing=prefix_caching,
        )
        self._running = self.model.continuous_batching_context_manager(
            generation_config=self.model.generation_config, continuous_batching_config=self._config, warmup=False
        )
        self._manager = self._running.__enter__()

    def generate(self, prompts: Prompts, num_new_tokens: int) -> list[list[int]]:
        """Add the requests and wait for all results."""
        ids = self._manager.add_requests(inputs=[list(prompt) for prompt in prompts], max_new_tokens=num_new_tokens)
        found: dict[str, list[int]] = {}
        while len(found) < len(ids):
            result = self._manager.get_result(timeout=1)
            if result is None:
                assert self._manager.is_running(), "the generation thread ended"
            elif result.is_finished():
                assert result.error is None, result.error
                found[result.request_id] = list(result.generated_tokens)
        return [found[request_id] for request_id in ids]

    def close(self) -> None:
        """Stop the manager's thread."""
        self._running.__exit__(None, None, None)
