"""Runs a packed batch before the engine serves; the model compares it with its own plain forward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from kvframe import KVCacheManager, StepBatch
from kvframe.contract.errors import PlanError
from kvframe.contract.model import ModelInput
from kvframe_engine.assembly import Assembly
from kvframe_engine.requests.progress import NO_INPUTS, input_sequences
from kvframe_engine.running.model_runner import ModelRunner


def run_packed(
    assembly: Assembly,
    prompts: list[list[int]],
    last_only: bool = False,
    inputs: Sequence[Mapping[str, ModelInput]] = (),
    prompt_len_of: Callable[[int], int] = int,
) -> list[torch.Tensor]:
    """Return the logits ``[len(prompt), vocab_size]`` of each prompt, with as many prompts per batch as the pool holds.

    It has its own request table, so the engine's is not changed.

    Args:
        assembly: The set-up; its model is attached to its layers, and no request is running.
        prompts: Token ids; tokens beyond the length of the longest request are cut off.
        last_only: Let only the last token of each prompt generate, and return its logits ``[1, vocab_size]``.
        inputs: For each prompt, its inputs beside the tokens, by sequence; none unless given.
        prompt_len_of: Returns for the length of a prompt how many of its tokens count as prompt: the others count as
            generated, for types whose live ranges depend on that.

    Raises:
        PlanError: A prompt does not fit the pool, even alone.
    """
    num_prompts, max_len, local = len(prompts), assembly.max_model_len, assembly.layers.local
    if local.places:
        max_len = min(max_len, local.max_tokens)
    manager = KVCacheManager(assembly.plan, max_num_seqs=num_prompts, prefix_caching=False)
    is_range = assembly.model.description.bidirectional_prompts
    runner = ModelRunner(
        assembly.model,
        assembly.layers,
        manager.tables,
        assembly.device,
        max_num_seqs=num_prompts,
        max_model_len=max_len,
    )
    waiting = deque(zip([prompt[:max_len] for prompt in prompts], inputs or [NO_INPUTS] * num_prompts, strict=True))
    logits: list[torch.Tensor] = []
    while waiting:
        rows: list[int] = []
        lens: list[int] = []
        new_inputs: dict[str, dict[int, ModelInput]] = {}
        while waiting:
            request_id, (prompt, brought) = str(len(rows)), waiting[0]
            if not local.fits([*lens, len(prompt)]):
                break
            prompt_len = prompt_len_of(len(prompt))
            ranges = ((0, len(prompt)),) if is_range and len(prompt) > 1 else ()
            brought_sequences = input_sequences(brought)
            manager.start(request_id, prompt, inputs=brought_sequences, num_prompt_tokens=prompt_len, ranges=ranges)
            if not manager.extend(request_id, len(prompt)):
                manager.free(request_id)
                break
            rows.append(manager.row(request_id))
            lens.append(len(prompt))
            runner.set_row(rows[-1], prompt, brought, prompt_len, ranges)
            for name, value in brought.items():
                new_inputs.setdefault(name, {})[rows[-1]] = value
            waiting.popleft()
        if not rows:
            raise PlanError(
                f"{assembly.plan.total_bytes} bytes of cache do not hold the {len(waiting[0][0])} tokens of the "
                "self-check; give more memory, or set self_check = false in the stack's [engine]"
            )
        wanted = np.cumsum(lens) - 1 if last_only else np.arange(sum(lens))
        batch = StepBatch(
            rows=np.array(rows),
            num_computed=np.zeros(len(rows), dtype=np.int64),
            query_lens=np.array(lens),
            generating_indices=wanted,
        )
        packed = runner.forward(batch, new_inputs)
        logits.extend(packed.split([1] * len(rows) if last_only else lens))
        for index in range(len(rows)):
            manager.free(str(index))
    return logits
