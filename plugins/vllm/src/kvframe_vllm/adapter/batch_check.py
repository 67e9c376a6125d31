"""Check that a batch of an untested vLLM means what it means in the tested versions."""

from __future__ import annotations

from typing import Any

import torch

from kvframe.contract import BackendError
from kvframe_vllm.names import TESTED_RANGE, installed

NUM_CHECKED = 64
"""How many batches of each group of layers are checked; a check waits for the device."""


def check_batch(batch: Any, block_size: int) -> None:
    """Check that each token's slot in a batch is the one that its block table and its lengths say.

    Args:
        batch: vLLM's batch, a ``CommonAttentionMetadata``. Negative slots are padding.
        block_size: The block size of the group.

    Raises:
        BackendError: A slot is another, or the numbers of tokens do not add up.
    """
    if differs := _difference(batch, block_size):
        raise BackendError(
            f"vLLM {installed()} makes batches that are not as kvframe-vllm expects ({differs}): install a tested "
            f"version, {TESTED_RANGE}, or unset KVFRAME_STACK to run without kvframe"
        )


def _difference(batch: Any, block_size: int) -> str:
    lens, table, slots = batch.seq_lens.cpu(), batch.block_table_tensor.cpu(), batch.slot_mapping.cpu()
    num_new = batch.query_start_loc_cpu.diff()[: batch.num_reqs]
    num_tokens = int(num_new.sum())
    if num_tokens != batch.num_actual_tokens or len(slots) < num_tokens:
        return f"its requests have {num_tokens} tokens, and it has {batch.num_actual_tokens}"
    requests = torch.repeat_interleave(torch.arange(batch.num_reqs), num_new)
    first = (lens[: batch.num_reqs] - num_new)[requests]
    positions = first + torch.arange(num_tokens) - (num_new.cumsum(0) - num_new)[requests]
    stored = slots[:num_tokens] >= 0
    if bool((positions[stored] < 0).any()):
        return "a request has more new tokens than tokens"
    blocks = table[requests[stored], positions[stored] // block_size]
    expected = blocks.long() * block_size + positions[stored] % block_size
    wrong = (expected != slots[:num_tokens][stored]).sum()
    return f"{int(wrong)} slots are not in the blocks of their tokens" if wrong else ""
