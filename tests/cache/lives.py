"""Random lives of requests, in the cache manager and in the cache by its definition at once; every verb is checked.

Everything that is drawn comes from one seed, so one line names a failure: the seed and the number of operations.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from kvframe_testing.audit import audit, findable_pages, pages_in
from kvframe_testing.requests import Page

from kvframe.cache.events import EventLog
from kvframe.cache.input_index import InputSequence
from kvframe.cache.manager import KVCacheManager
from kvframe.cache.prefix_lookup import Pin
from kvframe.contract.errors import RequestError
from kvframe.contract.eviction import EvictionPolicy
from kvframe.contract.specs import ENCODER, KVCacheSpec
from kvframe.planning.plan import KVCachePlan
from kvframe.planning.rollback import RollbackSpec
from kvframe.routing import PrefixIndex
from tests.cache.definition import CacheModel, Life, PageCopies, is_sparse, live_blocks
from tests.cache.mirror import SECRET, Mirror, key_of_input, key_of_tokens
from tests.cache.plans import (
    StateSpec,
    encoder,
    evict,
    full,
    make_plan,
    masked,
    ranged,
    state,
)
from tests.support.engines import numbers_of, pool_of

MAX_LEN, CHUNK, MAX_ENCODER_LEN, MOST_RUNNING = 40, 8, 9, 4
MOST_GROUPS, LEAST_SLABS, MOST_SLABS = 5, 8, 80
ENCODERS = [None, (5, b"x"), (MAX_ENCODER_LEN, b"x"), (MAX_ENCODER_LEN, b"y")]

_EITHER, _TO_THREE, _TO_NINE = (2, 4), (1, 2, 3), tuple(range(1, 10))
_WINDOW = {"block_size": _EITHER, "num_kv_heads": _TO_THREE, "window": _TO_NINE}
_SINKS = {"block_size": _EITHER, "window": _TO_NINE[:6], "num_sink_tokens": _TO_NINE[:5]}
_CHUNK = {"block_size": _EITHER, "num_kv_heads": (2,), "chunk": _TO_NINE[:7]}
KINDS: tuple[tuple[Callable[..., KVCacheSpec], dict[str, tuple[int, ...]]], ...] = (
    (full, {"block_size": _EITHER, "num_kv_heads": _TO_THREE}),
    (full, {"block_size": (1,)}),
    *((make, options) for make in (ranged, masked) for options in (_WINDOW, _SINKS, _CHUNK)),
    (state, {"block_size": (2, 3, 4), "every": (0, 1, 2, 3), "num_drafts": (0, 1, 2, 3, 4)}),
    (state, {"block_size": _EITHER, "every": (0, 1, 2), "num_drafts": (4,)}),
    (state, {"block_size": (1, 2, 3, 4), "every": (0, 1, 2), "num_rollback": (1, 2, 3, 4)}),
    (encoder, {"block_size": _EITHER, "num_kv_heads": (1, 2)}),
)
"""The types that are mixed: how each is made, and what its options may be."""


@attrs.define
class Tally:
    """What happened: how often each verb was called and was refused; drafts and their ends; pages that forks copied."""

    verbs: Counter[str] = attrs.field(factory=Counter)
    refused: Counter[str] = attrs.field(factory=Counter)
    drafts: Counter[str] = attrs.field(factory=Counter)
    pages_copied: int = 0

    @property
    def num_operations(self) -> int:
        return self.verbs.total()


def inputs_of(encoder: tuple[int, bytes] | None) -> dict[str, InputSequence]:
    return {} if encoder is None else {ENCODER: InputSequence(*encoder)}


def draw_lives(seed: int, tally: Tally, check_every: int = 1) -> Lives:
    """Return lives over a mixture of types that is drawn too."""
    draw = random.Random(seed)
    kinds = [draw.choice(KINDS) for _ in range(draw.randint(0, MOST_GROUPS))]
    specs = [make(**{name: draw.choice(values) for name, values in options.items()}) for make, options in kinds]
    return Lives(specs, draw.randint(LEAST_SLABS, MOST_SLABS), draw.random() < 0.9, seed, tally, check_every)


class Lives:
    """Lives of requests, in the manager and in the model, drawn from one seed.

    What a verb returns, what it reads and writes and what a request holds is checked each time.

    Attributes:
        tally: What happened.
        check_every: After every so many verbs, and events, all pages are counted and all that can be found is compared.
    """

    def __init__(
        self,
        specs: Sequence[KVCacheSpec],
        num_slabs: int,
        prefix_caching: bool,
        seed: int,
        tally: Tally,
        check_every: int = 1,
        eviction: EvictionPolicy | None = None,
    ) -> None:
        self.draw = random.Random(seed)
        self.tally = tally
        self.check_every = check_every
        self.num_events = 0
        self.plan = make_plan(
            *specs,
            num_slabs=num_slabs,
            max_model_len=MAX_LEN,
            max_num_batched_tokens=CHUNK,
            max_encoder_len=MAX_ENCODER_LEN,
        )
        self.model = CacheModel(self.plan, is_caching=prefix_caching)
        self.copies = PageCopies(self.plan, self.model.bytes)
        self.manager = KVCacheManager(
            self.plan,
            max_num_seqs=MOST_RUNNING,
            prefix_caching=prefix_caching,
            copier=self.copies.copy_within,
            eviction=eviction,
        )
        self.manager.on_pages_freed = self.model.pages_freed
        self.most_refused = min((spec.most_refused for spec in specs if isinstance(spec, StateSpec)), default=4)
        # Of a longer step, rollback states are not kept.
        specs = [group.spec for group in self.plan.groups]
        self.most_with_drafts = min((1 + s.num_states for s in specs if isinstance(s, RollbackSpec)), default=CHUNK)
        self.running: dict[str, Life] = {}
        self.pins: list[Pin] = []
        self.extended_for: dict[str, set[int]] = {}
        self.shared: set[Page] = set()
        self.num_started = 0
        self.log: EventLog | None = None
        self.mirror, self.index = Mirror(), PrefixIndex(SECRET)

    def happen(self) -> None:
        """Let one thing happen, which is one verb or several."""
        events = {self.reset: 1, self.evict: 3, self.pin: 2, self.resize: 2, self.listen: 1, self.ask_too_much: 1}
        if self.pins:
            events[self.unpin] = 2
        if len(self.running) < MOST_RUNNING:
            events[self.start] = 12
            if any(life.is_encoded for life in self.running.values()):
                events[self.fork] = 6
        if self.running:
            events |= {self.compute: 12, self.compute_together: 12, self.free: 6}
        (event,) = self.draw.choices(list(events), weights=list(events.values()))
        event()
        self.num_events += 1
        if self.num_events % self.check_every == 0:
            self.check()

    def did(self, verb: str, is_refused: bool = False) -> None:
        """Count a verb, and check that every page is free, held or cached after it."""
        self.tally.verbs[verb] += 1
        self.tally.refused[verb] += is_refused
        if self.tally.num_operations % self.check_every == 0:
            audit(self.manager)

    # --- what happens -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        shared, tail = self.draw.choice([5, 12, 13, 24]), self.draw.choices([0, 1], k=self.draw.randint(1, 6))
        encoder = self.draw.choice(ENCODERS) if self.model.of_inputs else None
        salt, use_prefix = self.draw.choice(["", "", "", "other"]), self.draw.random() < 0.9
        self.num_started += 1
        name = f"r{self.num_started}"
        life = Life(
            salt=salt,
            encoder=encoder,
            tokens=[7] * shared + tail,
            offered=[0] * len(self.plan.groups),
            num_resets=self.model.num_resets,
            is_encoded=encoder is None,
        )
        self.model.let_go(set(findable_pages(self.manager)), self.shared)
        expected = self.model.start(life, use_prefix)
        hit = self.manager.start(
            name,
            life.tokens,
            salt=salt,
            use_prefix=use_prefix,
            inputs=inputs_of(encoder),
        )
        self.did("start")
        assert life.computed == hit
        assert expected == self.manager.block_ids(name)
        if use_prefix and self.model.is_caching:
            least, possible = self.model.branches(life)
            life.branch = numbers_of(self.manager).states[self.manager.row(name)].branch
            assert life.branch in possible
            assert life.branch >= least
        self.running[name] = life
        if self.draw.random() < 0.7:
            num_tokens, num_refused = self.draw.randint(3, CHUNK), self.draw.choice([0, 0, 1, 3])
            while life.computed < len(life.tokens) and self.step(name, num_tokens, num_refused):
                pass

    def compute(self) -> None:
        self.step(self.draw.choice(sorted(self.running)), self.draw.randint(1, CHUNK), self.draw.randint(0, 4))

    def step(self, name: str, num_tokens: int, num_drafts: int) -> bool:
        """Compute tokens of a request, and drafts after its last token, if the pool has enough pages.

        Of the drafts, the first few turn out to be its next tokens; the others are refused.
        """
        life = self.running[name]
        assert frozenset(() if life.is_encoded else (ENCODER,)) == self.manager.missing_inputs(name)
        if life.computed == len(life.tokens):
            if life.computed == MAX_LEN:
                return False
            life.tokens.append(self.draw.randint(0, 1))
        target = min(life.computed + num_tokens, len(life.tokens))
        most_drafts = max(0, self.most_with_drafts - (target - life.computed))
        end = target + min(num_drafts, self.most_refused, MAX_LEN - target, most_drafts)
        before, verb = self.manager.block_ids(name), "lookahead" if end > target else "extend"
        has_capacity = self.manager.extend(name, end)
        self.did(verb, not has_capacity)
        if not has_capacity:
            assert before == self.manager.block_ids(name)
            return False
        blocks = self.manager.block_ids(name)
        assert self.manager.extend(name, end)
        assert blocks == self.manager.block_ids(name)
        self.check_new_pages(name, before, end)
        drafts = [self.draw.randint(0, 1) for _ in range(end - target)]
        step = [*life.tokens[life.computed : target], *drafts]
        self.check_owned_alone(name, self.model.compute(life, step, blocks))
        if target == len(life.tokens) and drafts:
            num_accepted = self.draw.randint(0, len(drafts))
            self.tally.drafts["accepted"] += num_accepted
            self.tally.drafts["refused"] += len(drafts) - num_accepted
            life.tokens += drafts[:num_accepted]
            target += num_accepted
        self.model.freed.clear()
        self.manager.commit(name, life.tokens, target)
        self.did("commit")
        self.model.commit(life, target, blocks)
        self.offer_again(life, blocks)
        assert frozenset() == self.manager.missing_inputs(name)
        self.check_kept(name, target)
        return True

    def offer_again(self, life: Life, blocks: list[list[int]]) -> None:
        again = self.model.offered_again(life, blocks)
        published = set(findable_pages(self.manager)) if again else set()
        self.model.findable.update({key: page for key, page in again.items() if (key[0], page) in published})

    def compute_together(self) -> None:
        """Compute a token or more of several requests, by the verbs for many; all of them get pages, or none does."""
        names = self.draw.sample(sorted(self.running), self.draw.randint(1, len(self.running)))
        for name in names:
            life = self.running[name]
            if life.computed == len(life.tokens) < MAX_LEN:
                life.tokens.append(self.draw.randint(0, 1))
        names = [name for name in names if self.running[name].computed < len(self.running[name].tokens)]
        most = self.draw.choice([1, 1, CHUNK])
        targets = [min(self.running[name].computed + most, len(self.running[name].tokens)) for name in names]
        rows = np.array([self.manager.row(name) for name in names], dtype=np.int64)
        before = {name: self.manager.block_ids(name) for name in names}
        has_capacity = self.manager.extend_rows(rows, np.array(targets, dtype=np.int64))
        self.did("extend rows", not has_capacity)
        blocks = {name: self.manager.block_ids(name) for name in names}
        if not has_capacity:
            assert before == blocks
            return
        for name, target in zip(names, targets, strict=True):
            life = self.running[name]
            self.check_new_pages(name, before[name], target)
            step = life.tokens[life.computed : target]
            self.check_owned_alone(name, self.model.compute(life, step, blocks[name]))
        self.model.freed.clear()
        self.manager.commit_rows(rows, np.array(targets, dtype=np.int64))
        self.did("commit rows")
        # Of equal blocks that several filled in this step, which are found is the manager's choice.
        found = set(findable_pages(self.manager)) if len(names) > 1 else set()
        for name, target in zip(names, targets, strict=True):
            self.model.commit(self.running[name], target, blocks[name], found)
            self.offer_again(self.running[name], blocks[name])
            self.check_kept(name, target)

    def fork(self) -> None:
        """Let a request go on in several ways; it computes the same next token at first, or another one."""
        name = self.draw.choice(sorted(name for name, life in self.running.items() if life.is_encoded))
        life = self.running[name]
        self.num_started += 1
        fork = f"r{self.num_started}"
        tokens = life.tokens[: self.draw.choice([life.computed, len(life.tokens)])] or life.tokens[:1]
        num_held = self.manager.num_held_pages
        self.copies.broken = self.draw.randint(-16, MOST_GROUPS - 1)
        self.copies.copied.clear()
        try:
            is_forked = self.manager.fork(name, fork, tokens)
        except RuntimeError:
            assert 0 <= self.copies.broken < len(self.plan.groups)
            is_forked = False
        self.did("fork", not is_forked)
        if not is_forked:
            assert num_held == self.manager.num_held_pages
            return
        self.tally.pages_copied += len(self.copies.copied)
        self.running[fork] = self.model.fork(life, tokens)
        for group, ids, others in zip(
            self.plan.groups, self.manager.block_ids(name), self.manager.block_ids(fork), strict=True
        ):
            num_full = len(ids) if group.is_of_input else life.computed // group.block_size
            assert ids[:num_full] == others[:num_full]
            # Of a block that is not full, the fork has a copy.
            copied = {(group.index, page) for page in others[num_full:] if page}
            assert copied == {page for page in self.copies.copied if page[0] == group.index}
            has_last = (
                not group.is_of_input and life.computed % group.block_size > 0 and any(ids[num_full : num_full + 1])
            )
            assert has_last == bool(copied)
            self.shared |= {(group.index, page) for page in others[:num_full] if page}

    def free(self) -> None:
        name = self.draw.choice(sorted(self.running))
        life = self.running.pop(name)
        self.manager.free(name)
        self.did("free" if life.computed == len(life.tokens) else "abort")

    def evict(self) -> None:
        """Evict a random cached page, or all of them, as if the pages were needed."""
        pool = pool_of(self.manager)
        pages = [page for page in findable_pages(self.manager) if pool.is_cached(np.array(page[1:]))[0]]
        if pages:
            for _, page in self.draw.sample(pages, self.draw.choice([1, 1, len(pages)])):
                if pool.is_cached(np.array([page]))[0]:
                    evict(self.manager, page)
                    self.did("evict")

    def pin(self) -> None:
        """Pin the cached prefix of tokens, if the longest request still fits then."""
        tokens = [7] * self.draw.choice([5, 12, 13, 24]) + self.draw.choices([0, 1], k=self.draw.randint(0, 6))
        encoder = self.draw.choice(ENCODERS) if self.model.of_inputs else None
        salt = self.draw.choice(["", "", "", "other"])
        self.model.let_go(set(findable_pages(self.manager)), self.shared)
        expected, before = self.model.pinned(salt, encoder, tokens), [pin.blocks for pin in self.pins]
        plan = self.manager.plan
        has_capacity = self.num_lacking(plan, [*before, expected]) <= max(0, self.num_lacking(plan, before))
        try:
            pin = self.manager.pin(tokens, salt=salt, inputs=inputs_of(encoder))
        except RequestError:
            assert not has_capacity
        else:
            assert has_capacity
            assert expected == [ids.tolist() for ids in pin.blocks]
            self.pins.append(pin)
        self.did("pin", not has_capacity)

    def num_lacking(self, plan: KVCachePlan, pinned: Sequence[Sequence[Iterable[int]]]) -> int:
        """Return how many slabs the longest request takes more than a plan, as it is or with fewer, has unpinned.

        Of a lone group it is slabs' worth of pages.
        """
        now = self.manager.plan
        pages = {int(page) for blocks in pinned for ids in blocks for page in ids if page}
        slabs = [(page * now.block_id_bytes - now.null_bytes) // now.slab_bytes for page in pages]
        num_pinned = len({*slabs})
        if len(now.groups) == 1:
            num_pinned = -(-len(pages) // now.groups[0].pages_per_slab)
        return plan.num_slabs_for(plan.peak_blocks(MAX_LEN)) - (plan.num_slabs - num_pinned)

    def unpin(self) -> None:
        self.manager.unpin(self.pins.pop(self.draw.randrange(len(self.pins))))
        self.did("unpin")

    def reset(self) -> None:
        self.manager.reset_prefix_cache()
        self.did("reset")
        self.model.reset()
        assert not any(pin.is_held for pin in self.pins)
        self.pins.clear()

    def resize(self) -> None:
        """Change the number of slabs. A pool shrinks only if no page of the removed slabs is held."""
        num_slabs = self.draw.randint(LEAST_SLABS, MOST_SLABS) if self.plan.groups else 0
        plan = attrs.evolve(self.plan, num_slabs=num_slabs)
        before, bytes_before = self.manager.plan.num_slabs, self.manager.plan.total_bytes
        pinned = [int(page) for pin in self.pins for ids in pin.blocks for page in ids if page]
        held = np.array([*pages_in(self.manager.tables), *pinned], dtype=np.int64)
        pins_fit = num_slabs >= before or not pinned or self.num_lacking(plan, [pin.blocks for pin in self.pins]) <= 0
        expected = pins_fit and not (held * plan.block_id_bytes >= plan.total_bytes).any()
        published = set(findable_pages(self.manager))
        is_resized = self.manager.resize(num_slabs)
        self.did("shrink" if num_slabs < before else "grow", not is_resized)
        assert expected == is_resized
        assert (num_slabs if is_resized else before) == self.manager.plan.num_slabs
        if plan.total_bytes >= bytes_before or not is_resized:
            assert published == set(findable_pages(self.manager))

    def listen(self) -> None:
        """Begin to mirror what can be found, or stop, so that there is no listener."""
        if self.log is None or self.draw.random() < 0.5:
            self.log = self.manager.record_events(SECRET)
        else:
            self.manager.stop_events()
            self.log = None

    def ask_too_much(self) -> None:
        """Ask for what is refused, which changes nothing."""
        self.num_started += 1
        new, known = f"r{self.num_started}", self.draw.choice(sorted(self.running) or ["none"])
        too_long = {ENCODER: InputSequence(MAX_ENCODER_LEN + self.draw.randint(1, 9), b"x")}
        num_tokens = MAX_LEN + self.draw.randint(1, MAX_LEN)
        asked: list[Callable[[], object]] = [lambda: self.manager.start(new, [7], inputs=too_long)]
        if len(self.running) == MOST_RUNNING:
            asked += [lambda: self.manager.start(new, [7]), lambda: self.manager.fork(known, new, [7])]
        if known in self.running:
            life, rows = self.running[known], np.array([self.manager.row(name) for name in sorted(self.running)])
            targets = np.array([self.running[name].computed + 1 for name in sorted(self.running)])
            targets[self.draw.randrange(len(rows))] = num_tokens
            asked += [
                lambda: self.manager.start(known, life.tokens),
                lambda: self.manager.fork(known, known, life.tokens),
                lambda: self.manager.extend(known, num_tokens),
                lambda: self.manager.extend_rows(rows, targets),
            ]
        before = {name: self.manager.block_ids(name) for name in self.running}
        with pytest.raises(RequestError):
            self.draw.choice(asked)()
        self.did("ask too much", is_refused=True)
        assert before == {name: self.manager.block_ids(name) for name in self.running}

    def end(self) -> None:
        """Free all requests, and check that no page is held."""
        self.check()
        for name in self.running:
            self.manager.free(name)
            self.did("free")
        for pin in self.pins:
            self.manager.unpin(pin)
            self.did("unpin")
        assert (0, 0.0) == (self.manager.num_held_pages, self.manager.usage)

    # --- what must be true --------------------------------------------------------------------------------------------

    def check_new_pages(self, name: str, before: list[list[int]], end: int) -> None:
        """Check that the pages that a step got were free, and are those that it needs."""
        # What was stored for a step of another length, which was not computed, is kept until the next commit.
        life, is_asked_again = self.running[name], self.extended_for.pop(name, set()) - {end}
        for group, was, now in zip(self.plan.groups, before, self.manager.block_ids(name), strict=True):
            new = {(group.index, page) for page in now if page and page not in was}
            assert not new & self.model.bytes.keys(), "a page that was not free"
            if is_sparse(group) and not is_asked_again:
                expected = self.needed(life, group.index, end)
                assert expected == {block for block, page in enumerate(now) if page}
                assert len(expected) <= group.spec.num_resident_blocks(life.computed, end - life.computed)

    def needed(self, life: Life, index: int, end: int) -> set[int]:
        """Return the blocks of a type that stores few that a request has to hold while it is computed to ``end``."""
        spec, n = self.plan.groups[index].spec, life.computed
        last = (end - 1) // self.plan.alignment * self.plan.alignment
        branch = life.branch if n < life.branch <= end else last
        stored = spec.stored_blocks(n, end - n, branch) if end > n else ()
        return live_blocks(self.plan.groups[index], n) | {block for part in stored for block in range(*part)}

    def check_kept(self, name: str, num_computed: int) -> None:
        """Check that a request holds what is live, and nothing else of what is computed."""
        for group, ids in zip(self.plan.groups, self.manager.block_ids(name), strict=True):
            if not group.is_of_input:
                # Blocks that refused tokens took are kept to be written again, where every block is stored anyway.
                end = len(ids) if is_sparse(group) else num_computed // group.block_size
                held = {block for block, page in enumerate(ids[:end]) if page}
                live = live_blocks(group, num_computed)
                assert {block for block in live if block < end} == held

    def check_owned_alone(self, name: str, written: set[Page]) -> None:
        """Check that no other request has, or can find, a page that a step writes."""
        others = {
            (group, page)
            for other in self.running
            if other != name
            for group, ids in enumerate(self.manager.block_ids(other))
            for page in ids
        }
        assert not written & others
        assert not written & self.model.findable_pages()

    def check(self) -> None:
        """Check what is in the tables, what can be found, and what was counted."""
        held: list[int] = []
        for name in self.running:
            row = self.manager.row(name)
            for group, ids in enumerate(self.manager.block_ids(name)):
                table = self.manager.tables[group].ids[row]
                assert not table[len(ids) :].any()
                held += filter(None, ids)
        assert sorted(held) == np.sort(pages_in(self.manager.tables)).tolist()
        published = set(findable_pages(self.manager))
        self.model.let_go(published, self.shared)
        assert published == self.model.findable_pages()
        if self.log is not None:
            events = self.log.take()
            self.mirror.replay(events)
            self.index.apply("here", events)
            for life in [*self.running.values()][:2]:
                prompt, inputs = [*life.tokens, 0][:MAX_LEN], inputs_of(life.encoder)
                num_tokens = self.manager.find(prompt, salt=life.salt, inputs=inputs)
                assert {"here": num_tokens} == self.index.hits(prompt, salt=life.salt, inputs=inputs)
            expected = {(group, self.key(group, content)): (group, content) for group, content in self.model.findable}
            assert expected.keys() == self.mirror.blocks.keys()
            for (_, key), (index, content) in expected.items():
                self.check_event(index, content, key)
        assert self.model.lookups == [list(attrs.astuple(each)[1:]) for each in self.manager.stats.lookups]

    def check_event(self, index: int, content: tuple[str, tuple[int, bytes] | None, Any], key: bytes) -> None:
        """Check that a block's event says which tokens are in it, and which prefix comes before them."""
        salt, encoder, what = content
        group, event = self.plan.groups[index], self.mirror.blocks[index, key]
        place = event.keys.index(key)
        assert (salt, group.block_size, group.spec.sequence) == (event.salt, event.block_size, event.sequence)
        assert event.start is not None
        start = event.start + place * group.block_size
        if group.is_of_input:
            assert what * group.block_size == start
            return
        assert len(what) - group.block_size == start
        assert what[start:] == tuple(event.tokens[place * group.block_size :][: group.block_size])
        assert key_of_tokens(what[: event.start], salt, encoder) == event.parent

    def key(self, index: int, content: tuple[str, tuple[int, bytes] | None, Any]) -> bytes:
        """Return what a block is known by outside."""
        salt, encoder, what = content
        group = self.plan.groups[index]
        if not group.is_of_input:
            return key_of_tokens(what, salt, encoder)
        assert encoder is not None
        return key_of_input(min((what + 1) * group.block_size, encoder[0]), encoder, salt)
