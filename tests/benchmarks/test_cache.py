"""The benchmarks of the cache do and check their works, know the best of evictions, and simulate every byte."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from benchmarks.cache import eviction, eviction_traces


@pytest.fixture(autouse=True)
def _nothing_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing is timed here, and there is much to go through where torch is loaded.
    monkeypatch.setattr("gc.collect", lambda: 0)


# --- eviction ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "num_blocks", "num_found"),
    [
        # What does not fit beside a request that runs goes, whoever asks for it next.
        (["abc", "abc"], 3, 2),
        (["abc", "xyz", "abc"], 3, 0),
        (["abc", "xyz", "abc"], 5, 2),
        # Blocks for one of two prefixes besides the request: the one that is asked for next stays.
        (["abq", "cdq", "cdr", "abr"], 5, 4),
        (["abq", "cdq", "cdr", "abr"], 4, 3),
        # Nobody asks for x, y and z again.
        (["abc", "xyz", "uvw", "abc"], 5, 2),
    ],
)
def test_the_bound_knows_the_future(texts: list[str], num_blocks: int, num_found: int) -> None:
    tokens = [array("I", [token for letter in text for token in [ord(letter)] * 16]) for text in texts]
    asked: list[Any] = [eviction_traces.TracedRequest(token_ids, len(token_ids)) for token_ids in tokens]
    assert 16 * num_found == eviction.most_found(asked, eviction.block_ids(asked), 16 * num_blocks)


def test_no_policy_finds_more_than_the_bound() -> None:
    for name, (_, draw) in eviction_traces.TRACES.items():
        assert draw(20) == draw(20)
        for pool in eviction.run(name, 20)["pools"].values():
            assert all(pool[policy]["found"] <= pool["at best"]["found"] for policy in eviction.POLICIES)
