"""The prefix index: for any mixture of types, its hits are exactly what the mirrored caches find."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvframe_chunked_local.spec import ChunkedLocalSpec
from kvframe_engine.tiers.host_tier import HostTier
from kvframe_entries.spec import TokenEntriesSpec, UnfinishedGroupSpec
from kvframe_mamba.spec import MambaSpec
from kvframe_mla.spec import MLASpec
from kvframe_sliding_window.spec import SlidingWindowSpec

from kvframe.cache.events import BlocksRemoved, CacheCleared, PrefixHash
from kvframe.cache.input_index import InputSequence
from kvframe.cache.layout import CacheLayout, GroupLayout
from kvframe.cache.live_range import NEVER, LiveRange, Need
from kvframe.cache.manager import KVCacheManager
from kvframe.contract.errors import RequestError
from kvframe.contract.specs import ENCODER, KVCacheSpec
from kvframe.routing import EventBatch, PrefixIndex, from_plain, to_plain
from tests.cache.mirror import SECRET
from tests.cache.plans import encoder, full, make_plan, masked, ranged, rollback, state
from tests.cache.test_manager import SPECS
from tests.support.managers import HostWithoutBytes, compute, make_manager, serve

MAX_LEN, CHUNK = 40, 8
ENCODED = InputSequence(9, b"sound")


def mirrored(**managers: KVCacheManager) -> PrefixIndex:
    index = PrefixIndex(SECRET)
    for name, manager in managers.items():
        index.apply(name, manager.record_events(SECRET).take())
    return index


# --- needs as data ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "need"),
    [
        (full(4), Need()),
        (ranged(4, window=7), Need(last=6)),
        (masked(4, window=7), Need(last=6)),
        (ranged(4, window=1), Need(last=0)),
        (ranged(4, window=6, num_sink_tokens=3), Need(last=5, first=4)),
        (ranged(2, chunk=6), Need(chunk=6)),
        (masked(4, chunk=3), Need(chunk=3)),
        (state(4), Need(last=1)),
        (rollback(4), Need(last=0)),
        (encoder(4), None),
    ],
)
def test_a_layout_says_what_a_group_needs_without_its_type(spec: KVCacheSpec, need: Need | None) -> None:
    layout = make_manager(spec, max_model_len=64).layout
    (group,) = layout.groups
    assert (need, spec.block_size, spec.sequence) == (group.need, group.block_size, group.sequence)
    assert (64, 1 if need is None else spec.block_size) == (layout.max_tokens, layout.alignment)


@given(ages=st.lists(st.integers(0, 20) | st.none(), min_size=1, max_size=16), size=st.sampled_from([1, 3, 4]))
def test_any_deaths_are_told_exactly(ages: list[int | None], size: int) -> None:
    max_tokens = size * len(ages)
    deaths = [NEVER if age is None else size * (block + 1) + age for block, age in enumerate(ages)]
    live = LiveRange(size, np.array([NEVER if d > max_tokens else d for d in deaths]), is_by_mask=False)
    need = Need.of(live, max_tokens)
    assert live.deaths.tolist() == need.live(size, max_tokens).deaths.tolist()
    layout = CacheLayout(
        alignment=size, max_tokens=max_tokens, groups=(GroupLayout(group=0, block_size=size, need=need),)
    )
    assert [CacheCleared(layout=layout)] == from_plain(to_plain([CacheCleared(layout=layout)]))


def test_a_long_cache_is_told_in_few_words() -> None:
    manager = make_manager(full(16), masked(16, window=4096), masked(16, chunk=8192), max_model_len=1 << 17)
    assert [Need(), Need(last=4095), Need(chunk=8192)] == [group.need for group in manager.layout.groups]


# --- exact hits -------------------------------------------------------------------------------------------------------


TENSORS = {"key": [4]}
SIZES = st.sampled_from([2, 4])
STATES: dict[str, Any] = {"conv_shapes": [[4]], "recurrent_shapes": [[2, 4]]}
OF_PLUGINS = st.one_of(
    st.builds(
        SlidingWindowSpec,
        block_size=SIZES,
        num_kv_heads=st.just(1),
        head_size=st.just(4),
        window=st.integers(1, 9),
        num_sink_tokens=st.integers(0, 5),
    ),
    st.builds(
        ChunkedLocalSpec, block_size=SIZES, num_kv_heads=st.just(1), head_size=st.just(4), chunk=st.integers(1, 9)
    ),
    st.builds(MLASpec, block_size=SIZES, latent_size=st.just(4), rope_size=st.just(2), head_size_v=st.just(2)),
    st.builds(
        MambaSpec,
        block_size=SIZES,
        checkpoints=st.sampled_from(["aligned", "none"]),
        num_draft_tokens=st.integers(0, 2),
        **{name: st.just(value) for name, value in STATES.items()},
    ),
    st.builds(TokenEntriesSpec, block_size=SIZES, tensors=st.just(TENSORS), tokens_per_entry=st.integers(1, 3)),
    st.builds(
        UnfinishedGroupSpec,
        block_size=SIZES,
        tensors=st.just(TENSORS),
        group=st.integers(2, 6),
        overlap=st.integers(0, 2),
    ),
)
PROMPTS = st.tuples(st.integers(0, 2), st.integers(1, MAX_LEN), st.integers(0, 1), st.sampled_from(["", "", "anna"]))
"""The branch that a prompt's tokens follow, its length, its input, and its salt."""
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["serve", "serve", "begin", "free", "reset", "mirror", "mirror", "mirror"]), PROMPTS),
    max_size=14,
)


