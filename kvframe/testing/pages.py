"""The paged cache of a case: the pages of other requests hold values that a backend must not read."""

from __future__ import annotations

import math

import attrs
import torch

from kvframe.attention.storage import KVCacheStorage
from kvframe.cache.block_table import BlockTable
from kvframe.cache.manager import KVCacheManager
from kvframe.contract.backend import AttentionBackend
from kvframe.contract.formats import PLAIN
from kvframe.contract.slots import Slots
from kvframe.planning.groups import Grouping, group_layers
from kvframe.planning.plan import KVCachePlan, lay_out_cache
from kvframe.testing.case import Case, Request
from kvframe.testing.hosts import Memory
from kvframe.testing.laws import ConformanceError


def plan_pool(case: Case) -> tuple[str, Grouping, KVCachePlan]:
    """Plan a pool with memory for the case twice; the first item is the name of the layer that keeps the cache."""
    layers = [case.layer]
    if case.layer.shares_with is not None:
        layers = [attrs.evolve(case.layer, name=case.layer.shares_with, shares_with=None), case.layer]
    # A second layer in the group takes a part of each page, so that the layer's own parts are not contiguous.
    grouping = group_layers([attrs.evolve(layers[0], name="neighbour"), *layers])
    longest = _longest(case)
    num_blocks = sum(-(-request.seq_len // case.spec.block_size) for request in case.requests)
    spare = 2 + -(-longest // case.spec.block_size)
    memory_bytes = grouping.groups[0].page_bytes * 2 * (num_blocks + spare)
    # The laws check a spec; here its answers would be checked for each case anew.
    plan = lay_out_cache(grouping, memory_bytes=memory_bytes, max_model_len=longest, max_num_batched_tokens=longest)
    return layers[0].name, grouping, plan


def give_pages(manager: KVCacheManager, case: Case) -> None:
    """Allocate each request's pages as an engine would: scattered over the pool, with dead blocks freed."""
    # Requests grow in turns, block by block, next to a request that is freed. So no request has consecutive pages, and
    # the rows of the block table are not in the batch's order.
    size, longest = case.spec.block_size, _longest(case)
    requests = {str(index): request for index, request in reversed([*enumerate(case.requests)])}
    for name in (*requests, "leaves"):
        manager.start(name, [0] * longest)
    for length in range(size, longest + size, size):
        for name, request in requests.items():
            _extend(manager, name, min(length, request.num_cached))
        _extend(manager, "leaves", min(length, longest))
    manager.free("leaves")
    for name, request in requests.items():
        manager.commit(name, [0] * longest, request.num_cached)
        _extend(manager, name, request.seq_len)


def _longest(case: Case) -> int:
    """Return the most tokens of a sequence, of queries or of keys."""
    return max(max(request.seq_len, request.num_new) for request in case.requests)


def _extend(manager: KVCacheManager, name: str, num_tokens: int) -> None:
    has_capacity = manager.extend(name, num_tokens)
    assert has_capacity


def written_tokens(backend_class: type[AttentionBackend], case: Case, request: Request) -> list[int]:
    """Return the cached tokens that are written: live ones, and others in their pages if a backend reads those too."""
    spec, end = case.spec, request.num_cached
    ranges = spec.live_ranges(end)
    if backend_class.capabilities.reads_dead_tokens:
        size = spec.block_size
        ranges = tuple((start * size, min(stop * size, end)) for start, stop in spec.live_blocks(end))
    return [token for start, stop in ranges for token in range(max(start, request.num_hidden), stop)]


def slots_of(table: BlockTable, row: int, tokens: torch.Tensor) -> torch.Tensor:
    """Return the slots of a request's tokens, ``[num_tokens], int64, host``."""
    size = table.block_size
    return torch.from_numpy(table.ids[row])[tokens // size].long() * size + tokens % size


def fill(storage: KVCacheStorage | Memory, case: Case, poison: float) -> None:
    """Fill the pool with poison, which must not reach a backend's output."""
    if case.spec.kv_format == PLAIN:
        storage.pool.view(case.stored_dtype).fill_(poison)
    else:
        # In any format, the parts of a page then hold NaN or large codes, or finite floats and such codes.
        storage.pool.fill_(0xFF if math.isnan(poison) else 0x5E)


def write(
    writer: AttentionBackend,
    case: Case,
    key: torch.Tensor,
    value: torch.Tensor,
    storage: KVCacheStorage | Memory,
    slots: Slots,
) -> None:
    """Let a backend store tokens, and check that all other bytes are unchanged."""
    kv_cache, before = storage.views[case.layer.name], beside(storage, case, slots)
    writer.write_kv(key.to(storage.pool.device), value.to(storage.pool.device), kv_cache, slots)
    after = beside(storage, case, slots)
    if not torch.equal(before, after):
        raise ConformanceError(f"write_kv changes {int((before != after).sum())} bytes beside its slots")


def beside(storage: KVCacheStorage | Memory, case: Case, slots: Slots) -> torch.Tensor:
    """Return a copy of the pool, ``[…], uint8, device``, with zeros in the layer's slots."""
    stored = [(tensor, tensor[slots.places]) for tensor in storage.views[case.layer.name].values()]
    for tensor, values in stored:
        tensor[slots.places] = torch.zeros_like(values)
    copy = storage.pool.clone()
    for tensor, values in stored:
        tensor[slots.places] = values
    return copy
