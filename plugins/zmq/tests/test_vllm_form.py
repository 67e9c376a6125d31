"""Events in vLLM's form: they are decoded by structs with the fields of vLLM 0.32, and asked for as vLLM's are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import zmq
from kvframe_zmq import ZmqPublisher
from kvframe_zmq.vllm_form import VllmForm
from kvframe_zmq.wire import END

from kvframe import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheLayout,
    FullAttentionSpec,
    GroupLayout,
    KVCacheManager,
    Need,
    group_layers,
    plan_cache,
    prefix_key,
)
from kvframe.contract import LayerSpec
from kvframe.routing import to_plain
from tests.support.ports import free_port

SECRET, TOKENS = bytes(range(32)), [*range(100, 113)]
Hash = int | bytes
# The fields of vllm/distributed/kv_events.py in vLLM 0.32, and their defaults.
BlockStored = msgspec.defstruct(
    "BlockStored",
    [
        ("block_hashes", list[Hash]),
        ("parent_block_hash", Hash | None),
        ("token_ids", list[int]),
        ("block_size", int),
        ("lora_id", int | None),
        ("medium", str | None),
        ("lora_name", str | None),
        ("extra_keys", list[tuple[Any, ...] | None] | None, None),
        ("group_idx", int | None, None),
        ("kv_cache_spec_kind", str | None, None),
        ("kv_cache_spec_sliding_window", int | None, None),
        ("locality", str | None, None),
        ("ownership", str | None, None),
        ("session_id", str | None, None),
    ],
    tag=True,
    forbid_unknown_fields=True,
)
BlockRemoved = msgspec.defstruct(
    "BlockRemoved",
    [
        ("block_hashes", list[Hash]),
        ("medium", str | None),
        ("group_idx", int | None, None),
        ("locality", str | None, None),
        ("ownership", str | None, None),
    ],
    tag=True,
    forbid_unknown_fields=True,
)
AllBlocksCleared = msgspec.defstruct("AllBlocksCleared", [], tag=True, forbid_unknown_fields=True)
Batch = msgspec.defstruct(
    "KVEventBatch",
    [
        ("ts", float),
        ("events", list[BlockStored | BlockRemoved | AllBlocksCleared]),  # type: ignore[valid-type]
        ("data_parallel_rank", int | None, None),
    ],
    array_like=True,
)


def decoded(events: Sequence[Any], *, int_hashes: bool = True) -> list[Any]:
    payload = msgspec.msgpack.encode([1.0, VllmForm(int_hashes=int_hashes).events_of(to_plain(events)), 0])
    batch: Any = msgspec.msgpack.decode(payload, type=Batch)
    assert (1.0, 0) == (batch.ts, batch.data_parallel_rank)
    return list(batch.events)


def cleared(*needs: Need | None) -> CacheCleared:
    groups = [
        GroupLayout(group=index, block_size=4, sequence="tokens" if need else "encoder", need=need)
        for index, need in enumerate(needs)
    ]
    return CacheCleared(layout=CacheLayout(alignment=4, max_tokens=64, groups=tuple(groups)))


def stored(group: int = 0, start: int = 0, salt: str = "") -> BlocksStored:
    ends = range(start, start + 9, 4)
    parent, *keys = (prefix_key(SECRET, TOKENS[:end], salt=salt) for end in ends)
    tokens = tuple(TOKENS[start : start + 8])
    return BlocksStored(
        group=group, keys=tuple(keys), block_size=4, parent=parent, start=start, tokens=tokens, salt=salt
    )


def as_int(key: bytes) -> int:
    return int.from_bytes(key[-8:], "big")


def test_a_run_of_blocks_has_vllms_fields() -> None:
    first, later = stored(salt="anna"), stored(start=4)
    empty, of_first, of_later = decoded([cleared(Need()), first, later])
    assert isinstance(empty, AllBlocksCleared)
    expected = {
        "block_hashes": [as_int(key) for key in first.keys],
        "parent_block_hash": None,
        "token_ids": TOKENS[:8],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [("anna",), None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    assert BlockStored(**expected) == of_first
    assert later.parent is not None
    assert (as_int(later.parent), None, TOKENS[4:12]) == (
        of_later.parent_block_hash,
        of_later.extra_keys,
        of_later.token_ids,
    )
    *_, as_bytes = decoded([cleared(Need()), later], int_hashes=False)
    assert (list(later.keys), later.parent) == (as_bytes.block_hashes, as_bytes.parent_block_hash)


def test_host_memory_is_vllms_cpu() -> None:
    copied = BlocksStored(group=0, keys=(b"k" * 32,), block_size=4, medium="host_memory")
    removed = BlocksRemoved(group=0, keys=(b"k" * 32, b"l" * 32), medium="host_memory")
    _, of_copied, of_removed = decoded([cleared(Need()), copied, removed])
    assert ("CPU", None, []) == (of_copied.medium, of_copied.parent_block_hash, of_copied.token_ids)
    assert BlockRemoved([as_int(b"k" * 8), as_int(b"l" * 8)], "CPU", 0) == of_removed


@pytest.mark.parametrize(
    ("need", "kind", "window"),
    [
        (Need(), "full_attention", None),
        (Need(last=7), "sliding_window", 8),
        (Need(chunk=8), "chunked_local_attention", None),
        (Need(last=7, first=4), "unknown", None),
        (Need(deaths=((3, 4, 9),)), "unknown", None),
    ],
)
def test_a_need_has_a_word_of_vllm(need: Need, kind: str, window: int | None) -> None:
    *_, event = decoded([cleared(Need(), need), stored(group=1)])
    assert (1, kind, window) == (event.group_idx, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)


def test_blocks_that_depend_on_an_input_are_left_out() -> None:
    events = [cleared(Need(), None), stored(), BlocksRemoved(group=0, keys=stored().keys)]
    assert [AllBlocksCleared()] == decoded(events)


def test_a_subscriber_of_vllm_reads_and_asks_as_it_does_of_vllm() -> None:
    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    layers = [LayerSpec(name="layer", spec=FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4))]
    plan = plan_cache(group_layers(layers), memory_bytes=1 << 14, max_model_len=64, max_num_batched_tokens=64)
    manager = KVCacheManager(plan, max_num_seqs=1)
    log = manager.record_events(SECRET)
    opened = ZmqPublisher(endpoint=events, replay=replay, form="vllm", topic="kv@here").open()
    context = zmq.Context()
    try:
        for end in (5, 13):
            manager.start("a", TOKENS[:end])
            manager.extend("a", end)
            manager.commit("a", TOKENS[:end], end)
            manager.free("a")
            opened.publish(to_plain(log.take()))
        asking = context.socket(zmq.REQ)
        asking.connect(replay)
        asking.send((0).to_bytes(8, "big"))
        batches = []
        while (frames := asking.recv_multipart())[1] != END:
            topic, number, payload = frames
            assert (b"kv@here", len(batches)) == (topic, int.from_bytes(number, "big"))
            batches.append(msgspec.msgpack.decode(payload, type=Batch))
            break  # a REQ socket takes one answer
        dealer = context.socket(zmq.DEALER)
        dealer.connect(replay)
        dealer.send_multipart([b"", (1).to_bytes(8, "big")])
        _, _, number, payload = dealer.recv_multipart()
        assert [b"", b"", END, b""] == dealer.recv_multipart()
        batches.append(msgspec.msgpack.decode(payload, type=Batch))
        assert ([4, 8], 1) == ([len(batch.events[-1].token_ids) for batch in batches], int.from_bytes(number, "big"))
        last: Any = batches[1].events[-1]
        assert (TOKENS[4:12], batches[0].events[-1].block_hashes[0]) == (last.token_ids, last.parent_block_hash)
    finally:
        context.destroy(linger=0)
        opened.close()
