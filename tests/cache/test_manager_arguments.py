"""The manager for embedders: every verb refuses wrong arguments in one sentence, and changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kvframe_testing.audit import audit, audit_each_verb, findable_pages

from kvframe.cache.arguments import MAX_SALT_CHARS
from kvframe.cache.input_index import InputSequence
from kvframe.cache.manager import KVCacheManager
from kvframe.contract.errors import KVFrameError, RequestError
from kvframe.contract.specs import ENCODER, KVCacheSpec
from tests.cache.definition import PageCopies
from tests.cache.plans import encoder, evict_all, full, make_plan, masked, ranged, state
from tests.support.engines import numbers_of

MAX_LEN, TOKENS = 30, [7] * 20
PLANS: dict[str, tuple[KVCacheSpec, ...]] = {
    "one": (full(),),
    "two sizes": (full(), masked(2, window=5)),
    "no mask": (full(), ranged(window=5)),
    "few blocks": (full(), state()),
    "inputs": (full(), encoder()),
}
NAMES = ("unknown", 5, None, [], b"running", float("nan"))
COUNTS = (-1, 2.0, True, None, "3", np.float64(4), 10**30, MAX_LEN + 1)
NO_SEQUENCES = (5, None, "text", b"bytes", iter([1]), {1: 2})
PROMPTS = ([], (), *NO_SEQUENCES, [1] * (MAX_LEN + 1))
SALTS = (5, None, b"salt", "\ud800", "x" * (MAX_SALT_CHARS + 1))
INPUTS = (5, [], {5: InputSequence(3, b"x")}, {ENCODER: 3}, {ENCODER: (3, b"x")})


def arrays(running: int, free: int) -> list[tuple[Any, Any]]:
    """Return rows and counts of which one is wrong."""

    def of(*values: int) -> Any:
        return np.array(values, dtype=np.int64)

    return [
        (of(free), of(21)),
        (of(running, running), of(21, 21)),
        (of(-1), of(21)),
        (of(99), of(21)),
        (of(running), of(21, 22)),
        (of(running), np.array([21.0])),
        (np.array([float(running)]), of(21)),
        (of(running), of(MAX_LEN + 1)),
        (of(running)[:, None], of(21)[:, None]),
        (of(running), of(21)[:, None]),
        ([running], [21]),
        (None, None),
    ]


def make_manager(kind: str) -> KVCacheManager:
    plan = make_plan(*PLANS[kind], num_slabs=60, max_model_len=MAX_LEN, max_encoder_len=9)
    copier = PageCopies(plan, {}).copy_within
    manager = audit_each_verb(KVCacheManager(plan, max_num_seqs=4, copier=copier))
    for name in ("running", "ended"):
        manager.start(name, TOKENS)
        assert manager.extend(name, 20)
        manager.commit(name, TOKENS, 20)
    manager.free("ended")
    return manager


def snapshot(manager: KVCacheManager) -> Any:
    held = manager.num_held_pages, manager.num_free_rows, sorted(findable_pages(manager)), manager.stats
    return manager.block_ids("running"), *held, numbers_of(manager).num_computed.tolist()


def fetch_nothing(*arguments: Any) -> Any:
    """Copy no pages."""


def calls(manager: KVCacheManager) -> dict[str, list[Callable[[], object]]]:
    """Return wrong calls of each verb."""
    running = manager.row("running")
    free = manager._rows.free[0]
    prompts: list[dict[str, Any]] = [
        *({"token_ids": each} for each in PROMPTS),
        *({"token_ids": TOKENS, "salt": each} for each in SALTS),
        *({"token_ids": TOKENS, "inputs": each} for each in INPUTS),
    ]
    of_name: dict[str, Callable[[Any], object]] = {
        "found_prefix": manager.found_prefix,
        "missing_inputs": manager.missing_inputs,
        "has_capacity": lambda name: manager.has_capacity(name, 5),
        "extend": lambda name: manager.extend(name, 5),
        "commit": lambda name: manager.commit(name, TOKENS, 5),
        "shrink": manager.shrink,
        "free": manager.free,
        "row": manager.row,
        "block_ids": manager.block_ids,
        "fork": lambda name: manager.fork(name, "new", TOKENS),
    }
    wrong: dict[str, list[Callable[[], object]]] = {
        verb: [lambda ask=ask, name=name: ask(name) for name in NAMES] for verb, ask in of_name.items()
    }
    wrong["has_capacity"] += [lambda count=count: manager.has_capacity("running", count) for count in COUNTS]
    wrong["extend"] += [lambda count=count: manager.extend("running", count) for count in COUNTS]
    wrong["commit"] += [lambda count=count: manager.commit("running", TOKENS, count) for count in (*COUNTS, 25)]
    wrong["commit"] += [lambda each=each: manager.commit("running", each, 20) for each in NO_SEQUENCES]
    wrong["fork"] += [lambda each=each: manager.fork("running", "new", each) for each in PROMPTS]
    wrong["fork"] += [lambda name=name: manager.fork("running", name, TOKENS) for name in NAMES[1:]]
    wrong["start"] = [lambda name=name: manager.start(name, TOKENS) for name in ("running", *NAMES[1:])]
    wrong["start"] += [lambda each=each: manager.start("new", **each) for each in prompts]
    wrong["find"] = [lambda each=each: manager.find(**each) for each in prompts]
    wrong_prompts = prompts
    # An input can be pinned and restored without a token.
    prompts = [each for each in prompts if each["token_ids"] not in ([], ())]
    wrong["pin"] = [lambda each=each: manager.pin(**each) for each in prompts]
    wrong["extend_rows"] = [
        lambda rows=rows, counts=counts: manager.extend_rows(rows, counts) for rows, counts in arrays(running, free)
    ]
    wrong["commit_rows"] = [
        lambda rows=rows, counts=counts: manager.commit_rows(rows, counts)
        for rows, counts in [*arrays(running, free), (np.array([running]), np.array([25]))]
    ]
    wrong["restore"] = [lambda each=each: manager.restore(fetch=fetch_nothing, **each) for each in prompts]
    wrong["resize"] = [lambda count=count: manager.resize(count) for count in (-1, 0, 2.0, None, True, 2**40)]
    secrets = (5, b"", "x" * 32)
    wrong["record_events"] = [lambda secret=secret: manager.record_events(secret) for secret in secrets]
    wrong["watch_pages"] = [lambda secret=secret: manager.watch_pages(secret) for secret in secrets]
    of_blocks: list[dict[str, Any]] = [{"secret": bytes(32), **each} for each in wrong_prompts]
    of_blocks += [{"secret": secret, "token_ids": TOKENS} for secret in secrets]
    wrong["prefix_blocks"] = [lambda each=each: manager.prefix_blocks(**each) for each in of_blocks]
    wrong["may_be_needed"] = [
        lambda each=each: manager.may_be_needed(each)
        for each in (*NO_SEQUENCES, ["x"], [1.0], [True], [-1], [10**30], [2**40], [[1], [2, 3]], [[1]])
    ]
    wrong["on_pages_freed"] = [lambda: setattr(manager, "on_pages_freed", 5)]
    return wrong


WITHOUT_ARGUMENTS = {"reset_prefix_cache", "stop_events", "stats", "usage", "eviction", "num_free_rows"}
WITHOUT_ARGUMENTS |= {"num_held_pages", "layout"}


def test_every_verb_is_listed_here() -> None:
    public = {name for name in vars(KVCacheManager) if not name.startswith("_")}
    # A pin is a value that the manager made; other checks of pins are in test_pins.py. Watchers record copies of pages
    # that the manager named.
    assert public - WITHOUT_ARGUMENTS - {"unpin", "check_salt", "record_copies"} == set(calls(make_manager("one")))


@pytest.mark.parametrize("kind", PLANS)
def test_a_wrong_argument_is_refused_and_changes_nothing(kind: str) -> None:
    manager = make_manager(kind)
    before = snapshot(manager)
    for verb, wrong in calls(manager).items():
        for place, call in enumerate(wrong):
            with pytest.raises(KVFrameError) as caught:
                call()
            assert "\n" not in str(caught.value), (verb, place)
            assert before == snapshot(manager), (verb, place)
    audit(manager)
    manager.free("running")
    assert 0 == manager.num_held_pages


def test_the_longest_salt_is_taken() -> None:
    assert 0 == make_manager("one").start("new", TOKENS, salt="x" * MAX_SALT_CHARS)


@pytest.mark.parametrize("kind", PLANS)
def test_more_tokens_than_there_was_room_made_for_are_not_committed(kind: str) -> None:
    manager = make_manager(kind)
    rows = np.array([manager.row("running")])
    assert manager.extend("running", 22)
    for commit in (
        lambda: manager.commit("running", [7] * 30, 25),
        lambda: manager.commit_rows(rows, np.array([25])),
    ):
        with pytest.raises(RequestError, match=r"^25 computed tokens .* blocks for 2[24]; extend it before") as caught:
            commit()
        assert "not_extended" == caught.value.code
    manager.commit("running", [7] * 30, 22)
    audit(manager)


def test_a_prompt_without_tokens_is_refused_whatever_is_cached() -> None:
    for is_warm in (False, True):
        manager = KVCacheManager(make_plan(full(), num_slabs=60), max_num_seqs=2)
        if is_warm:
            manager.start("one", TOKENS)
            assert manager.extend("one", 20)
            manager.commit("one", TOKENS, 20)
        for ask in (lambda: manager.find([]), lambda: manager.start("empty", [])):  # noqa: B023
            with pytest.raises(RequestError, match=r"^there are no tokens; give at least one$"):
                ask()


@pytest.mark.parametrize("error", [ValueError, SystemExit])
@pytest.mark.parametrize("kind", PLANS)
def test_a_listener_that_raises_is_set_aside_and_leaks_nothing(
    kind: str, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    manager = make_manager(kind)
    told: list[int] = []

    def listen(group: int, block_ids: list[int]) -> None:
        told.append(group)
        raise error("no\nidea")

    manager.on_pages_freed = listen
    with caplog.at_level(logging.ERROR, "kvframe"):
        manager.free("running")
        manager.reset_prefix_cache()
    assert 1 == len(told)
    assert [f"on_pages_freed raises {error.__name__}: no idea; it was removed"] == caplog.messages
    audit(manager)
    assert (0, 4) == (manager.num_held_pages, manager.num_free_rows)


def test_numbers_of_evicted_inputs_are_used_again() -> None:
    manager = make_manager("inputs")
    index = manager._cache.inputs
    for number in range(6):
        if number == 3:
            evict_all(manager)
        manager.start(str(number), TOKENS, inputs={ENCODER: InputSequence(5, bytes([number]))})
        assert manager.extend(str(number), 20)
        manager.commit(str(number), TOKENS, 20)
        manager.free(str(number))
        audit(manager)
    assert [-3, -2, -1] == sorted(index.entries)
    for number in range(3, 6):
        assert 16 == manager.find([*TOKENS, 1], inputs={ENCODER: InputSequence(5, bytes([number]))}) // 4 * 4 - 4


def test_an_audit_sees_pages_of_a_row_that_is_free() -> None:
    manager = make_manager("one")
    free, running = manager._rows.free[-1], manager.row("running")
    page = manager.block_ids("running")[0][0]
    manager.tables[0].ids[free, 0] = page
    with pytest.raises(AssertionError, match="a row names a page after its last block"):
        audit(manager)
    manager.tables[0].ids[free, 0] = 0
    numbers_of(manager).num_blocks[0, free] = 1
    with pytest.raises(AssertionError, match="a free row has blocks or tokens"):
        audit(manager)
    numbers_of(manager).num_blocks[0, free] = 0
    manager.tables[0].ids[running, 6] = page
    with pytest.raises(AssertionError, match="a row names a page after its last block"):
        audit(manager)
