"""Prefixes that come back to the device: each needed page has the bytes of its tokens, for every mixture of types."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvframe_engine.host_storage import HostStorage
from kvframe_engine.tiers.stored_pages import StoredPages
from kvframe_engine.tiers.tiers import Tiers
from kvframe_stores import page_writer
from kvframe_testing.audit import audit_each_verb

from kvframe.cache.input_index import InputSequence
from kvframe.cache.manager import KVCacheManager
from kvframe.contract.specs import ENCODER, KVCacheSpec
from kvframe.planning.plan import KVCachePlan
from kvframe.routing import PrefixIndex
from tests.cache.plans import encoder, full, make_plan, ranged
from tests.cache.test_manager import SPECS
from tests.support.engines import audit_host_tier
from tests.support.stores import SHELVES, Shelf, ShelfStore

MAX_LEN, CHUNK = 40, 8


class Device:
    """A cache whose pages contain a hash of the tokens up to their ends, with tiers."""

    def __init__(self, plan: KVCachePlan, host_slabs: int, *, stores: bool, flushes: bool = True) -> None:
        self.flushes = flushes
        self.plan, self.has_stores = plan, stores
        self.pool = torch.zeros(plan.total_bytes, dtype=torch.uint8)
        host = HostStorage(plan, self.pool, host_slabs) if host_slabs else None
        self.manager = audit_each_verb(KVCacheManager(plan, max_num_seqs=3))
        storage: Any = SimpleNamespace(pool=self.pool, plan=plan)
        page_stores = [ShelfStore(shelf="one")] if stores else []
        pages = StoredPages(storage, page_stores, bytes(32), lambda: ["plan"]) if stores else None
        self.tiers = Tiers(self.manager, host, pages, bytes(32))
        self.events, self.index = self.manager.record_events(bytes(32)), PrefixIndex(bytes(32))

    def page(self, group: int, block_id: int) -> torch.Tensor:
        start = block_id * self.plan.block_id_bytes
        return self.pool[start : start + self.plan.groups[group].page_bytes]

    def content(self, group: int, block: int, tokens: Sequence[int], encoded: InputSequence | None) -> torch.Tensor:
        planned = self.plan.groups[group]
        of_tokens = str((group, list(tokens[: (block + 1) * planned.block_size]), encoded))
        of_input = str((group, block, encoded))
        digest = hashlib.blake2b((of_input if planned.is_of_input else of_tokens).encode()).digest()
        return torch.from_numpy(np.resize(np.frombuffer(digest, dtype=np.uint8), planned.page_bytes))

    def serve(self, name: str, tokens: Sequence[int], encoded: InputSequence | None, chunks: Sequence[int]) -> int:
        """Serve a prompt; return the tokens of its hit, after checking the bytes that a request reads after it."""
        inputs = {} if encoded is None else {ENCODER: encoded}
        request: Any = SimpleNamespace(
            uses_prefix=True, forks_from=None, fetch=None, keeps_part=False,
            token_ids=array("I", tokens), cache_salt="", input_sequences=inputs,
            num_prompt_tokens=len(tokens),
        )  # fmt: skip
        self.index.apply("here", self.events.take())
        expected_hit = self.index.hits(tokens, inputs=inputs)["here"]
        self.tiers.begin(request)
        while not self.tiers.is_ready(request):
            self.tiers.wait()
        if request.fetch is not None:
            assert self.tiers.restore(request) is not None, "nothing runs"
        hit = self.manager.start(name, request.token_ids, inputs=inputs)
        self.tiers.drop(request)
        # Another engine may have given the stores more.
        assert hit == expected_hit or (self.has_stores and hit > expected_hit)
        missing = self.manager.missing_inputs(name)
        for planned, ids in zip(self.plan.groups, self.manager.block_ids(name), strict=True):
            if planned.is_of_input:
                needed = range(0 if missing else len(ids))
            else:
                needed = [block for start, stop in planned.answers.live_blocks(hit) for block in range(start, stop)]
            for block in needed:
                expected = self.content(planned.index, block, tokens, encoded)
                assert torch.equal(expected, self.page(planned.index, ids[block])), (planned.spec.kind, hit, block)
        done, steps = hit, iter([*chunks, *[MAX_LEN] * MAX_LEN])
        while done < len(tokens):
            target = min(len(tokens), done + max(1, min(CHUNK, next(steps))))
            assert self.manager.extend(name, target)
            for planned, ids in zip(self.plan.groups, self.manager.block_ids(name), strict=True):
                size = planned.block_size
                ended = range(len(ids)) if planned.is_of_input else range(done // size, target // size)
                for block in ended:
                    if ids[block] and (not planned.is_of_input or missing):
                        self.page(planned.index, ids[block]).copy_(self.content(planned.index, block, tokens, encoded))
            self.manager.commit(name, request.token_ids, target)
            done, missing = target, frozenset()
            self.tiers.after_step(0, 0.0, is_last=False)
        self.manager.free(name)
        if self.tiers.host_tier is not None:
            audit_host_tier(self.tiers.host_tier)
        if self.flushes:
            assert self.tiers.flush(10.0)
        return hit


REQUESTS = st.tuples(st.integers(0, 2), st.integers(1, MAX_LEN), st.integers(0, 1), st.lists(st.integers(1, 8)))
"""The branch that a prompt's tokens follow, its length, its input, and how many tokens its steps compute."""


