"""The cache manager against the cache by its definition: random mixtures of types, random lives of requests."""

from __future__ import annotations

import attrs
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvframe.cache.inputs import InputSequence
from kvframe.cache.manager import KVCacheManager
from kvframe.specs import ENCODER, KVCacheSpec
from tests.cache_model import CacheModel, HostCopies, Life, Page, is_sparse, live_blocks
from tests.plans import StateSpec, encoder, full, make_plan, ranged, state
from tests.test_cache import check_pool

MAX_LEN, CHUNK, MAX_ENCODER_LEN = 40, 8, 9
DENSE = (
    st.builds(full, st.sampled_from([1, 2, 4]), st.integers(1, 3)),
    st.builds(ranged, st.sampled_from([1, 2, 4]), st.integers(1, 3), window=st.integers(1, 9)),
    st.builds(ranged, st.sampled_from([2, 4]), st.just(1), window=st.integers(1, 6), num_sink_tokens=st.integers(1, 5)),
    st.builds(ranged, st.sampled_from([2, 4]), st.just(2), chunk=st.integers(1, 7)),
)
SPARSE = st.builds(state, st.sampled_from([2, 3, 4]), every=st.integers(0, 3), num_drafts=st.integers(0, 3))
INPUT = st.builds(encoder, st.sampled_from([2, 4]), st.integers(1, 2))
SPECS = st.lists(st.one_of(*DENSE, SPARSE, SPARSE, INPUT), min_size=1, max_size=4)
ENCODERS = st.sampled_from([None, (5, b"x"), (MAX_ENCODER_LEN, b"x"), (MAX_ENCODER_LEN, b"y")])


def inputs_of(encoder: tuple[int, bytes] | None) -> dict[str, InputSequence]:
    return {} if encoder is None else {ENCODER: InputSequence(*encoder)}


