"""The cache manager refuses wrong calls before it changes anything, with and without ``python -O``."""

from __future__ import annotations

import subprocess
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from kvframe_testing.audit import audit, audit_each_verb, findable_pages

from kvframe.cache.input_index import InputSequence
from kvframe.cache.manager import KVCacheManager
from kvframe.cache.radix_tree import as_bytes
from kvframe.contract.errors import RequestError
from kvframe.contract.specs import ENCODER, KVCacheSpec
from tests.cache.definition import PageCopies
from tests.cache.plans import encoder, full, make_plan, masked, ranged, state
from tests.support.engines import pool_of

MAX_LEN, MAX_ENCODER_LEN, TOKENS = 30, 9, [7] * 20
PLANS: dict[str, tuple[KVCacheSpec, ...]] = {
    "nothing": (),
    "one": (full(),),
    "a block that ends where the longest does": (full(2),),
    "alike": (full(), masked(window=5)),
    "two sizes": (full(), masked(2, window=5)),
    "asked position by position": (full(), ranged(window=5)),
    "few blocks": (full(), state()),
    "inputs": (full(), encoder()),
}
Ask = Callable[[KVCacheManager, int], bool]


def make_manager(
    *specs: KVCacheSpec, max_num_seqs: int = 3, can_fork: bool = True, audited: bool = True
) -> KVCacheManager:
    plan = make_plan(*specs, num_slabs=60, max_model_len=MAX_LEN, max_encoder_len=MAX_ENCODER_LEN)
    copier = PageCopies(plan, {}).copy_within if can_fork else None
    manager = KVCacheManager(plan, max_num_seqs=max_num_seqs, copier=copier)
    return audit_each_verb(manager) if audited else manager


def start(manager: KVCacheManager, *names: str) -> None:
    for name in names:
        manager.start(name, TOKENS, use_prefix=False)
        assert manager.extend(name, len(TOKENS))
        manager.commit(name, TOKENS, len(TOKENS))


def state_of(manager: KVCacheManager, *names: str) -> Any:
    blocks = [manager.block_ids(name) for name in names]
    return blocks, manager.num_held_pages, manager.num_free_rows, sorted(findable_pages(manager)), manager.stats


def ask_one(manager: KVCacheManager, num_tokens: int) -> bool:
    return manager.extend("one", num_tokens)


def ask_row(manager: KVCacheManager, num_tokens: int) -> bool:
    return manager.extend_rows(np.array([manager.row("one")]), np.array([num_tokens]))


def ask_rows(manager: KVCacheManager, num_tokens: int) -> bool:
    rows = np.array([manager.row("two"), manager.row("one")])
    return manager.extend_rows(rows, np.array([len(TOKENS) + 1, num_tokens]))


# --- more than the table can hold -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", [ask_one, ask_row, ask_rows])
@pytest.mark.parametrize("kind", PLANS)
def test_room_for_more_tokens_than_the_plan_is_for_is_refused(kind: str, ask: Ask) -> None:
    manager = make_manager(*PLANS[kind])
    start(manager, "one", "two")
    for is_extended in (False, True):
        before = state_of(manager, "one", "two")
        for num_tokens in (MAX_LEN + 1, 2 * MAX_LEN, 1000):
            with pytest.raises(RequestError, match=rf"^blocks for {num_tokens} .* 30 at most; ask for fewer") as caught:
                ask(manager, num_tokens)
            assert caught.value.code == "too_long"
            assert before == state_of(manager, "one", "two")
        assert is_extended or ask(manager, MAX_LEN)
    manager.free("one")
    manager.free("two")
    assert (0, 0.0) == (manager.num_held_pages, manager.usage)


def test_an_input_that_is_longer_than_the_plan_is_for_is_refused() -> None:
    manager = make_manager(full(), encoder())
    before = state_of(manager)
    with pytest.raises(
        RequestError, match=r"^the input 'encoder' has 10 tokens, but the plan is for 9 at most"
    ) as caught:
        manager.start("one", TOKENS, inputs={ENCODER: InputSequence(MAX_ENCODER_LEN + 1, b"x")})
    assert caught.value.code == "input_too_long"
    assert before == state_of(manager)
    manager.start("one", TOKENS, inputs={ENCODER: InputSequence(MAX_ENCODER_LEN, b"x")})
    assert manager.extend("one", 1)


