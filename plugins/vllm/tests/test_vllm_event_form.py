"""Events in vLLM's form are decoded by vLLM's own structs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvframe import BlocksRemoved, BlocksStored, CacheCleared, CacheLayout, GroupLayout, Need
from kvframe.routing import to_plain

vllm_form = pytest.importorskip("kvframe_zmq.vllm_form")
kv_events = pytest.importorskip("vllm.distributed.kv_events")
GROUPS = tuple(GroupLayout(group=index, block_size=2, need=need) for index, need in enumerate((Need(), Need(last=7))))


@pytest.mark.parametrize("int_hashes", [True, False])
def test_vllm_decodes_the_events(int_hashes: bool) -> None:
    run: dict[str, Any] = {"block_size": 2, "parent": b"p" * 32, "start": 4, "tokens": (5, 6, 7, 8), "salt": "s"}
    events = [
        CacheCleared(layout=CacheLayout(alignment=2, max_tokens=8, groups=GROUPS)),
        *(BlocksStored(group=group, keys=(b"a" * 32, b"b" * 32), **run) for group in (0, 1)),
        BlocksStored(group=0, keys=(b"a" * 32,), block_size=2, medium="host_memory"),
        BlocksRemoved(group=1, keys=(b"b" * 32,)),
    ]
    form = vllm_form.VllmForm(int_hashes=int_hashes)
    payload = msgspec.msgpack.encode([1.5, form.events_of(to_plain(events)), 0])
    batch = msgspec.msgpack.decode(payload, type=kv_events.KVEventBatch)
    cleared, full, window, copied, removed = batch.events
    key = int.from_bytes(b"a" * 8, "big") if int_hashes else b"a" * 32
    assert (kv_events.AllBlocksCleared(), 1.5, 0) == (cleared, batch.ts, batch.data_parallel_rank)
    assert (key, [5, 6, 7, 8], 2, "GPU") == (full.block_hashes[0], full.token_ids, full.block_size, full.medium)
    assert ("full_attention", 0) == (full.kv_cache_spec_kind, full.group_idx)
    assert ("sliding_window", 8) == (window.kv_cache_spec_kind, window.kv_cache_spec_sliding_window)
    assert ("CPU", None, []) == (copied.medium, copied.parent_block_hash, copied.token_ids)
    assert isinstance(removed, kv_events.BlockRemoved)