class CacheMachine(RuleBasedStateMachine):
    """Lives of requests, in the manager and in the model."""

    @initialize(specs=SPECS, num_slabs=st.integers(8, 60), prefix_caching=st.integers(0, 9))
    def build(self, specs: list[KVCacheSpec], num_slabs: int, prefix_caching: int) -> None:
        self.plan = make_plan(
            *specs,
            num_slabs=num_slabs,
            max_model_len=MAX_LEN,
            max_num_batched_tokens=CHUNK,
            max_encoder_len=MAX_ENCODER_LEN,
        )
        self.model = CacheModel(self.plan, is_caching=bool(prefix_caching))
        self.host = HostCopies(num_slabs // 2, self.model.bytes)
        self.manager = KVCacheManager(
            self.plan, max_num_seqs=4, prefix_caching=bool(prefix_caching), host_pages=self.host
        )
        self.manager.on_pages_freed = self.model.pages_freed
        assert self.manager._host is not None
        self.manager._host._pool.on_pages_freed = self.host.pages_freed
        self.most_refused = min((spec.num_drafts for spec in specs if isinstance(spec, StateSpec)), default=4)
        self.running: dict[str, Life] = {}
        self.swapped: dict[str, tuple[Life, list[list[bool]]]] = {}
        self.room: dict[str, int] = {}
        self.count = 0

    def one_of(self, data: st.DataObject, names: dict[str, object]) -> str:
        return data.draw(st.sampled_from(sorted(names)))

    def is_resident(self, name: str) -> list[list[bool]]:
        return [[block_id != 0 for block_id in ids] for ids in self.manager.block_ids(name)]

    @precondition(lambda self: len(self.running) < 4)
    @rule(data=st.data(), encoder=ENCODERS, use_prefix=st.integers(0, 5), salt=st.sampled_from(["", "", "", "other"]))
    def start(self, data: st.DataObject, encoder: tuple[int, bytes] | None, use_prefix: int, salt: str) -> None:
        shared = data.draw(st.sampled_from([5, 12, 13, 24]))
        tail = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=6))
        self.count += 1
        name = f"r{self.count}"
        encoder = encoder if self.model.of_inputs else None
        life = Life(
            salt,
            encoder,
            [7] * shared + tail,
            0,
            [0] * len(self.plan.groups),
            self.model.num_resets,
            encoder is None,
            0,
            [],
        )
        expected = self.model.start(life, bool(use_prefix))
        hit = self.manager.start(name, life.tokens, salt=salt, use_prefix=bool(use_prefix), inputs=inputs_of(encoder))
        assert life.computed == hit
        assert expected == self.manager.block_ids(name)
        assert life.branch == self.manager._entries[name].blocks.branch
        self.running[name] = life
        if data.draw(st.integers(0, 3)):
            self.compute_prompt(name, data, data.draw(st.integers(4, CHUNK)), data.draw(st.sampled_from([0, 0, 1, 3])))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(1, CHUNK), num_refused=st.integers(0, 4))
    def compute(self, data: st.DataObject, num_tokens: int, num_refused: int) -> None:
        self.step(data, self.one_of(data, self.running), num_tokens, num_refused)

    def compute_prompt(self, name: str, data: st.DataObject, num_tokens: int, num_refused: int) -> None:
        while self.running[name].computed < len(self.running[name].tokens):
            if not self.step(data, name, num_tokens, num_refused):
                return

    def step(self, data: st.DataObject, name: str, num_tokens: int, num_refused: int) -> bool:
        """Compute tokens of a request if there is room; the last ones of them are refused."""
        life = self.running[name]
        assert frozenset(() if life.is_encoded else (ENCODER,)) == self.manager.missing_inputs(name)
        if life.computed == len(life.tokens):
            if life.computed == MAX_LEN:
                return False
            life.tokens.append(data.draw(st.integers(0, 1)))
        target = min(life.computed + num_tokens, len(life.tokens))
        num_refused = min(num_refused, self.most_refused, MAX_LEN - target, CHUNK - (target - life.computed))
        end = target + num_refused
        before = self.manager.block_ids(name)
        if not self.manager.extend(name, end):
            assert before == self.manager.block_ids(name)
            return False
        blocks = self.manager.block_ids(name)
        assert self.manager.extend(name, end)
        assert blocks == self.manager.block_ids(name)
        for group, was, now in zip(self.plan.groups, before, blocks, strict=True):
            given = {(group.index, page) for page in now if page and page not in was}
            assert not given & set(self.model.bytes), "a page that was not free"
            if is_sparse(group) and self.room.get(name, 0) <= end:
                stored = group.spec.stored_blocks(life.computed, end - life.computed, life.branch)
                expected = live_blocks(group, life.computed) | {b for start, stop in stored for b in range(start, stop)}
                assert expected == {block for block, page in enumerate(now) if page}
                assert len(expected) <= group.spec.num_resident_blocks(life.computed, end - life.computed)
        step = [*life.tokens[life.computed : target], *[9] * num_refused]
        written = self.model.compute(life, step, blocks)
        self.check_owned_alone(name, written)
        self.manager.commit(name, life.tokens, target)
        self.model.commit(life, target, blocks)
        assert frozenset() == self.manager.missing_inputs(name)
        for group, ids in zip(self.plan.groups, self.manager.block_ids(name), strict=True):
            if not group.is_of_input:
                # Blocks that refused tokens took are kept to be written again, where every block is stored anyway.
                end = len(ids) if is_sparse(group) else target // group.block_size
                held = {block for block, page in enumerate(ids[:end]) if page}
                assert {block for block in live_blocks(group, target) if block < end} == held
        return True

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

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = self.one_of(data, self.running)
        self.manager.free(name)
        del self.running[name]

    @rule(is_meant=st.integers(0, 5))
    def reset(self, is_meant: int) -> None:
        if is_meant:
            return
        self.manager.reset_prefix_cache()
        self.model.reset()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), broken=st.integers(-4, 3))
    def swap_out(self, data: st.DataObject, broken: int) -> None:
        name = self.one_of(data, self.running)
        before, resident = self.manager.block_ids(name), self.is_resident(name)
        self.host.broken = broken
        try:
            is_out = self.manager.swap_out(name)
        except RuntimeError:
            assert 0 <= broken < len(self.plan.groups)
            is_out = False
        if is_out:
            self.swapped[name] = (self.running.pop(name), resident)
        else:
            assert before == self.manager.block_ids(name)

    @precondition(lambda self: self.swapped and len(self.running) < 4)
    @rule(data=st.data(), broken=st.integers(-4, 3), use_prefix=st.booleans(), num_tokens=st.integers(1, CHUNK))
    def swap_in(self, data: st.DataObject, broken: int, use_prefix: bool, num_tokens: int) -> None:
        name = self.one_of(data, self.swapped)
        life, resident = self.swapped[name]
        self.host.broken = broken
        self.room[name] = min(len(life.tokens), life.computed + num_tokens)
        try:
            is_in = self.manager.swap_in(name, self.room[name], use_prefix=use_prefix)
        except RuntimeError:
            assert 0 <= broken < len(self.plan.groups)
            return
        if is_in:
            del self.swapped[name]
            self.running[name] = life
            self.model.swapped_in(life)
            for was, now in zip(resident, self.is_resident(name), strict=True):
                assert all(now[index] for index, is_there in enumerate(was) if is_there)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        name = self.one_of(data, self.swapped)
        self.manager.free(name)
        del self.swapped[name]

    @invariant()
    def pages_are_conserved(self) -> None:
        if not hasattr(self, "manager"):
            return
        references: dict[int, int] = {}
        for name in self.running:
            row = self.manager.row(name)
            for group, ids in enumerate(self.manager.block_ids(name)):
                table = self.manager.tables[group].ids[row]
                assert [*ids, *[0] * (len(table) - len(ids))] == table.tolist()
                for block_id in filter(None, ids):
                    references[block_id] = references.get(block_id, 0) + 1
        check_pool(self.manager._pool, self.plan, references)
        found = {(group, page) for group, index in enumerate(self.manager._pool._index) for page in index.values()}
        assert {(group, page) for (group, _), page in self.model.findable.items()} == found
        assert self.manager._host is not None
        copies = {name: entry.blocks.block_ids for name, entry in self.manager._swapped.items()}
        assert set(self.swapped) == set(copies)
        for name, (_, resident) in self.swapped.items():
            assert resident == [[host_id != 0 for host_id in ids] for ids in copies[name]]
        in_host = {host_id: 1 for groups in copies.values() for ids in groups for host_id in ids if host_id}
        check_pool(self.manager._host._pool, self.plan, in_host)

    @invariant()
    def lookups_are_counted(self) -> None:
        if hasattr(self, "manager"):
            assert self.model.lookups == [list(attrs.astuple(each)[1:]) for each in self.manager.stats.lookups]

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            for name in [*self.running, *self.swapped]:
                self.manager.free(name)
            assert (0, 0, 0.0) == (
                self.manager.num_held_pages,
                self.manager.stats.host_bytes_held,
                self.manager.usage,
            )


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
