"""Requests that give up tokens of their prompts: what is read of them, whatever else happens to the cache."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvframe_testing.audit import audit, audit_each_verb

from kvframe import FullAttentionSpec
from kvframe.cache.manager import KVCacheManager
from kvframe.contract.errors import RequestError
from kvframe.contract.specs import KVCacheSpec
from tests.cache.plans import full, make_plan, masked
from tests.support.managers import compute, make_manager

MAX_LEN = 40


@attrs.frozen(kw_only=True)
class BudgetSpec(FullAttentionSpec):
    """Full attention of which a request keeps ``budget`` tokens of its prompt."""

    kind: ClassVar[str] = "budget"
    budget: int = 5

    @property
    def prompt_budget(self) -> int:
        return self.budget


def budget(block_size: int, num_tokens: int) -> BudgetSpec:
    return BudgetSpec(block_size=block_size, num_kv_heads=1, head_size=4, budget=num_tokens)


def by_reversed_labels(tokens: Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """Return what is kept of a prompt: some of its tokens by their content, in their order."""
    chosen = sorted(range(len(tokens)), key=lambda place: hash((tokens[place], "seed")))[:count]
    return [tokens[place] for place in sorted(chosen)]


class Pages:
    """The content of pages: of each slot the tokens up to it, as a stand-in for keys that depend on all of them."""

    def __init__(self, specs: Sequence[KVCacheSpec]) -> None:
        self.specs = specs
        self.slots: dict[tuple[int, int, int], tuple[int, ...]] = {}

    def read(self, group: int, ids: Sequence[int], start: int, stop: int) -> list[tuple[int, ...]]:
        size = self.specs[group].block_size
        return [self.slots[group, ids[place // size], place % size] for place in range(start, stop)]

    def write(self, group: int, ids: Sequence[int], start: int, tokens: Sequence[tuple[int, ...]]) -> None:
        size = self.specs[group].block_size
        for place, token in enumerate(tokens, start):
            self.slots[group, ids[place // size], place % size] = token

    def copy(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        for before, after in zip(sources, targets, strict=True):
            for slot in range(self.specs[group].block_size):
                self.slots[group, after, slot] = self.slots.get((group, before, slot), (-1,))

    def move(self, num_tokens: int, blocks: Sequence[Sequence[int]], pages: Mapping[int, Sequence[int]]) -> None:
        for group, ids in pages.items():
            spec = self.specs[group]
            assert spec.prompt_budget is not None
            first = num_tokens - spec.prompt_budget
            kept_labels = by_reversed_labels(self.read(group, blocks[group], 0, num_tokens), spec.prompt_budget)
            self.write(group, [0] * (first // spec.block_size) + [*ids], first, kept_labels)


@attrs.define
class Life:
    """A request: its tokens, its prompt's length, and per group what its layers are to read."""

    tokens: list[int]
    num_prompt: int
    gives_up: bool
    num_computed: int = 0
    has_chosen: bool = False
    content: dict[int, list[tuple[int, ...]]] = attrs.field(factory=dict)

    def label(self, place: int) -> tuple[int, ...]:
        """What a token's state depends on: the tokens up to it, and whether some of these were given up."""
        chosen = (-self.num_prompt,) if self.gives_up and place >= self.num_prompt else ()
        return (*self.tokens[: place + 1], *chosen)


