"""Forks share all pages; of a page that is not full, each writer but the last gets a copy."""

from __future__ import annotations

import numpy as np
import pytest

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
            audited=audited,
        )
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
        self.manager.fork(name, new, self.tokens[new])

    def pages(self, name: str, group: int = 0) -> list[int]:
        return self.manager.block_ids(name)[group]


def test_a_fork_holds_the_same_pages() -> None:
    cache = Forking(full(), masked(2, window=5))
    cache.start("one", 10)
    cache.fork("one", "two")
    assert cache.manager.block_ids("one") == cache.manager.block_ids("two")
    assert len(set(cache.pages("one"))) + np.count_nonzero(cache.pages("one", 1)) == cache.manager.num_held_pages


def test_the_first_to_write_into_a_page_that_is_not_full_copies_it() -> None:
    cache = Forking(full(), prefix_caching=False)
    cache.start("one", 10)
    cache.fork("one", "two", 3)
    shared = cache.pages("one")
    assert cache.manager.extend("two", 11)
    assert [(0, shared[2:], cache.pages("two")[2:])] == cache.copies
    assert shared[:2] == cache.pages("two")[:2]
    assert shared == cache.pages("one")


def test_the_last_one_that_shares_a_page_writes_into_it() -> None:
    cache = Forking(full())
    cache.start("one", 10)
    cache.fork("one", "two", 3)
    cache.fork("one", "three", 4)
    shared = cache.pages("one")
    rows = np.array([cache.manager.row(name) for name in ("one", "two", "three")])
    assert cache.manager.extend_rows(rows, np.array([11, 11, 11]))
    pages = [cache.pages(name)[2] for name in ("one", "two", "three")]
    assert [(0, [shared[2]] * 2, pages[:2])] == cache.copies
    assert shared[2] == pages[2]
    assert 3 == len(set(pages))


def test_nothing_is_copied_for_who_is_alone_again() -> None:
    cache = Forking(full())
    cache.start("one", 10)
    cache.fork("one", "two", 3)
    cache.manager.free("one")
    assert cache.compute("two", 11)
    assert [] == cache.copies


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
    shared = cache.pages("one")[2]
    assert cache.compute("two", 11)
    assert [(0, [shared], [cache.pages("two")[2]])] == cache.copies


def test_inputs_are_shared_and_stay() -> None:
    cache = Forking(full(), encoder())
    cache.start("one", 10)
    cache.fork("one", "two", 3)
    assert cache.manager.block_ids("one")[1] == cache.manager.block_ids("two")[1]


def test_without_room_for_the_copy_nothing_is_changed() -> None:
    cache = Forking(full(), num_slabs=3)
    cache.start("one", 10)
    cache.fork("one", "two", 3)
    before = cache.pages("one")
    assert not cache.compute("two", 11)
    assert not cache.compute("one", 11)
    assert (before, before, []) == (cache.pages("one"), cache.pages("two"), cache.copies)
    cache.manager.free("one")
    assert cache.compute("two", 11)


def test_a_copy_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Forking(full())
    cache.start("one", 10)
    cache.fork("one", "two", 3)
    before, held = cache.pages("one"), cache.manager.num_held_pages

    class Broken(list[object]):
        def append(self, _: object) -> None:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(cache, "copies", Broken())
    with pytest.raises(RuntimeError, match="out of memory"):
        cache.manager.extend("two", 14)
    assert (before, before, held) == (cache.pages("one"), cache.pages("two"), cache.manager.num_held_pages)


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
