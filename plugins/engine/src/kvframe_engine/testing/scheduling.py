"""Checks that a scheduling policy's orders keep the laws of ``check_scheduling``. Imports no torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs
from kvframe_testing.checks import Check, Checks, make_part
from kvframe_testing.laws import answer_of, require

from kvframe_engine.contract.scheduling import QueuedRequest, SchedulingPolicy

PRIORITIES = (-(2**31), -100, -3, -1, 0, 1, 2, 100, 2**31 - 1)
"""Hinted priorities, in ascending order."""
ARRIVALS = (0.0, 0.001, 1.5, 60.0, 3600.0, 10.0**6)
"""Times of arrival, in ascending order."""
_OTHERS = (0, 1, 1000)
_PROMPTS = (1, 100_000)
_LONG = 10.0**9
"""A request is served before all that come so many seconds after it."""


def check_scheduling(policy: SchedulingPolicy) -> None:
    """Check a policy's answers for requests with any hints, at any time.

    * *form*: ``order`` returns a finite number, the same one for the same request; ``preemption_gap`` returns a
      positive number or infinity; they raise nothing;
    * *turn*: of two requests that differ in their arrival only, the later one is not served first;
    * *urgency*: of two requests that differ in their priority only, the one with the larger number is not served first;
    * *forgetting*: no request waits for ever: what comes long after a request is served after it, whatever its hints.
    """
    for num_others, num_prompt_tokens in itertools.product(_OTHERS, _PROMPTS):
        check_requests(policy, num_others, num_prompt_tokens)


def check_requests(policy: SchedulingPolicy, num_others: int, num_prompt_tokens: int) -> None:
    """Check a policy's answers for requests of an owner with other ones, and of prompts of one length."""
    base = QueuedRequest(arrival=0.0, owner="a", num_others=num_others, num_prompt_tokens=num_prompt_tokens)

    def number_of(label: str, method: Callable[..., float], *arguments: QueuedRequest) -> float:
        number = answer_of(f"{policy!r}: form: {label}", method, *arguments)
        require(type(number) in (int, float), f"{policy!r}: form: {label} has to return a number, not {number!r}")
        return float(number)

    gap = number_of("preemption_gap()", policy.preemption_gap)
    require(gap > 0, policy, f"form: preemption_gap() has to return a positive number, not {gap!r}")

    def order(arrival: float, priority: int) -> float:
        request = attrs.evolve(base, arrival=arrival, priority=priority)
        number = number_of("order()", policy.order, request)
        require(math.isfinite(number), policy, f"form: order() has to return a finite number, not {number!r}")
        second_number = number_of("order()", policy.order, request)
        require(
            number == second_number, policy, f"form: order() answers {number!r}, then {second_number!r} for {request}"
        )
        return number

    for priority in PRIORITIES:
        orders = [order(arrival, priority) for arrival in ARRIVALS]
        require(orders == sorted(orders), policy, f"turn: at {list(ARRIVALS)} the orders are {orders}")
    for arrival in ARRIVALS:
        orders = [order(arrival, priority) for priority in PRIORITIES]
        require(orders == sorted(orders), policy, f"urgency: of the priorities {list(PRIORITIES)} they are {orders}")
    for own, rival in itertools.product(PRIORITIES, PRIORITIES):
        is_first = order(0.0, own) < order(_LONG, rival)
        require(is_first, policy, f"forgetting: a request of priority {own} waits for ever for those of {rival}")


def scheduling_checks(
    policy_class: type[SchedulingPolicy], options: Mapping[str, Any] | None = None, *, name: str = ""
) -> Checks:
    """Return the checks of a policy, one for each number of other requests and length of prompts."""
    part = f"scheduling policy {name or policy_class.name!r}"
    policy = make_part(part, policy_class, options)
    checks = [
        Check(
            name=f"others={num_others}-prompt={num_prompt_tokens}",
            features=("an owner of one request" if not num_others else "an owner of several requests",),
            run=partial(check_requests, policy, num_others, num_prompt_tokens),
        )
        for num_others, num_prompt_tokens in itertools.product(_OTHERS, _PROMPTS)
    ]
    return Checks(part=part, checks=tuple(checks))
