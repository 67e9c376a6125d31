"""The specs of entries: their laws, what a block holds, and what they refuse."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from kvframe_entries import TokenEntriesSpec, UnfinishedGroupSpec
from kvframe_testing.suites import SpecTests

from kvframe.contract import KVFrameError, StateTensor

TENSORS = {"key": [16], "gate": [2, 3]}


def test_a_block_holds_one_entry_for_several_tokens() -> None:
    spec = TokenEntriesSpec(block_size=8, tensors=TENSORS, tokens_per_entry=4, model_dtype="bfloat16")
    assert {"key": StateTensor((2, 16), "bfloat16"), "gate": StateTensor((2, 2, 3), "bfloat16")} == spec.state_tensors()


def test_a_block_becomes_long_enough_for_whole_entries() -> None:
    assert 48 == TokenEntriesSpec(block_size=16, tensors=TENSORS, tokens_per_entry=6).block_size


def test_the_tokens_of_the_unfinished_group_and_those_before_it_are_live() -> None:
    spec = UnfinishedGroupSpec(block_size=4, group=4, overlap=2, tensors=TENSORS)
    assert [(), ((0, 3),), ((2, 4),), ((2, 5),), ((6, 8),)] == [spec.live_ranges(n) for n in (0, 3, 4, 5, 8)]
    assert () == attrs.evolve(spec, overlap=0).live_ranges(4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensors": {}}, "must give the shape of each tensor by its name"),
        ({"tensors": {"key": [0]}}, "must give the shape of each tensor by its name"),
        ({"tensors": 3}, "must give the shape of each tensor by its name"),
        ({"tensors": TENSORS, "tokens_per_entry": 0}, "must be a whole number of at least 1"),
        ({"tensors": TENSORS, "model_dtype": "float12"}, "float12"),
    ],
)
def test_what_is_no_entry_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(KVFrameError, match=message):
        TokenEntriesSpec(block_size=4, **options)


def test_a_negative_overlap_is_refused() -> None:
    with pytest.raises(KVFrameError, match="must be a whole number of at least 0"):
        UnfinishedGroupSpec(block_size=4, group=4, overlap=-1, tensors=TENSORS)


class TestTokenEntries(SpecTests):
    """The laws of every cache spec."""

    spec = "token_entries"
    options = ({"tensors": TENSORS}, {"tensors": TENSORS, "tokens_per_entry": 2})


class TestUnfinishedGroup(SpecTests):
    """The laws of every cache spec."""

    spec = "unfinished_group"
    options = ({"tensors": TENSORS, "group": 5, "overlap": 3}, {"tensors": TENSORS, "group": 4})
