"""Changes the size of the cache while the engine runs."""

from __future__ import annotations

from collections.abc import Iterable

from kvframe import KVCacheManager, KVCachePlan, KVCacheStorage
from kvframe.contract.errors import PlanError
from kvframe_engine.requests.progress import RequestProgress, RequestT
from kvframe_engine.scheduling.scheduler import Scheduler


def resize(
    manager: KVCacheManager,
    storage: KVCacheStorage,
    scheduler: Scheduler[RequestT],
    requests: Iterable[RequestProgress],
    memory: str | int,
) -> KVCachePlan:
    """Move the cache to a pool of another size, between steps; return its plan.

    If the cache shrinks below the blocks of running requests, the requests that were admitted last are preempted.

    Args:
        manager: The cache manager.
        storage: The bytes of its pages.
        scheduler: The scheduler.
        requests: All unfinished requests.
        memory: The most bytes that the cache may take, or a size such as ``"2GiB"``.

    Raises:
        StackError: ``memory`` is not a size.
        PlanError: The cache would be too small for the groups, for a request or for the pinned prefixes, or the device
            does not have enough memory; the cache is unchanged.
    """
    plan = manager.plan.resized(memory)
    for request in requests:
        input_lens = {name: value.num_tokens for name, value in request.inputs.items()}
        if not plan.fits(request.num_final_tokens, input_lens):
            raise PlanError(
                f"a cache of {plan.total_bytes} bytes does not hold the request {request.asked_id!r} of "
                f"{request.num_final_tokens} tokens, which has not ended; wait until it ends, or abort it"
            )
    if plan.total_bytes == manager.plan.total_bytes:
        return plan
    pool = storage.reserve(plan)
    while not manager.resize(plan.num_slabs):
        if not scheduler.running:
            raise PlanError(
                f"prefixes are pinned at the end of the cache, or leave too little of {plan.total_bytes} bytes; unpin "
                "them, or give it more memory"
            )
        scheduler.preempt_last()
    storage.move(plan, pool)
    return plan