def tokens_of(branch: int, length: int, branch_at: int) -> list[int]:
    return [token if token < branch_at else token + 1000 * branch for token in range(length)]


class Caches:
    """Two caches that serve prompts, with host memory, and their index."""

    def __init__(self, specs: Sequence[KVCacheSpec], num_slabs: int, host_slabs: int, branch_at: int) -> None:
        self.branch_at = branch_at
        self.has_input = any(spec.sequence == ENCODER for spec in specs)
        plan = make_plan(*specs, max_model_len=MAX_LEN, max_num_batched_tokens=CHUNK)
        least = plan.num_slabs_for(plan.peak_blocks(MAX_LEN, {ENCODER: 9} if self.has_input else None))
        self.managers: dict[str, KVCacheManager] = {}
        self.tiers: dict[str, HostTier] = {}
        for name in ("one", "two"):
            pool = attrs.evolve(plan, num_slabs=least + num_slabs)
            self.managers[name] = manager = KVCacheManager(pool, max_num_seqs=2)
            if host_slabs:
                self.tiers[name] = HostTier(manager, HostWithoutBytes(host_slabs))
                manager.watch_pages(SECRET, self.tiers[name])
        self.logs = {name: manager.record_events(SECRET) for name, manager in self.managers.items()}
        self.index = PrefixIndex(SECRET)
        self.running: dict[str, list[int]] = {}

    def arguments(self, prompt: tuple[int, int, int, str]) -> tuple[list[int], dict[str, Any]]:
        branch, length, sort_of_input, salt = prompt
        inputs = {ENCODER: InputSequence(9, b"%d" % sort_of_input)} if self.has_input else {}
        return tokens_of(branch, length, self.branch_at), {"salt": salt, "inputs": inputs}

    def operate(self, operation: str, prompt: tuple[int, int, int, str], name: str) -> None:
        manager, (tokens, options) = self.managers[name], self.arguments(prompt)
        if operation == "mirror":
            self.mirror()
            self.check(prompt)
        elif operation == "reset":
            manager.reset_prefix_cache()
        elif operation == "free" and name in self.running:
            manager.free(name)
            self.running.pop(name)
        elif operation in ("serve", "begin") and name not in self.running:
            done = manager.start(name, tokens, **options)
            end = len(tokens) if operation == "serve" else (done + len(tokens) + 1) // 2
            while done < end and manager.extend(name, min(done + CHUNK, end)):
                done = min(done + CHUNK, end)
                manager.commit(name, tokens, done)
            if operation == "serve":
                manager.free(name)
            else:
                self.running[name] = tokens

    def mirror(self) -> None:
        for name, log in self.logs.items():
            plain = to_plain(log.take(), with_tokens=False)
            self.index.apply(name, from_plain(plain))

    def check(self, prompt: tuple[int, int, int, str]) -> None:
        tokens, options = self.arguments(prompt)
        managers = self.managers.items()
        found = {name: manager.find(tokens, **options) for name, manager in managers}
        assert found == self.index.hits(tokens, media=["device"], **options)
        anywhere = {name: found_anywhere(manager, self.tiers.get(name), tokens, options) for name, manager in managers}
        assert anywhere == self.index.hits(tokens, **options)
        late = PrefixIndex(SECRET)
        for name in self.managers:
            late.apply(name, self.index.snapshot(name))
        assert self.index.hits(tokens, **options) == late.hits(tokens, **options)


def found_anywhere(
    manager: KVCacheManager, tier: HostTier | None, tokens: Sequence[int], options: dict[str, Any]
) -> int:
    """Return the tokens that a request finds on the device after its prefix is brought back from host memory."""
    blocks = manager.prefix_blocks(tokens, secret=SECRET, **options)
    if tier is None:
        return blocks.num_cached
    in_host = [tier.find_pages(group, keys) > 0 for group, keys in enumerate(blocks.keys)]
    longest = blocks.longest([cached | copied for cached, copied in zip(blocks.cached, in_host, strict=True)])
    return max(blocks.num_cached, longest or 0)


