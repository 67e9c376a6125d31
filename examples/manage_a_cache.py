"""Manage the pages of a cache without kvframe's engine: a plan, a batch of requests, a prefix hit and a pin. No torch.

python examples/manage_a_cache.py
"""

from __future__ import annotations

from array import array

import numpy as np
from kvframe_sliding_window.spec import SlidingWindowSpec

from kvframe import FullAttentionSpec, KVCacheManager, KVCachePlan, Pin, group_layers, plan_cache
from kvframe.contract import LayerSpec

SYSTEM = range(1000, 1400)


def make_plan() -> KVCachePlan:
    """Plan two groups: one layer keeps every token, one keeps a window of 64 tokens."""
    full = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=64, dtype="bfloat16")
    window = SlidingWindowSpec(block_size=16, num_kv_heads=8, head_size=64, dtype="bfloat16", window=64)
    layers = [LayerSpec(name="full", spec=full), LayerSpec(name="window", spec=window)]
    return plan_cache(group_layers(layers), memory_bytes=64 << 20, max_model_len=4096, max_num_batched_tokens=2048)


def serve(manager: KVCacheManager, prompts: dict[str, array[int]], num_new_tokens: int) -> dict[str, int]:
    """Serve a batch to its end; return how many tokens of each prompt were found."""
    hits = {name: manager.start(name, token_ids) for name, token_ids in prompts.items()}
    rows = np.array([manager.row(name) for name in prompts])
    num_tokens = np.array([len(token_ids) for token_ids in prompts.values()])
    for step in range(num_new_tokens):
        if not manager.extend_rows(rows, num_tokens):
            raise MemoryError("no free blocks: wait, or free a request and start it again later")
        # An engine computes tokens [hits, num_tokens) here; manager.tables[group].ids[rows] says in which pages.
        manager.commit_rows(rows, num_tokens)
        for token_ids in prompts.values():
            token_ids.append(step)
        num_tokens += 1
    held_pages = {name: [sum(map(bool, block_ids)) for block_ids in manager.block_ids(name)] for name in prompts}
    print("pages held at the end:", held_pages)
    for name in prompts:
        manager.free(name)
    return hits


def main() -> None:
    """Serve two batches with a common beginning, then pin that beginning."""
    manager = KVCacheManager(make_plan(), max_num_seqs=8)
    for tenant in ("a", "b"):
        prompts = {f"{tenant}{index}": array("I", [*SYSTEM, index, 7, 8]) for index in range(3)}
        print("tokens found:", serve(manager, prompts, num_new_tokens=40))
    pin: Pin = manager.pin(array("I", SYSTEM))
    print(f"{pin.num_tokens} tokens are pinned, in {manager.num_held_pages} pages")
    manager.unpin(pin)
    print(f"{manager.stats.hit_tokens} of {manager.stats.queried_tokens} tokens were found")


if __name__ == "__main__":
    main()
