"""A packed run on its own, before the engine serves: what the model compares with its own plain forward."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from kvframe.cache.manager import KVCacheManager
from kvframe.engine.assembly import Assembly
from kvframe.engine.runner import ModelRunner
from kvframe.errors import PlanError


def run_packed(assembly: Assembly, prompts: list[list[int]], last_only: bool = False) -> list[torch.Tensor]:
    """Return the logits ``[len(prompt), vocab_size]`` of each prompt, as many in one batch as the pool holds.

    Uses a request table of its own, so that it leaves no trace in an engine's.

    Args:
        assembly: The set-up; its model is attached to its layers, and nothing is running.
        prompts: Token ids; what exceeds the longest request is cut off.
        last_only: Let only the last token of each prompt generate, and return its logits ``[1, vocab_size]``.

    Raises:
        PlanError: The pool does not even hold one of them.
    """
    num_prompts, max_len, local = len(prompts), assembly.max_model_len, assembly.layers.local
    if local.places:
        max_len = min(max_len, local.max_tokens)
    manager = KVCacheManager(assembly.plan, max_num_seqs=num_prompts, prefix_caching=False)
    runner = ModelRunner(
        assembly.model,
        assembly.layers,
        manager.tables,
        assembly.device,
        max_num_seqs=num_prompts,
        max_model_len=max_len,
    )
    waiting = deque(prompt[:max_len] for prompt in prompts)
    logits: list[torch.Tensor] = []
    while waiting:
        rows: list[int] = []
        lens: list[int] = []
        while waiting:
            request_id, prompt = str(len(rows)), waiting[0]
            if not local.fits([*lens, len(prompt)]):
                break
            manager.start(request_id, prompt)
            if not manager.extend(request_id, len(prompt)):
                manager.free(request_id)
                break
            rows.append(manager.row(request_id))
            lens.append(len(prompt))
            runner.tokens[rows[-1], : len(prompt)] = waiting.popleft()
        if not rows:
            raise PlanError(
                f"{assembly.plan.total_bytes} bytes of cache do not hold the {len(waiting[0])} tokens of the "
                "self-check; give more memory, or set self_check = false in the stack's [engine]"
            )
        wanted = np.cumsum(lens) - 1 if last_only else np.arange(sum(lens))
        packed = runner.forward(np.array(rows), np.zeros(len(rows), dtype=np.int64), np.array(lens), wanted)
        logits.extend(packed.split([1] * len(rows) if last_only else lens))
        for index in range(len(rows)):
            manager.free(str(index))
    return logits