def test_a_prefix_that_is_longer_than_the_plan_is_for_is_not_restored() -> None:
    manager = make_manager(full())

    def fetch(group: int, blocks: Sequence[int], block_ids: Sequence[int]) -> None:
        raise AssertionError("nothing is to be copied")

    before = state_of(manager)
    with pytest.raises(RequestError, match=r"^blocks for 36 tokens were asked for"):
        manager.restore([7] * 36, fetch)
    with pytest.raises(RequestError, match=r"^the input 'encoder' has 99 tokens"):
        manager.restore([7] * 8, fetch, inputs={ENCODER: InputSequence(99, b"x")})
    assert before == state_of(manager)
    start(manager, "one", "two", "three")
    with pytest.raises(RequestError, match=r"^no row of the table is free: there are 3"):
        manager.restore([7] * 8, fetch)


# --- names and rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("begin", ["start", "fork"])
def test_a_name_in_use_and_a_full_table_are_refused(begin: str) -> None:
    manager = make_manager(full(), max_num_seqs=2)
    start(manager, "one")

    def ask(name: str) -> None:
        if begin == "start":
            manager.start(name, TOKENS)
        else:
            manager.fork("one", name, TOKENS)

    before = state_of(manager, "one")
    with pytest.raises(RequestError, match=r"^a request 'one' is in the table already; free it first") as caught:
        ask("one")
    assert caught.value.code == "duplicate_id"
    assert before == state_of(manager, "one")
    ask("two")
    before = state_of(manager, "one", "two")
    with pytest.raises(RequestError, match=r"^no row of the table is free: there are 2; free a request") as caught:
        ask("three")
    assert caught.value.code == "no_row"
    assert before == state_of(manager, "one", "two")


def test_of_a_request_that_is_not_in_the_table_nothing_is_asked() -> None:
    manager = make_manager(full())
    start(manager, "one")
    before = state_of(manager, "one")
    for verb in (
        lambda name: manager.extend(name, 1),
        lambda name: manager.commit(name, TOKENS, 1),
        lambda name: manager.has_capacity(name, 1),
        manager.missing_inputs,
        manager.row,
        manager.block_ids,
        manager.free,
    ):
        with pytest.raises(RequestError, match=r"^the request 'none' is not in the table: there is none") as caught:
            verb("none")
        assert caught.value.code == "unknown_id"
        assert before == state_of(manager, "one")


def test_what_cannot_be_forked_is_refused_and_keeps_every_row() -> None:
    manager, without_copier = make_manager(full(), encoder()), make_manager(full(), can_fork=False)
    manager.start("new", TOKENS, inputs={ENCODER: InputSequence(3, b"x")})
    start(without_copier, "one")
    for cache, name, why in (
        (manager, "none", "it is not in the table"),
        (manager, "new", "its inputs are not computed"),
        (without_copier, "one", "its manager has no copier for shared pages"),
    ):
        for _ in range(4):
            with pytest.raises(RequestError, match=f"^the request '{name}' cannot be forked: {why}") as caught:
                cache.fork(name, "fork", TOKENS)
            assert caught.value.code == "no_fork"
        assert cache.num_free_rows == 2


WITHOUT_ASSERTIONS = """
from kvframe.cache.manager import KVCacheManager
from kvframe.cache.radix_tree import as_bytes
from kvframe.contract.errors import RequestError
from tests.cache.plans import full, make_plan
assert False, "assertions are on"
manager = KVCacheManager(make_plan(full()), max_num_seqs=2)
manager.start("one", [1, 2, 3])
manager.extend("one", 4)
for verb in (
    lambda: manager.start("one", [1, 2, 3]),
    lambda: manager.extend("one", 65),
    lambda: manager.fork("one", "two", [1, 2, 3]),
    lambda: manager.free("two"),
    lambda: manager.commit("one", [1, -2, 3, 4], 4),
):
    try:
        verb()
    except RequestError as error:
        print(error.code)
manager.free("one")
print(manager.num_held_pages, manager.num_free_rows)
"""


def test_what_is_refused_is_refused_without_assertions_too() -> None:
    command = [sys.executable, "-O", "-c", WITHOUT_ASSERTIONS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        *("duplicate_id", "too_long", "no_fork", "unknown_id", "bad_token"),
        *("0", "2"),
    ]


# --- tokens, however they are given -----------------------------------------------------------------------------------


