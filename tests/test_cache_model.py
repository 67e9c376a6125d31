"""The cache manager against the cache by its definition: random mixtures of types, random lives of requests."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvframe.cache.audit import audit_pool
from kvframe.cache.inputs import InputSequence
from kvframe.cache.manager import KVCacheManager
from kvframe.specs import ENCODER, KVCacheSpec
from tests.cache_model import CacheModel, HostCopies, Life, Page, is_sparse, live_blocks
from tests.plans import StateSpec, encoder, full, make_plan, masked, ranged, state

MAX_LEN, CHUNK, MAX_ENCODER_LEN, MOST_RUNNING = 40, 8, 9, 4
BLOCK_SIZES = st.sampled_from([2, 4])
SPECS = st.one_of(
    st.builds(full, BLOCK_SIZES, st.integers(1, 3)),
    st.builds(full, st.just(1)),
    st.builds(ranged, BLOCK_SIZES, st.integers(1, 3), window=st.integers(1, 9)),
    st.builds(ranged, BLOCK_SIZES, st.just(1), window=st.integers(1, 6), num_sink_tokens=st.integers(1, 5)),
    st.builds(ranged, BLOCK_SIZES, st.just(2), chunk=st.integers(1, 7)),
    st.builds(masked, BLOCK_SIZES, st.integers(1, 3), window=st.integers(1, 9)),
    st.builds(masked, BLOCK_SIZES, st.just(1), window=st.integers(1, 6), num_sink_tokens=st.integers(1, 5)),
    st.builds(masked, BLOCK_SIZES, st.just(2), chunk=st.integers(1, 7)),
    st.builds(state, st.sampled_from([2, 3, 4]), every=st.integers(0, 3), num_drafts=st.integers(0, 4)),
    st.builds(state, BLOCK_SIZES, every=st.integers(0, 2), num_drafts=st.just(4)),
    st.builds(encoder, BLOCK_SIZES, st.integers(1, 2)),
)
ENCODERS = [None, (5, b"x"), (MAX_ENCODER_LEN, b"x"), (MAX_ENCODER_LEN, b"y")]


def inputs_of(encoder: tuple[int, bytes] | None) -> dict[str, InputSequence]:
    return {} if encoder is None else {ENCODER: InputSequence(*encoder)}


class Lives:
    """Lives of requests, in the manager and in the model, drawn from one seed."""

    def __init__(self, specs: Sequence[KVCacheSpec], num_slabs: int, prefix_caching: bool, seed: int) -> None:
        self.draw = random.Random(seed)
        self.plan = make_plan(
            *specs,
            num_slabs=num_slabs,
            max_model_len=MAX_LEN,
            max_num_batched_tokens=CHUNK,
            max_encoder_len=MAX_ENCODER_LEN,
        )
        self.model = CacheModel(self.plan, is_caching=prefix_caching)
        self.host = HostCopies(num_slabs // 2, self.model.bytes)
        self.manager = KVCacheManager(
            self.plan, max_num_seqs=MOST_RUNNING, prefix_caching=prefix_caching, host_pages=self.host
        )
        self.manager.on_pages_freed = self.model.pages_freed
        assert self.manager._host is not None
        self.host_pool = self.manager._host._pool
        self.host_pool.on_pages_freed = self.host.pages_freed
        self.most_refused = min((spec.num_drafts for spec in specs if isinstance(spec, StateSpec)), default=4)
        self.running: dict[str, Life] = {}
        self.swapped: dict[str, tuple[Life, list[list[bool]]]] = {}
        self.room: dict[str, set[int]] = {}
        self.count = 0

    def happen(self) -> None:
        """Let one thing happen."""
        events = {self.reset: 1}
        if len(self.running) < MOST_RUNNING:
            events[self.start] = 12
        if self.running:
            events |= {self.compute: 12, self.compute_together: 12, self.free: 6, self.swap_out: 3}
        if self.swapped:
            events[self.drop] = 1
        if self.swapped and len(self.running) < MOST_RUNNING:
            events[self.swap_in] = 6
        (event,) = self.draw.choices(list(events), weights=list(events.values()))
        event()

    def resident(self, name: str) -> list[list[bool]]:
        return [[block_id != 0 for block_id in ids] for ids in self.manager.block_ids(name)]

    def start(self) -> None:
        shared, tail = self.draw.choice([5, 12, 13, 24]), self.draw.choices([0, 1], k=self.draw.randint(1, 6))
        encoder = self.draw.choice(ENCODERS) if self.model.of_inputs else None
        salt, use_prefix = self.draw.choice(["", "", "", "other"]), self.draw.random() < 0.9
        self.count += 1
        name = f"r{self.count}"
        life = Life(
            salt=salt,
            encoder=encoder,
            tokens=[7] * shared + tail,
            offered=[0] * len(self.plan.groups),
            num_resets=self.model.num_resets,
            is_encoded=encoder is None,
        )
        expected = self.model.start(life, use_prefix)
        hit = self.manager.start(name, life.tokens, salt=salt, use_prefix=use_prefix, inputs=inputs_of(encoder))
        assert life.computed == hit
        assert expected == self.manager.block_ids(name)
        assert life.branch == self.manager._coordinator.state(self.manager.row(name)).branch
        self.running[name] = life
        if self.draw.random() < 0.7:
            num_tokens, num_refused = self.draw.randint(3, CHUNK), self.draw.choice([0, 0, 1, 3])
            while life.computed < len(life.tokens) and self.step(name, num_tokens, num_refused):
                pass

    def compute(self) -> None:
        self.step(self.draw.choice(sorted(self.running)), self.draw.randint(1, CHUNK), self.draw.randint(0, 4))

    def compute_together(self) -> None:
        """Compute a token or more of several requests, by the verbs for many; all of them have room, or none has."""
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
        if not self.manager.extend_rows(rows, np.array(targets, dtype=np.int64)):
            assert before == {name: self.manager.block_ids(name) for name in names}
            return
        blocks = {name: self.manager.block_ids(name) for name in names}
        for name, target in zip(names, targets, strict=True):
            life = self.running[name]
            self.check_room(name, before[name], target)
            step = life.tokens[life.computed : target]
            self.check_owned_alone(name, self.model.compute(life, step, blocks[name]))
        self.manager.commit_rows(rows, np.array(targets, dtype=np.int64))
        # Of equal blocks that several filled in this step, which are found is the manager's choice.
        found = set(self.manager.published())
        for name, target in zip(names, targets, strict=True):
            self.model.commit(self.running[name], target, blocks[name], found)
            self.check_kept(name, target)

    def step(self, name: str, num_tokens: int, num_refused: int) -> bool:
        """Compute tokens of a request if there is room; the last ones of them are refused."""
        life = self.running[name]
        assert frozenset(() if life.is_encoded else (ENCODER,)) == self.manager.missing_inputs(name)
        if life.computed == len(life.tokens):
            if life.computed == MAX_LEN:
                return False
            life.tokens.append(self.draw.randint(0, 1))
        target = min(life.computed + num_tokens, len(life.tokens))
        end = target + min(num_refused, self.most_refused, MAX_LEN - target, CHUNK - (target - life.computed))
        before = self.manager.block_ids(name)
        if not self.manager.extend(name, end):
            assert before == self.manager.block_ids(name)
            return False
        blocks = self.manager.block_ids(name)
        assert self.manager.extend(name, end)
        assert blocks == self.manager.block_ids(name)
        self.check_room(name, before, end)
        step = [*life.tokens[life.computed : target], *[9] * (end - target)]
        self.check_owned_alone(name, self.model.compute(life, step, blocks))
        self.manager.commit(name, life.tokens, target)
        self.model.commit(life, target, blocks)
        assert frozenset() == self.manager.missing_inputs(name)
        self.check_kept(name, target)
        return True

    def check_room(self, name: str, before: list[list[int]], end: int) -> None:
        """Check that the pages that a step got were free, and are those that it needs."""
        # What was stored for a step of another length, which was not computed, is kept until the next commit.
        life, is_asked_again = self.running[name], self.room.pop(name, set()) - {end}
        for group, was, now in zip(self.plan.groups, before, self.manager.block_ids(name), strict=True):
            new = {(group.index, page) for page in now if page and page not in was}
            assert not new & set(self.model.bytes), "a page that was not free"
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
                assert {block for block in live_blocks(group, num_computed) if block < end} == held

    def check_owned_alone(self, name: str, written: set[Page]) -> None:
        """Check that nobody else has, or can find, a page that a step writes."""
        others = {
            (group, page)
            for other in self.running
            if other != name
            for group, ids in enumerate(self.manager.block_ids(other))
            for page in ids
        }
        assert not written & others
        assert not written & {(group, page) for (group, _), page in self.model.findable.items()}

    def free(self) -> None:
        name = self.draw.choice(sorted(self.running))
        self.manager.free(name)
        del self.running[name]

    def reset(self) -> None:
        self.manager.reset_prefix_cache()
        self.model.reset()

    def swap_out(self) -> None:
        name = self.draw.choice(sorted(self.running))
        before, resident = self.manager.block_ids(name), self.resident(name)
        self.host.broken = self.draw.randint(-8, 3)
        try:
            is_out = self.manager.swap_out(name)
        except RuntimeError:
            assert 0 <= self.host.broken < len(self.plan.groups)
            is_out = False
        if is_out:
            self.swapped[name] = (self.running.pop(name), resident)
        else:
            assert before == self.manager.block_ids(name)

    def swap_in(self) -> None:
        name = self.draw.choice(sorted(self.swapped))
        life, resident = self.swapped[name]
        self.host.broken = self.draw.randint(-8, 3)
        end = min(len(life.tokens), life.computed + self.draw.randint(1, CHUNK))
        try:
            is_in = self.manager.swap_in(name, end, use_prefix=self.draw.random() < 0.7)
        except RuntimeError:
            assert 0 <= self.host.broken < len(self.plan.groups)
            return
        if is_in:
            del self.swapped[name]
            self.running[name] = life
            self.model.swapped_in(life)
            self.check_back(name, resident, end)
            self.room.setdefault(name, set()).add(end)

    def check_back(self, name: str, resident: list[list[bool]], end: int) -> None:
        """Check that what a request had is back, and that it has room for its tokens and inputs."""
        life = self.running[name]
        for group, was, now in zip(self.plan.groups, resident, self.resident(name), strict=True):
            old = {block for block, is_there in enumerate(was) if is_there}
            if group.is_of_input:
                new = set(range(life.num_input_blocks(group)))
            elif is_sparse(group):
                new = self.needed(life, group.index, end)
            else:
                new = set(range(len(was), -(-end // group.block_size)))
            assert old | new == {block for block, is_there in enumerate(now) if is_there}

    def drop(self) -> None:
        name = self.draw.choice(sorted(self.swapped))
        self.manager.free(name)
        del self.swapped[name]

    def check(self) -> None:
        """Check who owns which page, what can be found, and what was counted."""
        references: dict[int, int] = {}
        for name in self.running:
            row = self.manager.row(name)
            for group, ids in enumerate(self.manager.block_ids(name)):
                table = self.manager.tables[group].ids[row]
                assert [*ids, *[0] * (len(table) - len(ids))] == table.tolist()
                for block_id in filter(None, ids):
                    references[block_id] = references.get(block_id, 0) + 1
        audit_pool(self.manager._pool, self.plan, references)
        self.manager.audit()
        if self.model.is_caching:
            self.model.let_go(set(self.manager.published()), set(references))
            assert {(group, page) for (group, _), page in self.model.findable.items()} == set(self.manager.published())
        copies = {name: swapped.blocks.copies for name, swapped in self.manager._swapped.items()}
        assert set(self.swapped) == set(copies)
        for name, (_, resident) in self.swapped.items():
            assert resident == [[host_id != 0 for host_id in ids] for ids in copies[name]]
        in_host = {host_id: 1 for groups in copies.values() for ids in groups for host_id in ids if host_id}
        audit_pool(self.host_pool, self.plan, in_host)
        assert self.model.lookups == [list(attrs.astuple(each)[1:]) for each in self.manager.stats.lookups]

    def end(self) -> None:
        """Check that nothing is left behind."""
        for name in [*self.running, *self.swapped]:
            self.manager.free(name)
        assert (0, 0, 0.0) == (self.manager.num_held_pages, self.manager.stats.host_bytes_held, self.manager.usage)


@settings(max_examples=60, deadline=None)
@given(
    specs=st.lists(SPECS, max_size=5),
    num_slabs=st.integers(8, 80),
    prefix_caching=st.integers(0, 9),
    seed=st.integers(0, 2**32),
    num_events=st.integers(1, 200),
)
def test_whatever_happens_the_cache_is_as_defined(
    specs: list[KVCacheSpec], num_slabs: int, prefix_caching: int, seed: int, num_events: int
) -> None:
    lives = Lives(specs, num_slabs, bool(prefix_caching), seed)
    for _ in range(num_events):
        lives.happen()
        lives.check()
    lives.end()
