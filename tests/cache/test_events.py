"""Cache events: a listener learns what can be found, in order and nothing else; without one there is no cost."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from kvframe_engine.engine import Engine
from kvframe_engine.requests.request import SamplingParams
from kvframe_engine.tiers.host_tier import HostTier
from kvframe_testing.audit import findable_pages

import kvframe
from kvframe.cache import events as events_module
from kvframe.cache.events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent, PrefixHash
from kvframe.cache.input_index import InputSequence
from kvframe.cache.manager import KVCacheManager
from kvframe.config.stack import Stack
from kvframe.contract.specs import ENCODER, KVCacheSpec
from tests.cache.mirror import SECRET, Mirror, key_of_input, key_of_tokens
from tests.cache.plans import encoder, full, make_plan, ranged, state
from tests.engine.scripted_model import ScriptedModel
from tests.engine.test_embedding import Echo
from tests.support import managers
from tests.support.engines import manager_of
from tests.support.managers import compute

PROMPT = "the quick brown"
SHORT = SamplingParams(max_new_tokens=3)


def make_manager(*specs: KVCacheSpec, num_slabs: int = 40) -> KVCacheManager:
    return managers.make_manager(*specs, num_slabs=num_slabs, max_num_batched_tokens=64, max_encoder_len=12)


def stored(tokens: Sequence[int], start: int, stop: int, size: int, salt: str = "", group: int = 0) -> BlocksStored:
    return BlocksStored(
        group=group,
        parent=key_of_tokens(tokens[:start], salt),
        keys=tuple(key_of_tokens(tokens[:end], salt) for end in range(start + size, stop + 1, size)),
        tokens=tuple(tokens[start:stop]),
        start=start,
        block_size=size,
        salt=salt,
    )


def cleared(manager: KVCacheManager) -> CacheCleared:
    return CacheCleared(layout=manager.layout)


def copied(tokens: Sequence[int], *ends: int) -> BlocksStored:
    keys = tuple(key_of_tokens(tokens[:end]) for end in ends)
    return BlocksStored(group=0, keys=keys, block_size=4, medium="host_memory")


def cached(engine: Engine) -> dict[tuple[int, bytes], BlocksStored]:
    """Return the events that a new listener of an engine gets; it replaces the earlier listener."""
    mirror = Mirror()
    engine.on_cache_events = mirror.replay
    return mirror.blocks


# --- the events -------------------------------------------------------------------------------------------------------


def test_blocks_are_told_of_as_they_become_full() -> None:
    manager, tokens = make_manager(full(4)), [*range(20)]
    log = manager.record_events(SECRET)
    assert [cleared(manager)] == log.take()
    manager.start("a", tokens)
    assert manager.extend("a", 20)
    for computed, expected in [(3, []), (10, [stored(tokens, 0, 8, 4)]), (11, []), (20, [stored(tokens, 8, 20, 4)])]:
        manager.commit("a", tokens, computed)
        assert expected == log.take(), computed
    manager.free("a")
    assert [] == log.take()


def test_blocks_of_many_requests_are_told_of_as_they_become_full() -> None:
    manager, prompts = make_manager(full(4)), {"a": [*range(20)], "b": [*range(30, 50)]}
    log = manager.record_events(SECRET)
    for name, tokens in prompts.items():
        manager.start(name, tokens)
    rows = np.array([manager.row(name) for name in prompts])
    assert manager.extend_rows(rows, np.full(2, 20))
    assert [cleared(manager)] == log.take()
    for computed, first in [(3, None), (9, 0), (20, 8)]:
        manager.commit_rows(rows, np.full(2, computed))
        told = [] if first is None else [stored(tokens, first, computed // 4 * 4, 4) for tokens in prompts.values()]
        assert told == log.take(), computed


def test_a_block_that_many_compute_is_told_of_once() -> None:
    manager, tokens = make_manager(full(4)), [*range(12)]
    log = manager.record_events(SECRET)
    for name in "abc":
        compute(manager, name, tokens)
    assert [cleared(manager), stored(tokens, 0, 12, 4)] == log.take()
    compute(manager, "d", [*range(8), 99, 98, 97, 96])
    assert [stored([*range(8), 99, 98, 97, 96], 8, 12, 4)] == log.take()


def test_each_group_has_its_own_blocks() -> None:
    manager, tokens = make_manager(full(2), ranged(4, window=4)), [*range(8)]
    log = manager.record_events(SECRET)
    compute(manager, "a", tokens)
    assert [
        cleared(manager),
        stored(tokens, 0, 8, 2),
        stored(tokens, 0, 8, 4, group=1),
    ] == log.take()


def test_a_group_that_stores_few_blocks_says_which() -> None:
    manager, tokens = make_manager(full(4), state(4)), [*range(13)]
    log = manager.record_events(SECRET)
    compute(manager, "a", tokens)
    assert [
        cleared(manager),
        stored(tokens, 0, 12, 4),
        stored(tokens, 8, 12, 4, group=1),
    ] == log.take()


def test_salts_have_keys_of_their_own() -> None:
    manager, tokens = make_manager(full(4)), [*range(8)]
    log = manager.record_events(SECRET)
    for salt in ("", "anna", "ben"):
        compute(manager, f"of {salt}", tokens, salt=salt)
    assert [
        cleared(manager),
        *(stored(tokens, 0, 8, 4, salt) for salt in ("", "anna", "ben")),
    ] == log.take()


def test_tokens_after_an_input_have_keys_of_their_own_and_so_have_its_blocks() -> None:
    manager, tokens, given = make_manager(full(4), encoder(4)), [*range(4)], {ENCODER: InputSequence(9, b"sound")}
    log = manager.record_events(SECRET)
    compute(manager, "a", tokens, inputs=given, salt="anna")
    first, of_input, of_tokens = log.take()
    ends = [key_of_input(num_tokens, (9, b"sound"), "anna") for num_tokens in (0, 4, 8, 9)]
    assert of_input == BlocksStored(
        group=1,
        parent=ends[0],
        keys=tuple(ends[1:]),
        tokens=(),
        start=0,
        block_size=4,
        sequence=ENCODER,
        salt="anna",
    )
    assert isinstance(of_tokens, BlocksStored)
    assert (key_of_tokens(tokens, "anna", (9, b"sound")),) == of_tokens.keys
    assert cleared(manager) == first


def test_what_is_evicted_is_removed_with_what_hangs_on_it() -> None:
    manager, tokens = make_manager(full(4), num_slabs=6), [*range(16)]
    log, mirror = manager.record_events(SECRET), Mirror()
    compute(manager, "a", tokens)
    manager.free("a")
    mirror.replay(log.take())
    compute(manager, "b", [50, 51, 52, 53] * 3)
    *removed, last = events = log.take()
    assert all(isinstance(event, BlocksRemoved) for event in removed)
    assert isinstance(last, BlocksStored)
    mirror.replay(events)
    # The end of the cached prefix is evicted first.
    left = {(0, key_of_tokens(tokens[:end])) for end in (4, 8, 12)}
    assert left == {block for block in mirror.blocks if block[1] not in last.keys}
    assert 12 == manager.find(tokens)


def test_a_reset_clears_all_of_it_held_blocks_included() -> None:
    manager, tokens = make_manager(full(4)), [*range(8)]
    log = manager.record_events(SECRET)
    compute(manager, "a", tokens)
    compute(manager, "b", [9] * 8)
    manager.free("b")
    log.take()
    manager.reset_prefix_cache()
    manager.commit("a", tokens, 8)
    manager.free("a")
    assert [cleared(manager)] == log.take()


def test_blocks_go_to_host_memory_before_they_leave_the_device_and_leave_it_in_turn() -> None:
    plan = make_plan(full(4), num_slabs=2, max_model_len=8)
    manager = KVCacheManager(plan, max_num_seqs=1)
    manager.watch_pages(SECRET, HostTier(manager, managers.HostWithoutBytes(2)))
    first, second, third = ([token] * 8 for token in (1, 2, 3))
    managers.serve(manager, first)
    log = manager.record_events(SECRET)
    assert [cleared(manager), stored(first, 0, 8, 4)] == log.take()
    managers.serve(manager, second)
    ends, keys = (8, 4), {name: key_of_tokens(tokens[:8]) for name, tokens in [("first", first), ("second", second)]}
    of_device = BlocksRemoved(group=0, keys=tuple(key_of_tokens(first[:end]) for end in ends))
    assert [copied(first, *ends), of_device, stored(second, 0, 8, 4)] == log.take()
    managers.serve(manager, third)
    events = log.take()
    gone = [event for event in events if isinstance(event, BlocksRemoved)]
    assert ["host_memory", "device"] == [event.medium for event in gone]
    assert ({*of_device.keys}, keys["second"]) == ({*gone[0].keys}, gone[1].keys[0])
    late = manager.record_events(SECRET).take()
    assert [cleared(manager), stored(third, 0, 8, 4), copied(second, *ends)] == late


def test_who_comes_late_is_told_of_all_that_is_there() -> None:
    manager, tokens = make_manager(full(4), ranged(2, window=4), encoder(4)), [*range(12)]
    first = manager.record_events(SECRET)
    compute(manager, "a", tokens, inputs={ENCODER: InputSequence(5, b"x")})
    compute(manager, "b", [*range(6), *[7] * 6])
    manager.free("b")
    early, late = Mirror(), Mirror()
    early.replay(first.take())
    late.replay(manager.record_events(SECRET).take())
    assert early.blocks.keys() == late.blocks.keys() != set()
    compute(manager, "c", [3] * 8)
    assert [] == first.take()


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_nothing_is_recorded_and_nothing_hashed_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("nobody listens")

    log = (manager := make_manager(full(4))).record_events(SECRET)
    manager.stop_events()
    for name in ("record_stored", "record_stored_input", "record_removed", "record_cleared"):
        monkeypatch.setattr(events_module.EventLog, name, never)
    monkeypatch.setattr(events_module, "blake2b", never)
    monkeypatch.setattr(manager._publisher, "update_full_leaves", never)
    tokens = [*range(16)]
    compute(manager, "a", tokens)
    manager.commit_rows(np.array([manager.row("a")]), np.array([16]))
    manager.free("a")
    manager.reset_prefix_cache()
    assert [cleared(manager)] == log.take()


def test_a_step_costs_something_only_for_requests_that_fill_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager(full(4))
    log = manager.record_events(SECRET)
    texts = {"a": [*range(20)], "b": [7] * 20, "c": [8] * 20}
    for name, tokens in texts.items():
        manager.start(name, tokens)
        assert manager.extend(name, 20)
    rows, ends = np.array([manager.row(name) for name in texts]), np.array([4, 5, 6])
    manager.commit_rows(rows, ends)
    log.take()
    updated: list[int] = []
    update = manager._publisher._update_leaf
    monkeypatch.setattr(manager._publisher, "_update_leaf", lambda leaf: (updated.append(leaf.row), update(leaf))[1])
    for step in range(1, 9):
        updated.clear()
        manager.commit_rows(rows, ends + step)
        full_rows = rows[(ends + step) % 4 == 0].tolist()
        assert full_rows == updated
        assert len(full_rows) == len(log.take())


@pytest.mark.parametrize("sizes", [(4,), (2, 4), (4, 6)])
def test_a_token_is_hashed_as_often_however_long_its_prefix_is(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []
    add = PrefixHash.add_tokens
    monkeypatch.setattr(
        PrefixHash, "add_tokens", lambda self, tokens: (hashed.append(len(tokens)), add(self, tokens))[1]
    )
    manager, tokens = make_manager(*map(full, sizes)), [*range(60)]
    manager.record_events(SECRET)
    manager.start("a", tokens)
    assert manager.extend("a", 60)
    of_first_half = 0
    for computed in range(1, 61):
        manager.commit("a", tokens, computed)
        of_first_half = sum(hashed) if computed == 36 else of_first_half
    assert sum(hashed) - of_first_half <= of_first_half
    assert sum(hashed) <= 60 * (1 if len(sizes) == 1 else 4)


# --- the engine -------------------------------------------------------------------------------------------------------


def test_an_engine_tells_after_each_step_and_at_a_reset() -> None:
    batches: list[list[CacheEvent]] = []
    with ScriptedModel(PROMPT).engine() as engine:
        engine.on_cache_events = lambda events: batches.append(list(events))
        engine.generate([PROMPT], SHORT, cache_salt="anna")
        engine.reset_prefix_cache()
        all_cleared = [cleared(manager_of(engine))]
    first, of_prompt, *of_answer, last = batches
    assert (all_cleared, all_cleared) == (first, last)
    (event,) = of_prompt
    assert isinstance(event, BlocksStored)
    assert ("anna", tuple(PROMPT.encode()[:12]), 4) == (event.salt, event.tokens, event.block_size)
    assert [] == of_answer


def test_an_embedder_tells_too() -> None:
    mirror = Mirror()
    with Echo("full_attention").embedder() as embedder:
        embedder.on_cache_events = mirror.replay
        embedder.embed([[*range(12), 50]])
    assert 3 == len(mirror.blocks)


def test_the_stacks_key_makes_the_keys(tmp_path: Any) -> None:
    secret = bytes(range(7, 39))
    (tmp_path / "key").write_text(secret.hex() + "\n")
    found: list[tuple[bytes, ...]] = []
    for key in (secret.hex(), str(tmp_path / "key"), None, None):
        model = ScriptedModel(PROMPT)
        with model.engine(cache_key=key) as engine:
            mirror = Mirror()
            engine.on_cache_events = mirror.replay
            engine.generate([PROMPT], SHORT)
            found.append(tuple(key for _, key in mirror.blocks))
    expected = tuple(kvframe.prefix_key(secret, PROMPT.encode()[:end]) for end in (4, 8, 12))
    assert expected == found[0] == found[1]
    assert expected[0] == key_of_tokens(PROMPT.encode()[:4], secret=secret)
    assert 3 == len(set(found))


def test_a_listener_that_raises_is_told_nothing_more_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def listen(events: Sequence[CacheEvent]) -> None:
        calls.append(len(events))
        if len(calls) == 2:
            raise RuntimeError("the router is gone")

    with ScriptedModel(PROMPT).engine() as engine:
        expected = [output.token_ids for output in engine.generate([PROMPT, "quick"], SHORT)]
        engine.reset_prefix_cache()
        engine.on_cache_events = listen
        with caplog.at_level(logging.ERROR, "kvframe"):
            for _ in range(3):
                assert expected == [output.token_ids for output in engine.generate([PROMPT, "quick"], SHORT)]
                engine.reset_prefix_cache()
        assert None is engine.on_cache_events
        assert 0 == sum(engine.stats().blocks_held)
    (record,) = (record for record in caplog.records if record.levelno == logging.ERROR)
    assert "the listener to cache events raised" in record.message
    assert 2 == len(calls)


@pytest.mark.parametrize("when", ["before it takes them", "after it took one", "after it took all"])
def test_a_listener_that_is_interrupted_is_told_all_anew(when: str) -> None:
    mirror, calls = Mirror(), []

    def listen(events: Sequence[CacheEvent]) -> None:
        calls.append(len(events))
        if len(calls) == 2:
            mirror.replay(events[: {"before it takes them": 0, "after it took one": 1}.get(when)])
            raise KeyboardInterrupt
        mirror.replay(events)

    with ScriptedModel(PROMPT).engine() as engine:
        engine.on_cache_events = listen
        with pytest.raises(KeyboardInterrupt):
            engine.generate([PROMPT, "quick brown"], SHORT)
        engine.generate(["a" * 20], SHORT)
        assert mirror.blocks.keys() == cached(engine).keys() != set()


def test_a_cache_that_shrinks_tells_what_it_gave_up() -> None:
    mirror = Mirror()
    with ScriptedModel(PROMPT).engine() as engine:
        engine.on_cache_events = mirror.replay
        for letter in "abcdefgh":
            engine.generate([letter * 50], SHORT)
        before = len(mirror.blocks)
        engine.resize_cache(engine.plan.total_bytes // 2)
        assert mirror.blocks.keys() == cached(engine).keys() != set()
        assert 0 < len(mirror.blocks) < before


def test_events_of_a_step_that_fails_come_with_the_next(caplog: pytest.LogCaptureFixture) -> None:
    model, mirror = ScriptedModel(PROMPT), Mirror()

    def spoil(last: Any, logits: Any) -> None:
        raise ValueError("out of luck")

    with model.engine(memory=2048) as engine:
        engine.on_cache_events = mirror.replay
        engine.generate(["a" * 12], SHORT)
        model.spoil = spoil
        with pytest.raises(ValueError, match="out of luck"):
            engine.generate(["b" * 30], SHORT)
        model.spoil = None
        engine.generate(["c" * 30], SHORT)
        assert len(list(findable_pages(manager_of(engine)))) == len(mirror.blocks)


def test_another_process_makes_the_same_keys_from_the_secret_alone() -> None:
    script = (
        "import sys, hashlib; secret, salt, *ids = sys.argv[1:]; salt = salt.encode();"
        "own = len(salt).to_bytes(8, 'little') + salt + bytes(8);"
        "tokens = b''.join(int(each).to_bytes(4, 'little') for each in ids);"
        "print(hashlib.blake2b(own + tokens, digest_size=32, key=bytes.fromhex(secret),"
        " person=b'kvframe.prefix.1').hexdigest())"
    )
    manager, tokens = make_manager(full(4)), [5, 70_000, 0, 2**32 - 1]
    log = manager.record_events(SECRET)
    compute(manager, "a", tokens, salt="Änne")
    _, event = log.take()
    assert isinstance(event, BlocksStored)
    for key, ids in [(event.parent, []), (event.keys[0], tokens)]:
        arguments = [sys.executable, "-I", "-c", script, SECRET.hex(), "Änne", *map(str, ids)]
        done = subprocess.run(arguments, capture_output=True, text=True, check=True)
        assert key.hex() == done.stdout.strip()


def test_a_key_is_not_shown() -> None:
    stack = Stack.from_mapping({"cache": {"key": "ab" * 32}})
    assert "abab" not in repr(stack)
