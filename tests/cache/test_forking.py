"""Forks share the pages of full blocks, and get copies of those that are not full."""

from __future__ import annotations

import numpy as np
import pytest
from kvframe_testing.audit import audit_each_verb

from kvframe.cache.manager import KVCacheManager
from kvframe.contract.specs import KVCacheSpec
from tests.cache.plans import encoder, full, make_plan, masked, state
from tests.support.engines import pool_of

Copies = list[tuple[int, list[int], list[int]]]


class Forking:
    """A manager that records which pages it copies."""

    def __init__(
        self, *specs: KVCacheSpec, num_slabs: int = 40, prefix_caching: bool = True, audited: bool = True
    ) -> None:
        self.copies: Copies = []
        self.manager = KVCacheManager(
            make_plan(*specs, num_slabs=num_slabs),
            max_num_seqs=4,
            prefix_caching=prefix_caching,
            copier=lambda group, pages, others: self.copies.append((group, [*pages], [*others])),
        )
        if audited:
            audit_each_verb(self.manager)
        self.tokens: dict[str, list[int]] = {}

    def compute(self, name: str, end: int) -> bool:
        if not self.manager.extend(name, end):
            return False
        self.manager.commit(name, self.tokens[name], end)
        return True

    def start(self, name: str, num_tokens: int) -> None:
        self.tokens[name] = [7] * num_tokens
        self.manager.start(name, self.tokens[name])
        assert self.compute(name, num_tokens)

    def fork(self, name: str, new: str, *tokens: int) -> None:
        self.tokens[new] = [*self.tokens[name], *tokens]
        assert self.manager.fork(name, new, self.tokens[new])

    def pages(self, name: str, group: int = 0) -> list[int]:
        return self.manager.block_ids(name)[group]


def test_a_fork_holds_the_same_pages_of_full_blocks_and_a_copy_of_the_last() -> None:
    cache = Forking(full(), masked(2, window=5))
    cache.start("one", 10)
    cache.fork("one", "two")
    one, two = cache.pages("one"), cache.pages("two")
    assert one[:2] == two[:2]
    assert [(0, one[2:], two[2:])] == cache.copies
    assert cache.pages("one", 1) == cache.pages("two", 1)
    assert len({*one, *two}) + np.count_nonzero(cache.pages("one", 1)) == cache.manager.num_held_pages


def test_each_fork_writes_into_a_page_of_its_own() -> None:
    cache = Forking(full(), prefix_caching=False)
    cache.start("one", 10)
    cache.fork("one", "two", 3)
    cache.fork("one", "three", 4)
    before = [cache.pages(name) for name in ("one", "two", "three")]
    rows = np.array([cache.manager.row(name) for name in ("one", "two", "three")])
    assert cache.manager.extend_rows(rows, np.array([11, 11, 11]))
    assert before == [cache.pages(name) for name in ("one", "two", "three")]
    assert 3 == len({pages[2] for pages in before})
    assert 2 == len(cache.copies)


def test_full_blocks_are_never_copied() -> None:
    cache = Forking(full(), state(2))
    cache.start("one", 8)
    cache.fork("one", "two", 3)
    assert cache.compute("two", 9)
    assert cache.compute("one", 8)
    assert [] == cache.copies


def test_a_state_that_is_overwritten_is_copied() -> None:
    cache = Forking(state(4))
    cache.start("one", 10)
    cache.fork("one", "two", 3)
    assert [(0, [cache.pages("one")[2]], [cache.pages("two")[2]])] == cache.copies


def test_inputs_are_shared_and_stay() -> None:
    cache = Forking(full(), encoder())
    cache.start("one", 10)
    cache.fork("one", "two", 3)
    assert cache.manager.block_ids("one")[1] == cache.manager.block_ids("two")[1]


def test_without_a_page_for_the_copy_nothing_is_changed() -> None:
    cache = Forking(full(), num_slabs=3)
    cache.start("one", 10)
    before = cache.pages("one")
    assert not cache.manager.fork("one", "two", [7] * 10)
    assert (before, 3, []) == (cache.pages("one"), cache.manager.num_held_pages, cache.copies)
    cache.manager.free("one")
    cache.start("two", 9)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_copy_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch, prefix_caching: bool) -> None:
    cache = Forking(full(), state(2), full(2), prefix_caching=prefix_caching)
    cache.start("one", 11)
    before, held = cache.manager.block_ids("one"), cache.manager.num_held_pages

    class Broken(list[object]):
        def append(self, copy: object) -> None:
            super().append(copy)
            if len(self) == 2:
                raise RuntimeError("out of memory")

    monkeypatch.setattr(cache, "copies", Broken())
    with pytest.raises(RuntimeError, match="out of memory"):
        cache.manager.fork("one", "two", [7] * 14)
    assert (before, held) == (cache.manager.block_ids("one"), cache.manager.num_held_pages)
    monkeypatch.undo()
    cache.fork("one", "two", 3)
    assert 3 == len(cache.copies)


def test_what_was_made_room_for_stays_with_the_first() -> None:
    cache = Forking(full())
    cache.start("one", 6)
    assert cache.manager.extend("one", 14)
    cache.fork("one", "two", 3)
    assert (4, 2) == (len(cache.pages("one")), len(cache.pages("two")))


def test_what_forks_add_is_found_by_others() -> None:
    cache = Forking(full(), masked(2, window=5))
    cache.start("one", 10)
    cache.fork("one", "two", *[1] * 10)
    cache.fork("one", "three", *[2] * 10)
    cache.tokens["one"] += [3] * 10
    for name in ("two", "three", "one"):
        assert cache.compute(name, 20)
    for name in ("one", "two", "three"):
        cache.manager.free(name)
    for token in (1, 2, 3):
        assert 20 == cache.manager.find([*[7] * 10, *[token] * 10, 0])


def test_in_a_nearly_full_pool_pages_stay_findable_that_a_fork_holds() -> None:
    # An audit publishes pages.
    cache = Forking(masked(2, window=5), num_slabs=12, audited=False)
    cache.start("one", 10)
    cache.fork("one", "two")
    cache.manager.start("other", [1] * 14)
    assert cache.manager.extend("other", 14)
    assert not len(pool_of(cache.manager).free_list.free_blocks())
    cache.tokens["one"] += [3] * 4
    for end in (12, 14):
        assert cache.compute("one", end)
    assert all(cache.pages("two")[3:])
    assert not any(cache.pages("one")[:5])
    assert 10 == cache.manager.find([*[7] * 10, 0])