@pytest.mark.parametrize("typecode", "bBhHiIlLqQ")
def test_tokens_are_the_same_whatever_array_they_come_in(typecode: str) -> None:
    manager = make_manager(full())
    for name, tail in (("one", 1), ("two", 2)):
        tokens = array(typecode, [7] * 8 + [tail] * 8)
        manager.start(name, tokens)
        assert manager.extend(name, 16)
        manager.commit(name, tokens, 16)
        manager.free(name)
    for kind in ("I", typecode):
        assert 8 == manager.find(array(kind, [7] * 8 + [3] * 8))
        assert 12 == manager.find(array(kind, [7] * 8 + [2] * 4 + [3] * 4))
    assert 8 == manager.start("three", array(typecode, [7] * 8 + [3] * 8))


NO_TOKENS = (-1, 2**32, None, 1.5, "7")
"""Values among tokens that are not tokens."""
KNOWN = [1, 2, 3, 4, 5, 6, 7, 8]


def run_on(manager: KVCacheManager, name: str, tokens: Sequence[int], num_tokens: int) -> None:
    assert manager.extend(name, num_tokens)
    manager.commit(name, tokens, num_tokens)


@pytest.mark.parametrize("kind", [kind for kind in PLANS if kind != "nothing"])
@pytest.mark.parametrize("wrong", NO_TOKENS)
def test_a_token_that_is_none_ends_what_others_find_and_nothing_else(kind: str, wrong: Any) -> None:
    """The error is raised for the request that committed the tokens, even if another request reads them first."""
    for reader in ("nobody", "another request", "a listener", "commit"):
        # An audit reads all tokens.
        manager = make_manager(*PLANS[kind], audited=False)
        others = [] if reader != "commit" else [*KNOWN, 9, 9, 9, 9]
        tokens: list[Any] = list(KNOWN)
        if others:
            manager.start("other", others)
            run_on(manager, "other", others, 12)
        manager.start("one", tokens, use_prefix=False)
        if reader == "a listener":
            manager.record_events(b"s" * 32)
        run_on(manager, "one", tokens, 8)
        tokens += [9, wrong, 9, 9, 9, 9]
        told = []
        for num_tokens in (12, 13, 14):
            if reader == "another request":
                manager.find([*KNOWN, 9, 9])
            try:
                run_on(manager, "one", tokens, num_tokens)
            except RequestError as refusal:
                told.append(refusal)
        # If blocks die, the request's own commit reads the tokens in any case.
        assert len(told) == 1 or (not told and reader == "nobody")
        for error in told:
            assert "bad_token" == error.code
            assert str(error) == (
                "the request 'one' is committed, but no other request finds its tokens from there on: "
                f"{wrong!r} is not a token id; give whole numbers in [0, 2**32)"
            )
        assert sum(map(len, manager.block_ids("one")))
        if kind in ("one", "alike", "a block that ends where the longest does"):
            assert 8 == manager.find([*KNOWN, 9, 9])
        manager.free("one")
        if others:
            manager.free("other")
        assert (0, 3) == (manager.num_held_pages, manager.num_free_rows)
        audit(manager)
        start(manager, "one", "two", "three")


def test_what_a_row_passed_behind_a_token_that_is_none_is_let_go_of() -> None:
    manager = make_manager(full(), masked(window=5), audited=False)
    tokens: dict[str, list[Any]] = {"one": [1] * 24, "two": [2] * 24}
    tokens["two"][9] = -1
    for name, given in tokens.items():
        manager.start(name, given, use_prefix=False)
        run_on(manager, name, given, 4)
    rows = np.array([manager.row(name) for name in tokens])
    for num_tokens in range(5, 25):
        computed = np.array([num_tokens] * 2)
        assert manager.extend_rows(rows, computed)
        manager.commit_rows(rows, computed)
    assert 8 == manager.find([2] * 24)
    with pytest.raises(RequestError, match=r"^the request 'two' is committed, but .*: -1 is not a token id"):
        manager.commit_rows(rows, computed)
    manager.commit_rows(rows, computed)
    for name in tokens:
        manager.free(name)
    assert [20, 8] == [manager.find([token] * 24) for token in (1, 2)]
    # Cached blocks can be found, and evicted.
    assert len([*findable_pages(manager)]) == pool_of(manager).num_cached