@given(
    specs=st.lists(SPECS, min_size=1, max_size=4),
    with_input=st.booleans(),
    requests=st.lists(REQUESTS, min_size=2, max_size=8),
    host_slabs=st.sampled_from([0, 4, 12, 60]),
    stores=st.booleans(),
    branch_at=st.integers(0, 20),
    queued_bytes=st.sampled_from([0, 2000, 1 << 28]),
)
def test_what_a_request_continues_from_has_the_bytes_of_its_tokens(
    specs: list[KVCacheSpec],
    with_input: bool,
    requests: list[tuple[int, int, int, list[int]]],
    host_slabs: int,
    stores: bool,
    branch_at: int,
    queued_bytes: int,
) -> None:
    SHELVES["one"] = Shelf()
    specs = [*specs, *([encoder()] if with_input else [])]
    plan = make_plan(*specs, max_model_len=MAX_LEN, max_num_batched_tokens=CHUNK)
    needed = plan.num_slabs_for(plan.peak_blocks(MAX_LEN, {ENCODER: 9} if with_input else None))
    plan = attrs.evolve(plan, num_slabs=needed)
    host_slabs = max(host_slabs, len(plan.groups)) if host_slabs else 0
    # Pages that the stores get late may be evicted, and have other content, before they are copied.
    flushes = queued_bytes == 1 << 28
    devices = [Device(plan, host_slabs, stores=stores, flushes=flushes) for _ in range(2)]
    try:
        page_writer.MAX_QUEUED_BYTES = queued_bytes
        for index, (branch, length, sort_of_input, chunks) in enumerate(requests):
            tokens = [token if token < branch_at else token + 1000 * branch for token in range(length)]
            encoded = InputSequence(9, b"%d" % sort_of_input) if with_input else None
            devices[index % 2].serve(str(index), tokens, encoded, chunks)
    finally:
        page_writer.MAX_QUEUED_BYTES = 256 << 20
        for device in devices:
            device.tiers.close()


def test_a_small_cache_with_a_store_finds_what_a_large_one_finds() -> None:
    SHELVES["one"] = Shelf()
    plan = make_plan(full(), ranged(window=6), encoder(), max_model_len=MAX_LEN, max_num_batched_tokens=CHUNK)
    slabs = plan.num_slabs_for(plan.peak_blocks(MAX_LEN, {ENCODER: 9}))
    small, large = (Device(attrs.evolve(plan, num_slabs=factor * slabs), 0, stores=factor == 1) for factor in (1, 20))
    prompts = [[100 * branch + token for token in range(30)] for branch in (1, 2, 3, 1, 2, 3)]
    try:
        hits = [
            [device.serve(str(index), tokens, InputSequence(9, b"sound"), []) for index, tokens in enumerate(prompts)]
            for device in (small, large)
        ]
    finally:
        small.tiers.close()
    assert [0, 0, 0, 28, 28, 28] == hits[0] == hits[1]
    assert small.tiers.counts.restored_tokens > 0
