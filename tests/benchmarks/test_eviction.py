"""Eviction policies measured: the bound is one, the record holds what is claimed, and the page shows it."""

from __future__ import annotations

import itertools
from array import array
from typing import Any

import pytest

from benchmarks.cache import eviction, eviction_traces
from tests.benchmarks.calling import record_of

SCANS = ("shared prompts, one-off documents between", "shared prompts, one-off documents in bursts")
CONVERSATIONS = ("conversations", "conversations on shared prompts")
WORSE_AT_MOST = 1.0
"""Percentage points of prompt tokens by which conversations may find less than by LRU."""


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    found: dict[str, Any] = record_of("eviction")
    return found


def ask(*texts: str) -> list[Any]:
    """Return requests of blocks: each letter stands for one, and the last block is never found."""
    tokens = [array("I", [token for letter in text for token in [ord(letter)] * 16]) for text in texts]
    return [eviction_traces.TracedRequest(each, len(each)) for each in tokens]


@pytest.mark.parametrize(
    ("texts", "room", "found"),
    [
        # What does not fit beside a request that runs goes, whoever asks for it next.
        (["abc", "abc"], 3, 2),
        (["abc", "xyz", "abc"], 3, 0),
        (["abc", "xyz", "abc"], 5, 2),
        # Room for one of two prefixes besides the request: the one that is asked for next stays.
        (["abq", "cdq", "cdr", "abr"], 5, 4),
        (["abq", "cdq", "cdr", "abr"], 4, 3),
        # Nobody asks for x, y and z again.
        (["abc", "xyz", "uvw", "abc"], 5, 2),
    ],
)
def test_the_bound_knows_the_future(texts: list[str], room: int, found: int) -> None:
    asked = ask(*texts)
    blocks = eviction.block_ids(asked)
    assert 16 * found == eviction.most_found(asked, blocks, 16 * room)


def test_no_policy_finds_more_than_the_bound() -> None:
    for name in eviction_traces.TRACES:
        trace = eviction.run(name, 20)
        for pool in trace["pools"].values():
            best = pool["at best"]["found"]
            assert all(pool[policy]["found"] <= best for policy in eviction.POLICIES)


def test_a_trace_is_the_same_each_time() -> None:
    for _, draw in eviction_traces.TRACES.values():
        assert draw(20) == draw(20)


# --- what is recorded -------------------------------------------------------------------------------------------------


def gains(record: dict[str, Any], name: str) -> list[float]:
    trace, share = record["traces"][name], eviction.share
    return [share(trace, pool, "scan_resistant") - share(trace, pool, "lru") for pool in trace["pools"]]


def test_one_off_prompts_do_not_flush_shared_ones(record: dict[str, Any]) -> None:
    assert min(gains(record, SCANS[0])) > 1
    assert max(gains(record, SCANS[0])) > 5
    assert max(gains(record, SCANS[1])) > 3
    for name in SCANS:
        for pool in record["traces"][name]["pools"].values():
            assert pool["scan_resistant"]["shared_found"] >= pool["lru"]["shared_found"]


def test_conversations_find_about_what_they_find_by_lru(record: dict[str, Any]) -> None:
    found = itertools.chain(*(gains(record, name) for name in CONVERSATIONS))
    assert min(found) > -WORSE_AT_MOST


def test_every_pool_of_every_trace_is_within_the_bound(record: dict[str, Any]) -> None:
    for trace in record["traces"].values():
        for pool in trace["pools"].values():
            assert max(pool["lru"]["found"], pool["scan_resistant"]["found"]) <= pool["at best"]["found"]