def test_a_row_whose_tokens_are_replaced_by_none_leaves_nothing_behind() -> None:
    manager = make_manager(full(), audited=False)
    tokens: list[Any] = [*range(9)]
    manager.start("one", tokens)
    run_on(manager, "one", tokens, 4)
    run_on(manager, "one", [-1, *tokens[1:]], 8)
    manager.free("one")
    assert [] == [*findable_pages(manager)]


def test_a_request_that_follows_another_up_to_its_unreadable_token_continues_alone() -> None:
    manager = make_manager(full(), masked(window=5), audited=False)
    tokens: dict[str, list[Any]] = {"one": [*range(24)], "two": [*range(24)]}
    tokens["one"][9] = -1
    for name, given in tokens.items():
        manager.start(name, given, use_prefix=False)
        run_on(manager, name, given, 4)
    for end in range(8, 25, 4):
        run_on(manager, "two", tokens["two"], end)
        assert end == manager.find([*range(end), 1])
    with pytest.raises(RequestError, match="-1 is not a token id"):
        run_on(manager, "one", tokens["one"], 12)
    for name in tokens:
        manager.free(name)
    assert 24 == manager.find([*range(25)])


def test_a_row_with_too_few_tokens_releases_what_its_window_passed() -> None:
    manager = make_manager(full(), masked(window=5), max_num_seqs=2)
    start(manager, "other")
    tokens = array("I", TOKENS[:14])
    manager.start("one", tokens)
    assert manager.extend("one", 20)
    with pytest.raises(RequestError, match=r"^the request 'one' is committed, .* there are 14 token ids of more"):
        manager.commit("one", tokens, 20)
    assert [5, 1] == [sum(map(bool, block_ids)) for block_ids in manager.block_ids("one")]


def test_a_page_that_a_request_gets_twice_is_counted_once_when_a_token_cannot_be_read() -> None:
    # No hit needs every other block of the window: their pages are free once the window has passed them.
    manager, tokens = make_manager(full(8), masked(window=3), audited=False), [*range(30)]
    tokens[5] = -1
    manager.start("one", tokens)
    for end in range(1, 31):
        assert manager.extend("one", end)
        manager.commit("one", tokens, end)
    assert 0 == manager.find([*range(5), 6, 7, 8, 9])
    audit(manager)


@pytest.mark.parametrize("tokens", [[1, 2, 3, 4, 5], array("I", [1, 2, 3, 4, 5])], ids=["list", "array"])
def test_tokens_that_are_computed_and_not_given_are_told(tokens: Sequence[int]) -> None:
    manager = make_manager(full())
    manager.start("one", tokens)
    assert manager.extend("one", 12)
    manager.record_events(b"s" * 32)
    with pytest.raises(RequestError, match=r"there are 5 token ids of more tokens that are computed; give them all$"):
        manager.commit("one", tokens, 12)
    manager.free("one")
    assert 4 == manager.find([1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize("wrong", NO_TOKENS)
def test_a_prompt_with_a_token_that_is_none_is_refused_where_it_is_read(wrong: Any) -> None:
    manager = make_manager(full())
    start(manager, "one")
    before, prompt = state_of(manager, "one"), [*TOKENS, wrong, 1, 1, 1, 1]

    def fetch(group: int, blocks: Sequence[int], block_ids: Sequence[int]) -> None:
        raise AssertionError("nothing is to be copied")

    for verb in (
        lambda: manager.start("two", prompt),
        lambda: manager.find(prompt),
        lambda: manager.pin(prompt),
        lambda: manager.restore(prompt[18:22], fetch),
    ):
        with pytest.raises(RequestError, match=r"is not a token id; give whole numbers in \[0, 2\*\*32\)$") as caught:
            verb()
        assert caught.value.code == "bad_token"
        assert before == state_of(manager, "one")


def test_who_is_told_that_tokens_are_missing_can_add_them() -> None:
    plan = make_plan(full(), num_slabs=600, max_model_len=2048)
    manager, tokens = KVCacheManager(plan, max_num_seqs=2), array("I", range(1500))
    manager.start("one", tokens)
    assert manager.extend("one", 2000)
    manager.commit("one", tokens, 2000)
    with pytest.raises(RequestError, match="give them all") as caught:
        as_bytes(tokens, 0, 2000)
    tokens.append(1500)
    assert (1501, "bad_token") == (len(tokens), caught.value.code)
    manager.free("one")
    audit(manager)