class World:
    """A manager, the content of its pages, and what every request has to read."""

    def __init__(self, specs: Sequence[KVCacheSpec], num_slabs: int) -> None:
        self.pages = Pages(specs)
        plan = make_plan(*specs, num_slabs=num_slabs, max_model_len=MAX_LEN)
        self.manager = audit_each_verb(
            KVCacheManager(plan, max_num_seqs=4, copier=self.pages.copy, mover=self.pages.move)
        )
        self.lives: dict[str, Life] = {}

    def start(self, name: str, tokens: list[int], num_prompt: int) -> None:
        least = min(spec.prompt_budget for spec in self.pages.specs if spec.prompt_budget is not None)
        life = Life(tokens, num_prompt, least < num_prompt)
        life.num_computed = self.manager.start(name, tokens, num_prompt_tokens=num_prompt)
        assert life.num_computed < num_prompt
        self.lives[name] = life
        self._begin_content(life)

    def _begin_content(self, life: Life) -> None:
        for group in range(len(self.pages.specs)):
            life.content[group] = [life.label(place) for place in range(life.num_computed)]

    def step(self, name: str, count: int) -> bool:
        life = self.lives[name]
        stop = min(life.num_computed + count, len(life.tokens))
        if life.num_computed < life.num_prompt:
            stop = min(stop, life.num_prompt)
        elif not life.has_chosen:
            if not self.manager.shrink(name):
                return False
            life.has_chosen = True
            for group, spec in enumerate(self.pages.specs):
                if spec.prompt_budget is not None and spec.prompt_budget < life.num_prompt:
                    life.content[group] = by_reversed_labels(life.content[group], spec.prompt_budget)
        if not self.manager.extend(name, stop):
            return False
        new = [life.label(place) for place in range(life.num_computed, stop)]
        for group, ids in enumerate(self.manager.block_ids(name)):
            self.pages.write(group, ids, life.num_computed, new)
            life.content[group] += new
        life.num_computed = stop
        self.manager.commit(name, life.tokens, stop)
        return True

    def check(self) -> None:
        for name, life in self.lives.items():
            row, tables = self.manager.row(name), self.manager.tables
            for group, ids in enumerate(self.manager.block_ids(name)):
                spec, n = self.pages.specs[group], life.num_computed
                first = int(tables.first_tokens[group][row]) if group in tables.first_tokens else 0
                for start, stop in spec.live_ranges(n):
                    start = max(start, first)
                    expected = life.content[group][len(life.content[group]) - (n - start) :][: stop - start]
                    assert expected == self.pages.read(group, ids, start, stop), (name, group)