@given(
    specs=st.lists(SPECS | OF_PLUGINS, max_size=4),
    with_input=st.booleans(),
    num_slabs=st.integers(0, 12),
    host_slabs=st.sampled_from([0, 4, 20]),
    branch_at=st.integers(0, 20),
    operations=OPERATIONS,
    last=PROMPTS,
)
def test_hits_are_those_of_the_mirrored_caches(
    specs: list[KVCacheSpec],
    with_input: bool,
    num_slabs: int,
    host_slabs: int,
    branch_at: int,
    operations: list[tuple[str, tuple[int, int, int, str]]],
    last: tuple[int, int, int, str],
) -> None:
    specs = [*specs, *([encoder(4), encoder(2)] if with_input else [])]
    if not specs:
        return
    caches = Caches(specs, num_slabs, max(host_slabs, len(specs)) if host_slabs else 0, branch_at)
    for number, (operation, prompt) in enumerate(operations):
        caches.operate(operation, prompt, "one" if number % 3 else "two")
    caches.mirror()
    for prompt in [last, *(prompt for _, prompt in operations)]:
        caches.check(prompt)


# --- what a prompt is -------------------------------------------------------------------------------------------------


def test_engines_of_different_models_and_block_sizes_share_an_index() -> None:
    tokens = [*range(24)]
    managers = {"full": make_manager(full(4)), "mixed": make_manager(full(2), state(8)), "empty": make_manager(full(3))}
    for name in ("full", "mixed"):
        serve(managers[name], tokens)
    index = mirrored(**managers)
    assert {"full": 20, "mixed": 16, "empty": 0} == index.hits(tokens)
    assert {"full": 24, "mixed": 24, "empty": 0} == index.hits([*tokens, 1])
    index.remove("full")
    assert {"mixed": 16, "empty": 0} == index.hits(tokens)
    assert ("mixed", "empty") == index.engines


def test_salts_and_inputs_are_told_apart() -> None:
    manager, tokens, inputs = make_manager(full(4), encoder(4)), [*range(12)], {ENCODER: InputSequence(9, b"sound")}
    serve(manager, tokens, salt="anna", inputs=inputs)
    index = mirrored(one=manager)
    assert {"one": 8} == index.hits(tokens, salt="anna", inputs=inputs)
    assert {"one": 0} == index.hits(tokens, salt="anna")
    assert {"one": 0} == index.hits(tokens, inputs=inputs)
    assert {"one": 0} == index.hits(tokens, salt="anna", inputs={ENCODER: InputSequence(9, b"noise")})


def test_a_wrong_prompt_is_refused_as_the_cache_refuses_it() -> None:
    index = mirrored(one=make_manager(full(4)))
    with pytest.raises(RequestError, match="is not a token id"):
        index.hits([1, 2, 3, -4, 5])
    with pytest.raises(RequestError, match="cache_salt must be a string"):
        index.hits([1, 2], salt=3)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="must be 32 bytes"):
        PrefixIndex(b"short")
    assert {"one": 0} == index.hits([])
    assert {"one": 0} == index.hits([1])


def test_a_prompt_is_hashed_once_for_all_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    index, num_hashed = mirrored(**{name: make_manager(full(4), ranged(2, window=4)) for name in "abcdef"}), 0
    add = PrefixHash.add_tokens

    def counted(prefix: PrefixHash, tokens: Any) -> bytes:
        nonlocal num_hashed
        num_hashed += len(tokens)
        return add(prefix, tokens)

    monkeypatch.setattr(PrefixHash, "add_tokens", counted)
    index.hits([*range(41)])
    assert 40 == num_hashed


# --- host memory ------------------------------------------------------------------------------------------------------


def test_blocks_in_host_memory_are_found_beside_those_on_the_device() -> None:
    plan = make_plan(full(4), num_slabs=5)
    manager = KVCacheManager(plan, max_num_seqs=2)
    manager.watch_pages(SECRET, HostTier(manager, HostWithoutBytes(8)))
    index, log = PrefixIndex(SECRET), manager.record_events(SECRET)
    first, second = [*range(16)], [*range(100, 116)]
    serve(manager, first)
    serve(manager, second)
    index.apply("one", log.take())
    found = {media: index.hits([*first, 1], media=media)["one"] for media in (("device",), ("host_memory",))}
    assert {("device",): 4, ("host_memory",): 0} == found
    assert {"one": 16} == index.hits([*first, 1])
    assert {"one": 16} == mirrored(one=manager).hits([*first, 1])
    late = manager.record_events(SECRET)
    manager.reset_prefix_cache()
    index.apply("one", late.take())
    assert {"one": 0} == index.hits([*first, 1])


# --- lag and loss -----------------------------------------------------------------------------------------------------


