"""Pins: a pinned prefix is never evicted, and the longest request still fits beside all pins."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvframe_engine.requests.request import Request, SamplingParams
from kvframe_engine.scheduling.scheduler import Scheduler
from kvframe_testing.audit import audit, audit_each_verb

from kvframe.cache.input_index import InputSequence
from kvframe.cache.manager import KVCacheManager
from kvframe.cache.prefix_lookup import Pin
from kvframe.contract.errors import RequestError
from kvframe.contract.specs import ENCODER, KVCacheSpec
from tests.cache.plans import encoder, full, make_plan, masked, state
from tests.cache.test_manager import SPECS
from tests.support.managers import serve

SYSTEM = list(range(100, 112))


def flood(manager: KVCacheManager) -> None:
    """Let one-off requests use all blocks, again and again."""
    for number in range(1, 9):
        serve(manager, [number * 1000 + index for index in range(32)])


@pytest.mark.parametrize(
    "specs",
    [[full()], [full(), masked(window=6)], [full(), state()], [full(block_size=2), masked(block_size=4, window=6)]],
    ids=["full", "window", "state", "block sizes"],
)
def test_a_pinned_prefix_is_found_when_all_else_was_evicted(specs: list[KVCacheSpec]) -> None:
    manager = KVCacheManager(
        make_plan(*specs, num_slabs=40, max_model_len=32, max_num_batched_tokens=32), max_num_seqs=2
    )
    serve(manager, [*SYSTEM, 1])
    pin = manager.pin([*SYSTEM, 2, 3])
    assert (12, True) == (pin.num_tokens, pin.is_held)
    flood(manager)
    assert 12 == serve(manager, [*SYSTEM, 5])
    audit(manager)
    manager.unpin(pin)
    manager.unpin(pin)
    assert (0, False) == (manager.num_held_pages, pin.is_held)
    flood(manager)
    assert 0 == serve(manager, [*SYSTEM, 5])


def test_all_tokens_of_a_pin_may_be_its_own_where_a_request_leaves_one_to_compute() -> None:
    manager = KVCacheManager(make_plan(full(), num_slabs=20), max_num_seqs=1)
    serve(manager, SYSTEM)
    assert (8, 12) == (manager.find(SYSTEM), manager.pin(SYSTEM).num_tokens)


def test_of_what_is_not_cached_nothing_is_pinned() -> None:
    manager = KVCacheManager(make_plan(full(), num_slabs=20), max_num_seqs=1)
    serve(manager, SYSTEM, salt="tenant")
    assert [0, 0, 12] == [manager.pin(SYSTEM, salt=salt).num_tokens for salt in ("", "other", "tenant")]
    manager = KVCacheManager(make_plan(full(), num_slabs=20), max_num_seqs=1, prefix_caching=False)
    serve(manager, SYSTEM)
    assert 0 == manager.pin(SYSTEM).num_tokens


def test_without_prefix_caching_nothing_is_restored() -> None:
    plan = make_plan(full(), encoder(), num_slabs=20)
    manager = audit_each_verb(KVCacheManager(plan, max_num_seqs=1, prefix_caching=False))
    inputs = {ENCODER: InputSequence(9, b"x")}
    fetched: list[int] = []
    pin = manager.restore(SYSTEM, lambda group, blocks, block_ids: fetched.extend(blocks), inputs=inputs)
    assert pin is not None
    assert (0, [], 0) == (pin.num_tokens, fetched, manager.num_held_pages)
    serve(manager, SYSTEM, inputs=inputs)
    assert 0 == manager.num_held_pages


def test_what_a_request_needs_and_is_not_cached_is_fetched_and_pinned() -> None:
    plan = make_plan(full(), masked(2, window=5), encoder(), num_slabs=60)
    manager = audit_each_verb(KVCacheManager(plan, max_num_seqs=2))
    inputs = {ENCODER: InputSequence(9, b"x")}
    serve(manager, [*SYSTEM[:8], 1], inputs=inputs)
    fetched: list[tuple[int, list[int], list[int]]] = []
    pin = manager.restore(SYSTEM, lambda *pages: fetched.append((pages[0], [*pages[1]], [*pages[2]])), inputs=inputs)
    assert pin is not None
    assert 12 == pin.num_tokens
    # The first 8 tokens and the input are cached. After 12, the window shows the tokens 8 to 11.
    assert [(0, [2], pin.blocks[0][2:].tolist()), (1, [4, 5], pin.blocks[1][4:].tolist())] == fetched
    manager.unpin(pin)
    assert (12, 0) == (manager.find([*SYSTEM, 1], inputs=inputs), manager.num_held_pages)


def test_the_input_of_an_encoder_is_pinned_with_the_prefix() -> None:
    plan = make_plan(full(), encoder(), num_slabs=40, max_model_len=32, max_num_batched_tokens=32)
    manager = KVCacheManager(plan, max_num_seqs=2)
    inputs = {ENCODER: InputSequence(9, b"x")}
    serve(manager, [*SYSTEM, 1], inputs=inputs)
    pin = manager.pin(SYSTEM, inputs=inputs)
    assert [3, 3] == [len(ids) for ids in pin.blocks]
    flood(manager)
    assert 12 == manager.start("late", [*SYSTEM, 5], inputs=inputs)
    assert frozenset() == manager.missing_inputs("late")


def test_what_is_done_to_the_arrays_of_a_pin_does_not_change_the_cache() -> None:
    manager = KVCacheManager(make_plan(full(), encoder(), num_slabs=40), max_num_seqs=1)
    inputs = {ENCODER: InputSequence(9, b"x")}
    serve(manager, [*SYSTEM, 1], inputs=inputs)
    pin = manager.pin(SYSTEM, inputs=inputs)
    manager.unpin(pin)
    for block_ids in pin.blocks:
        block_ids.fill(0)
    assert 12 == manager.start("late", [*SYSTEM, 5], inputs=inputs)
    assert frozenset() == manager.missing_inputs("late")
    audit(manager)


def test_a_pin_that_leaves_no_room_for_the_longest_request_is_refused_and_changes_nothing() -> None:
    plan = make_plan(full(), num_slabs=10, max_model_len=32, max_num_batched_tokens=32)
    plan = attrs.evolve(
        plan, groups=(attrs.evolve(plan.groups[0], pages_per_slab=1),), slab_bytes=plan.groups[0].page_bytes
    )
    manager = KVCacheManager(plan, max_num_seqs=1)
    serve(manager, SYSTEM)
    manager.pin(SYSTEM[:8])
    with pytest.raises(
        RequestError,
        match=r"^with these 12 tokens pinned, 7 of the cache's 10 slabs are left, but a request of 32 tokens",
    ) as refused:
        manager.pin(SYSTEM)
    assert ("no_capacity", 2) == (refused.value.code, manager.num_held_pages)
    # Another pin of the same pages takes no further pages.
    assert 8 == manager.pin(SYSTEM[:8]).num_tokens
    audit(manager)


def test_a_reset_ends_pins() -> None:
    manager = KVCacheManager(make_plan(full(), num_slabs=20), max_num_seqs=1)
    serve(manager, SYSTEM)
    pin = manager.pin(SYSTEM)
    manager.reset_prefix_cache()
    audit(manager)
    assert (False, 0, 0) == (pin.is_held, manager.num_held_pages, manager.find([*SYSTEM, 1]))
    manager.unpin(pin)
    audit(manager)


MAX_LEN, CHUNK = 24, 8


@given(
    specs=st.lists(SPECS, min_size=1, max_size=4),
    lengths=st.lists(st.tuples(st.integers(1, MAX_LEN - 1), st.integers(1, MAX_LEN)), min_size=1, max_size=6),
    spare_slabs=st.integers(0, 12),
    seed=st.integers(0, 2**32),
)
def test_every_request_ends_whatever_is_pinned_meanwhile(
    specs: list[KVCacheSpec], lengths: list[tuple[int, int]], spare_slabs: int, seed: int
) -> None:
    plan = make_plan(*specs, max_model_len=MAX_LEN, max_num_batched_tokens=CHUNK)
    plan = attrs.evolve(plan, num_slabs=plan.num_slabs_for(plan.peak_blocks(MAX_LEN)) + spare_slabs)
    manager = KVCacheManager(plan, max_num_seqs=4)
    scheduler: Scheduler[Request] = Scheduler(
        manager, max_num_seqs=4, max_num_batched_tokens=CHUNK, shared_block_size=4
    )
    requests = [
        Request.create(
            str(index),
            list(range(index % 3 * 100, index % 3 * 100 + prompt)),
            SamplingParams(max_new_tokens=new),
            eos_token_ids=frozenset(),
            max_model_len=MAX_LEN,
        )
        for index, (prompt, new) in enumerate(lengths)
    ]
    draw = random.Random(seed)
    pins: list[Pin] = []
    for request in requests:
        # As if the request had found too few blocks before.
        request.runs_alone = draw.random() < 0.3
        scheduler.add(request)
    for _ in range(5000):
        if draw.random() < 0.3:
            with contextlib.suppress(RequestError):
                first = 100 * draw.randint(0, 2)
                pins.append(manager.pin(range(first, first + draw.randint(0, MAX_LEN))))
                scheduler.note_pin()
        elif pins and draw.random() < 0.1:
            manager.unpin(pins.pop(draw.randrange(len(pins))))
        step = scheduler.schedule()
        if step is None:
            break
        scheduler.complete(step, step.num_known[step.generating].tolist())
    assert all(request.finish_reason == "length" for request in requests)
    for pin in pins:
        manager.unpin(pin)
    audit(manager)
    assert 0 == manager.num_held_pages


class Scattered(KVCacheManager):
    """A cache that, for a while, has no free blocks for any request."""

    num_refusals = 0

    def extend(self, *asked: Any) -> bool:
        self.num_refusals -= 1
        return self.num_refusals < 0 and super().extend(*asked)

    def extend_rows(self, *asked: Any) -> bool:
        self.num_refusals -= 1
        return self.num_refusals < 0 and super().extend_rows(*asked)


def test_a_request_that_ran_alone_starts_anew_where_something_was_pinned_since() -> None:
    manager = Scattered(make_plan(full(), num_slabs=20), max_num_seqs=1)
    scheduler: Scheduler[Request] = Scheduler(manager, max_num_seqs=1, max_num_batched_tokens=16)
    params = SamplingParams(max_new_tokens=2)
    request = Request.create("it", [1, 2, 3, 4], params, eos_token_ids=frozenset(), max_model_len=16)
    request.runs_alone = True
    scheduler.add(request)
    for _ in range(2):
        step = scheduler.schedule()
        assert step is not None
        scheduler.complete(step, [9])
        scheduler.note_pin()
        manager.num_refusals = 2
    assert ("length", [1, 2, 3, 4, 9, 9]) == (request.finish_reason, list(request.token_ids))
    assert 1 == scheduler.stats.preemptions
