"""Replay requests with hints over a small pool with a tier beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from kvframe_engine.host_storage import HostStorage
from kvframe_engine.tiers.move import HOST
from kvframe_engine.tiers.stored_pages import StoredPages
from kvframe_engine.tiers.tiers import Tiers

from benchmarks.cache.eviction import POOLS, make_plan, make_policy_of
from benchmarks.cache.hint_traces import HINTED, TRACES, Arrival
from kvframe import Hints, KVCacheManager
from tests.support.stores import SHELVES, Shelf, ShelfStore

TIERS = (HOST, "shelf")
"""The tiers: host memory, and a page store."""

TIERED = ("no hints", "one-off", "sessions")
"""The hints with which tiers are replayed."""


def replay_with_tiers(trace: Sequence[Arrival], tier: str, hints: Callable[[Arrival], Hints]) -> dict[str, int]:
    """Serve requests with a tier beside a small pool; return the tokens found, and the bytes written and brought back.

    Host memory is twice as large as the pool, and the store has no bound.
    """
    clock, plan = [0.0], make_plan(POOLS[0])
    pool = torch.zeros(plan.total_bytes, dtype=torch.uint8)
    host = HostStorage(plan, pool, 2 * plan.num_slabs) if tier == HOST else None
    policy = make_policy_of("scan_resistant")
    manager = KVCacheManager(plan, max_num_seqs=1, eviction=policy, now=lambda: clock[0])
    SHELVES["hints"] = Shelf()
    storage: Any = SimpleNamespace(pool=pool, plan=plan)
    stores = [ShelfStore(shelf="hints")]
    pages = None if tier == HOST else StoredPages(storage, stores, bytes(32), lambda: ["trace"])
    tiers = Tiers(manager, host, pages, bytes(32))
    num_hit_tokens = 0
    for arrival in trace:
        tokens, clock[0] = arrival.request.token_ids, arrival.seconds
        prompt = tokens[: arrival.request.prompt_end]
        request: Any = SimpleNamespace(
            uses_prefix=True, forks_from=None, fetch=None, keeps_part=False,
            cache_tokens=prompt, token_ids=prompt, cache_salt="", input_sequences={}, num_prompt_tokens=len(prompt),
        )  # fmt: skip
        tiers.begin(request)
        while not tiers.is_ready(request):
            tiers.wait()
        if request.fetch is not None:
            tiers.restore(request)
        num_hit_tokens += manager.start("request", prompt)
        tiers.drop(request)
        if not manager.extend("request", len(tokens)):
            raise RuntimeError("the pool is too small for a single request")
        manager.commit("request", tokens, len(tokens))
        manager.free("request", hints=hints(arrival))
        tiers.flush(60)
    counts = tiers.stats()
    tiers.close()
    num_written, brought = counts["host_blocks_stored"], counts["restored_blocks"][tier]
    if tier != HOST:
        num_written = counts["stores"][tier].bytes_written // plan.groups[0].page_bytes
    return {"found": num_hit_tokens, "blocks_written": num_written, "blocks_brought": brought}


def run_tiers(name: str, size: int) -> dict[str, Any]:
    """Return the tokens found and blocks moved by tiers beside the smallest pool, with hints of some requests."""
    _, seconds, make = TRACES[name]
    trace = make(size)
    sides = {
        hinted: {tier: replay_with_tiers(trace, tier, partial(HINTED[hinted], seconds)) for tier in TIERS}
        for hinted in TIERED
    }
    return {"prompt_tokens": sum(arrival.request.prompt_end for arrival in trace), "sides": sides}