@pytest.mark.parametrize(
    "specs",
    [
        [budget(4, 6)],
        [budget(4, 6), full(2)],
        [budget(3, 5), budget(3, 9), masked(3, window=4)],
        [masked(4, window=6), budget(4, 7), full(4)],
    ],
)
@given(seed=st.integers(0, 2**32), num_slabs=st.integers(30, 60))
def test_each_request_reads_what_it_kept_and_what_followed(specs: list[KVCacheSpec], seed: int, num_slabs: int) -> None:
    source, world = random.Random(seed), World(specs, num_slabs)
    for number in range(40):
        verb = source.choice(["start", "step", "step", "step", "step", "fork", "free"])
        running = list(world.lives)
        if verb == "start" and world.manager.num_free_rows and len(world.lives) < 4:
            length = source.randint(2, 24)
            # Few different tokens: many prompts begin alike, or with a prompt and its continuation.
            tokens = [place // 8 if source.random() < 0.9 else 9 for place in range(length + source.randint(1, 12))]
            world.start(f"r{number}", tokens, length)
        elif verb == "step" and running:
            world.step(source.choice(running), source.randint(1, 9))
        elif verb == "fork" and running and world.manager.num_free_rows and len(world.lives) < 4:
            name = source.choice(running)
            life = world.lives[name]
            if life.num_computed:
                tokens = life.tokens[: max(life.num_computed, life.num_prompt)] + [source.randint(0, 9)] * 3
                if world.manager.fork(name, f"r{number}", tokens):
                    copies = {group: list(content) for group, content in life.content.items()}
                    world.lives[f"r{number}"] = attrs.evolve(life, tokens=tokens, content=copies)
        elif verb == "free" and world.lives:
            name = source.choice(list(world.lives))
            world.manager.free(name)
            del world.lives[name]
        world.check()


def with_pages(*specs: KVCacheSpec, num_slabs: int = 60) -> Any:
    pages = Pages(specs)
    return make_manager(*specs, num_slabs=num_slabs, max_model_len=MAX_LEN, mover=lambda *_: None, copier=pages.copy)


def test_blocks_before_the_kept_tokens_are_released_and_found_by_others() -> None:
    manager = with_pages(budget(4, 6))
    tokens = list(range(20))
    compute(manager, "a", tokens)
    before = manager.block_ids("a")[0]
    assert manager.shrink("a")
    after = manager.block_ids("a")[0]
    # The tokens 14 to 19 lie in two blocks of their own.
    assert [0, 0, 0] == after[:3]
    assert not set(after[3:]) & set(before)
    assert 2 == manager.num_held_pages == manager.stats.blocks_moved[0]
    assert 20 == manager.find([*tokens, 20])


def test_what_a_request_computes_after_its_choice_is_not_found() -> None:
    manager = with_pages(budget(4, 6), full(4))
    tokens = list(range(32))
    compute(manager, "a", tokens[:20])
    manager.shrink("a")
    for stop in range(21, 33):
        assert manager.extend("a", stop)
        manager.commit("a", tokens, stop)
    manager.free("a")
    assert 20 == manager.find([*tokens, 32])


def test_a_request_that_is_computed_again_finds_less_than_its_prompt() -> None:
    manager = with_pages(budget(4, 6))
    tokens = list(range(24))
    compute(manager, "a", tokens)
    manager.free("a")
    assert 20 == manager.start("b", tokens, num_prompt_tokens=24)
    manager.free("b")
    assert 16 == manager.start("b", tokens, num_prompt_tokens=20)


def test_a_short_prompt_is_kept_whole() -> None:
    manager = with_pages(budget(4, 6))
    compute(manager, "a", [1, 2, 3, 4, 5, 6])
    before = manager.block_ids("a")
    assert manager.shrink("a")
    assert before == manager.block_ids("a")


def test_a_pool_without_pages_changes_nothing() -> None:
    manager = with_pages(budget(4, 6), num_slabs=6)
    compute(manager, "a", list(range(20)))
    before = manager.block_ids("a")
    assert not manager.shrink("a")
    assert before == manager.block_ids("a")
    audit(manager)


def test_a_prompt_has_no_capacity_without_pages_for_what_it_keeps() -> None:
    for num_slabs, has_capacity in ((7, False), (8, True)):
        manager = with_pages(budget(4, 6), num_slabs=num_slabs)
        manager.start("a", list(range(20)))
        assert has_capacity == manager.has_capacity("a", 20)


def test_a_failed_move_changes_nothing() -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no")

    manager = make_manager(budget(4, 6), max_model_len=MAX_LEN, mover=fail)
    compute(manager, "a", list(range(20)))
    before = manager.block_ids("a")
    with pytest.raises(RuntimeError, match="no"):
        manager.shrink("a")
    assert before == manager.block_ids("a")
    audit(manager)
    assert 20 == manager.find([*range(20), 20])


def test_a_manager_without_a_mover_says_so() -> None:
    manager = make_manager(budget(4, 6), max_model_len=MAX_LEN)
    compute(manager, "a", list(range(20)))
    with pytest.raises(RequestError, match="make its manager with a mover"):
        manager.shrink("a")


def test_the_plan_counts_the_pages_that_are_held_while_tokens_move() -> None:
    plan = make_plan(budget(4, 6), num_slabs=30, max_model_len=MAX_LEN)
    # Of 20 tokens 5 blocks, and 3 for the 6 tokens that stay, which may lie in 3.
    assert (5 + 3,) == plan.peak_blocks(20)
    assert (2,) == plan.peak_blocks(6)


def test_the_plan_promises_what_the_budget_leaves() -> None:
    plan = make_plan(budget(4, 6), num_slabs=30, max_model_len=MAX_LEN)
    # Of 20 + 12 tokens, those from 14 on.
    assert (8 - 3,) == plan.generating_blocks(32, num_prompt_tokens=20)
    assert (8,) == plan.generating_blocks(32)
    assert plan.max_generating(32) == 3
    assert plan.max_generating(32, num_prompt_tokens=20) == 4
