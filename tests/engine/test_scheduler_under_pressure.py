"""The scheduler over the real cache, in pools so small that requests compete for slabs: every request ends."""

from __future__ import annotations

import attrs
from hypothesis import given
from hypothesis import strategies as st
from kvframe_engine.requests.request import Request, SamplingParams
from kvframe_engine.scheduling.scheduler import Scheduler
from kvframe_engine.scheduling.stats import SchedulerStats

from kvframe.cache.manager import KVCacheManager
from kvframe.contract.specs import KVCacheSpec
from tests.cache.plans import make_plan
from tests.cache.test_manager import SPECS

MAX_LEN, CHUNK = 24, 8


def serve(
    specs: list[KVCacheSpec],
    lengths: list[tuple[int, int]],
    spare_slabs: int,
    prefix_caching: bool,
) -> SchedulerStats:
    """Serve requests whose next token is always their length."""
    plan = make_plan(*specs, max_model_len=MAX_LEN, max_num_batched_tokens=CHUNK)
    needed = max(plan.num_slabs_for(plan.peak_blocks(min(MAX_LEN, prompt + new))) for prompt, new in lengths)
    plan = attrs.evolve(plan, num_slabs=needed + spare_slabs)
    manager = KVCacheManager(plan, max_num_seqs=4, prefix_caching=prefix_caching)
    scheduler = Scheduler(manager, max_num_seqs=4, max_num_batched_tokens=CHUNK, shared_block_size=4)
    requests = [
        Request.create(
            str(index),
            list(range(prompt)),
            SamplingParams(max_new_tokens=new),
            eos_token_ids=frozenset(),
            max_model_len=MAX_LEN,
        )
        for index, (prompt, new) in enumerate(lengths)
    ]
    for request in requests:
        scheduler.add(request)
    for _ in range(5000):
        step = scheduler.schedule()
        if step is None:
            break
        scheduler.complete(step, step.num_known[step.generating].tolist())
    assert all(request.finish_reason == "length" for request in requests)
    assert all(list(request.token_ids) == list(range(len(request.token_ids))) for request in requests)
    assert manager.num_held_pages == 0
    return scheduler.stats


@given(
    specs=st.lists(SPECS, min_size=1, max_size=4),
    lengths=st.lists(st.tuples(st.integers(1, MAX_LEN - 1), st.integers(1, MAX_LEN)), min_size=1, max_size=6),
    spare_slabs=st.integers(0, 2),
    prefix_caching=st.booleans(),
)
def test_every_request_ends_however_small_the_pool(
    specs: list[KVCacheSpec], lengths: list[tuple[int, int]], spare_slabs: int, prefix_caching: bool
) -> None:
    serve(specs, lengths, spare_slabs, prefix_caching)