class Sender:
    """A cache whose events are sent as numbered batches."""

    def __init__(self, epoch: bytes = b"first") -> None:
        self.manager = make_manager(full(4))
        self.epoch, self.log = epoch, self.manager.record_events(SECRET)
        self.batches: list[EventBatch] = []
        self.send()

    def send(self) -> EventBatch:
        self.batches.append(EventBatch(self.epoch, len(self.batches), self.log.take()))
        return self.batches[-1]

    def compute(self, branch: int) -> EventBatch:
        serve(self.manager, [branch, *range(11)])
        return self.send()


def test_a_lost_batch_is_noticed_and_got_again() -> None:
    sender, index = Sender(), PrefixIndex(SECRET)
    assert None is index.next_batch("one")
    assert index.apply_batch("one", sender.batches[0])
    _, second, third = (sender.compute(branch) for branch in (5, 6, 7))
    assert index.apply_batch("one", sender.batches[1])
    assert not index.apply_batch("one", third)
    prompts = [[branch, *range(11), 1] for branch in (5, 6, 7)]
    assert [12, 0, 0] == [index.hits(prompt)["one"] for prompt in prompts]
    assert (b"first", 2) == index.next_batch("one")
    assert all(index.apply_batch("one", batch) for batch in sender.batches[2:])
    assert index.apply_batch("one", second)
    assert [12, 12, 12] == [index.hits(prompt)["one"] for prompt in prompts]


def test_an_index_that_comes_late_waits_for_a_snapshot() -> None:
    sender, index, mirror = Sender(), PrefixIndex(SECRET), PrefixIndex(SECRET)
    batch = sender.compute(5)
    assert not index.apply_batch("one", batch)
    assert {} == index.hits([5, *range(12)])
    for each in sender.batches:
        mirror.apply_batch("one", each)
    snapshot = EventBatch(b"first", 1, mirror.snapshot("one"))
    assert index.apply_batch("one", snapshot)
    assert index.apply_batch("one", sender.compute(6))
    assert index.apply_batch("one", snapshot)
    assert {"one": 12} == index.hits([6, *range(12)])


def test_an_engine_that_begins_anew_is_noticed() -> None:
    index = PrefixIndex(SECRET)
    for epoch in (b"first", b"second"):
        sender = Sender(epoch)
        for branch in (5, 6):
            sender.compute(branch)
        if epoch == b"second":
            assert not index.apply_batch("one", sender.batches[2])
            assert {"one": 12} == index.hits([5, *range(12)])
        assert all(index.apply_batch("one", batch) for batch in sender.batches)
    sender.manager.reset_prefix_cache()
    # What comes before the reset is no longer needed.
    sender.batches.append(EventBatch(b"second", 3, []))
    assert index.apply_batch("one", sender.send())
    assert {"one": 0} == index.hits([5, *range(12)])
    assert [] == index.snapshot("two")


def test_what_an_index_does_not_know_yet_is_ignored() -> None:
    sender, index = Sender(), PrefixIndex(SECRET)
    stored, cleared = sender.compute(5).events, sender.batches[0].events
    index.apply("one", stored)
    assert {} == index.hits([5, *range(12)])
    index.apply("one", [*cleared, *stored, BlocksRemoved(group=7, keys=(b"k",), medium="host_memory")])
    assert {"one": 12} == index.hits([5, *range(12)])


def test_a_router_loads_no_torch() -> None:
    script = "import sys, kvframe.routing; kvframe.routing.PrefixIndex(bytes(32)); sys.exit('torch' in sys.modules)"
    assert 0 == subprocess.run([sys.executable, "-c", script], check=False).returncode


# --- as plain values --------------------------------------------------------------------------------------------------


def test_events_are_plain_values_and_back() -> None:
    manager = make_manager(full(4), ranged(2, window=4), encoder(4))
    log = manager.record_events(SECRET)
    compute(manager, "a", [*range(12)], inputs={ENCODER: ENCODED}, salt="anna")
    events = [*log.take(), BlocksRemoved(group=0, keys=(b"a", b"b"))]
    assert events == from_plain(to_plain(events)) == pickle.loads(pickle.dumps(events))
    cleared, *stored, removed = to_plain(events, with_tokens=False)
    assert {"type": "removed", "group": 0, "keys": (b"a", b"b"), "medium": "device"} == removed
    assert "cleared" == cleared["type"]
    assert all("tokens" not in values and values["salt"] == "anna" for values in stored)
    newer = [{**removed, "colour": "blue"}, {"type": "painted"}]
    assert events[-1:] == from_plain(newer)


@pytest.mark.parametrize("plain", [[{}], [{"type": "removed"}], ["text"], [{"type": "cleared", "layout": 3}], 3])
def test_what_is_no_event_is_refused(plain: Any) -> None:
    with pytest.raises(ValueError, match="events cannot be read"):
        from_plain(plain)
