"""The policy in plain numbers, its laws, and its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from kvframe_engine.contract import QueuedRequest
from kvframe_engine.testing.suites import SchedulingTests
from kvframe_priority.policy import Priority


def order(policy: Priority, arrival: float, priority: int = 0, num_others: int = 0) -> float:
    return policy.order(QueuedRequest(arrival=arrival, priority=priority, num_others=num_others))


def test_a_level_of_priority_is_worth_some_seconds_of_waiting() -> None:
    assert [100.0, 160.0, 40.0] == [order(Priority(), 100.0, priority) for priority in (0, 1, -1)]
    assert 110.0 == order(Priority(seconds=10), 100.0, 1)


def test_priorities_beyond_the_levels_count_as_the_last_ones() -> None:
    policy = Priority(seconds=1, levels=2)
    assert [98.0, 98.0, 102.0, 102.0] == [order(policy, 100.0, priority) for priority in (-9, -2, 2, 9)]


def test_each_other_request_of_an_owner_counts_as_waiting_time() -> None:
    assert [100.0, 110.0] == [order(Priority(), 100.0, 0, num_others) for num_others in (0, 100)]
    assert 100.0 == order(Priority(owner_seconds=0), 100.0, 0, 100)


def test_a_waiting_request_preempts_one_that_is_half_a_level_behind() -> None:
    assert [30.0, 5.0] == [Priority().preemption_gap(), Priority(seconds=10).preemption_gap()]


class TestPriority(SchedulingTests):
    policy = "priority"


class TestPriorityWithWideLevels(SchedulingTests):
    policy = "priority"
    options: ClassVar[Mapping[str, Any]] = {"seconds": 3600, "levels": 1000, "owner_seconds": 3600}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"seconds": 0}, "seconds must be a number of seconds from 0.001 to 3600, not 0"),
        ({"seconds": float("nan")}, "seconds must be a number of seconds from 0.001 to 3600, not nan"),
        ({"levels": 0}, "levels must be a whole number from 1 to 1000, not 0"),
        ({"levels": True}, "levels must be a whole number from 1 to 1000, not True"),
        ({"owner_seconds": -1}, "owner_seconds must be a number of seconds from 0 to 3600, not -1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Priority(**options)
