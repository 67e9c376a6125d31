"""A scheduling policy orders requests: waiting, running and preempted ones; every one of them ends, none too late."""

from __future__ import annotations

import logging
import math
from typing import Any, ClassVar

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvframe_engine.contract import FCFS, QueuedRequest, SchedulingPolicy
from kvframe_engine.requests.request import Request, SamplingParams
from kvframe_engine.scheduling.ordered_queue import OrderedQueue
from kvframe_engine.scheduling.scheduler import Scheduler
from kvframe_engine.testing.scheduling import check_scheduling
from kvframe_priority.policy import Priority
from kvframe_testing.laws import ConformanceError

from kvframe import Hints
from kvframe.contract import PluginError, RequestError
from kvframe.contract.errors import shown
from tests.engine.scripted_model import ScriptedModel
from tests.engine.test_scheduler import CountingCache, complete


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def request(
    name: str,
    priority: int = 0,
    num_tokens: int = 4,
    max_new_tokens: int = 4,
    owner: str = "",
    keeps_part: bool = False,
) -> Request:
    return Request.create(
        name,
        [*range(num_tokens)],
        SamplingParams(max_new_tokens=max_new_tokens),
        eos_token_ids=frozenset(),
        max_model_len=100,
        owner=owner,
        hints=Hints(priority=priority),
        keeps_part=keeps_part,
    )


def scheduler(
    *requests: Request,
    blocks: int = 1000,
    seqs: int = 8,
    tokens: int = 16,
    clock: Clock | None = None,
    policy: SchedulingPolicy = Priority(),  # noqa: B008
) -> Scheduler[Request]:
    made: Scheduler[Request] = Scheduler(
        CountingCache(blocks), max_num_seqs=seqs, max_num_batched_tokens=tokens, policy=policy, now=clock or Clock()
    )
    for each in requests:
        made.add(each)
    return made


def run(made: Scheduler[Request], num_steps: int = 1) -> list[dict[str, int]]:
    """Complete steps, and return the tokens of each request in each of them."""
    seen = []
    for _ in range(num_steps):
        step = made.schedule()
        assert step is not None
        names = [each.request_id for each in step.requests]
        seen.append(dict(zip(names, step.num_scheduled.tolist(), strict=True)))
        complete(made, step)
    return seen


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_urgent_requests_are_admitted_first_and_equal_ones_in_their_order() -> None:
    made = scheduler(request("batch", 1), request("a"), request("b"), request("urgent", -1), seqs=1)
    assert ["urgent", "a", "b", "batch"] == [each.request_id for each in made.waiting]


def test_a_request_goes_before_urgent_ones_that_come_much_later() -> None:
    clock = Clock()
    made = scheduler(request("batch", 1), clock=clock)
    clock.now = 59.8
    made.add(request("soon"))
    clock.now = 60.1
    made.add(request("late"))
    assert ["soon", "batch", "late"] == [each.request_id for each in made.waiting]


def test_an_owner_of_many_requests_delays_others_little() -> None:
    many = [request(f"many{index}", owner="many") for index in range(100)]
    made = scheduler(*many, request("other", owner="other"))
    assert ["many0", "other", "many1"] == [each.request_id for each in made.waiting][:3]
    for each in [*many, made.waiting.first]:
        made.end(each, "aborted")
    made.add(request("again", owner="many"))
    assert 0.0 == made.waiting.first.order[0]


# --- running ----------------------------------------------------------------------------------------------------------


def test_a_waiting_request_takes_the_row_of_a_less_urgent_one() -> None:
    made = scheduler(request("a"), request("batch", 1), seqs=2)
    assert [{"a": 4, "batch": 4}] == run(made)
    made.add(request("urgent"))
    assert [{"a": 1, "urgent": 4}, {"a": 1, "urgent": 1}] == run(made, 2)
    assert 1 == made.stats.preemptions


def test_a_waiting_request_takes_no_row_of_an_equal_one() -> None:
    made = scheduler(request("a"), request("b"), seqs=2)
    run(made)
    made.add(request("c"))
    assert [{"a": 1, "b": 1}] == run(made)
    assert 0 == made.stats.preemptions


def test_the_only_running_request_is_preempted_too() -> None:
    made = scheduler(request("batch", 5), seqs=1)
    run(made)
    made.add(request("urgent", max_new_tokens=2))
    assert [{"urgent": 4}, {"urgent": 1}, {"batch": 5}] == run(made, 3)


def test_running_requests_take_blocks_of_the_least_urgent_one() -> None:
    made = scheduler(request("batch", 1), blocks=3, policy=NoGap())
    run(made)
    made.add(request("a"))
    # Each needs a second block for its fifth token, and there are three: the request admitted first gives its own back.
    assert [{"batch": 1, "a": 4}, {"a": 1}] == run(made, 2)


class ChoosingCache(CountingCache):
    """Needs a free block while layers choose what they keep of a prompt."""

    def shrink(self, request_id: str) -> bool:
        return self.num_free > 0


def test_layers_that_choose_take_blocks_of_the_least_urgent_request() -> None:
    made: Scheduler[Request] = Scheduler(
        ChoosingCache(4), max_num_seqs=8, max_num_batched_tokens=16, policy=NoGap(), now=Clock()
    )
    made.add(request("batch", 1))
    run(made)
    made.add(request("a", num_tokens=8, keeps_part=True))
    # With both running, no block is free.
    assert [{"batch": 1, "a": 8}, {"a": 1}] == run(made, 2)
    assert 1 == made.stats.preemptions


def test_a_smaller_cache_preempts_the_least_urgent_request() -> None:
    made = scheduler(request("batch", 1), policy=NoGap())
    run(made)
    made.add(request("a"))
    run(made)
    made.preempt_last()
    assert ["a"] == [each.request_id for each in made.running]


def test_prompts_in_progress_are_computed_in_the_order_of_the_policy() -> None:
    made = scheduler(request("batch", 1, num_tokens=40), tokens=16)
    assert [{"batch": 16}] == run(made)
    made.add(request("a", num_tokens=20))
    # It gets no token while the other prompt takes the whole step, and preempts for none: it lacks no row and no block.
    assert [{"batch": 16}, {"batch": 8, "a": 8}, {"a": 12, "batch": 1}] == run(made, 3)


@attrs.frozen(kw_only=True)
class NoGap(SchedulingPolicy):
    """Orders by priority, and lets no waiting request preempt."""

    name: ClassVar[str] = "no_gap"

    def order(self, request: QueuedRequest) -> float:
        return request.arrival + 10 * request.priority


# --- every request ends, none too late --------------------------------------------------------------------------------


@given(st.data())
def test_no_request_waits_for_one_that_came_too_late(data: st.DataObject) -> None:
    """Whatever comes when, each request is admitted before all that come after the bound that the policy states."""
    policy = Priority(seconds=5, levels=2, owner_seconds=data.draw(st.sampled_from([0, 0.5])))
    clock, cache = Clock(), CountingCache(data.draw(st.integers(8, 30)))
    made: Scheduler[Request] = Scheduler(
        cache, max_num_seqs=data.draw(st.integers(1, 4)), max_num_batched_tokens=16, policy=policy, now=clock
    )
    requests: list[Request] = []
    arrivals: dict[str, tuple[float, int, int]] = {}
    for index in range(data.draw(st.integers(1, 12))):
        for _ in range(data.draw(st.integers(0, 3))):
            if made.has_work and (step := made.schedule()) is not None:
                _check_admitted(step.admitted, made, arrivals, policy)
                complete(made, step)
            clock.now += data.draw(st.floats(0, 4))
        sizes = {"num_tokens": data.draw(st.integers(1, 20)), "max_new_tokens": data.draw(st.integers(1, 12))}
        owner = data.draw(st.sampled_from("ab"))
        requests.append(request(f"r{index}", data.draw(st.integers(-9, 9)), owner=owner, **sizes))
        others = sum(
            (each.owner, each.hints, each.finish_reason) == (owner, requests[-1].hints, None) for each in requests[:-1]
        )
        arrivals[f"r{index}"] = clock.now, max(-2, min(2, requests[-1].hints.priority)), others
        made.add(requests[-1])
        if data.draw(st.booleans()) and len(requests) > 2:
            made.end(data.draw(st.sampled_from(requests)), "aborted")
    for _ in range(1000):
        step = made.schedule()
        if step is None:
            break
        _check_admitted(step.admitted, made, arrivals, policy)
        complete(made, step)
    assert {"length", "aborted"} >= {each.finish_reason for each in requests}
    for each in requests:
        if each.finish_reason == "length":
            assert each.max_tokens == len(each.token_ids)
            assert [7] * (each.max_tokens - each.num_prompt_tokens) == [*each.token_ids[each.num_prompt_tokens :]]
    assert not cache.held
    assert not made.waiting._num_unfinished  # type: ignore[union-attr]
    assert (0, 0) == (len(made.waiting), len(made.running))


def _check_admitted(
    admitted: list[Request],
    made: Scheduler[Request],
    arrivals: dict[str, tuple[float, int, int]],
    policy: Priority,
) -> None:
    """Check that no request was admitted before one that waits and came earlier by more than the policy's bound."""
    for each in admitted:
        for waiting in made.waiting:
            arrival, level, num_others = arrivals[waiting.request_id]
            others_arrival, others_level, others_num = arrivals[each.request_id]
            bound = policy.seconds * (level - others_level) + policy.owner_seconds * (num_others - others_num)
            assert others_arrival <= arrival + bound + 1e-9


# --- policies that fail -----------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Failing(SchedulingPolicy):
    """Answers ``answer`` from some time on."""

    name: ClassVar[str] = "failing"
    answer: Any = "soon"
    good_until: float = -1.0
    gap: Any = 1.0

    def order(self, request: QueuedRequest) -> float:
        if request.arrival <= self.good_until:
            return -request.arrival
        if self.answer == "raise":
            raise KeyError("arrival")
        return self.answer  # type: ignore[no-any-return]

    def preemption_gap(self) -> float:
        return self.gap  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (Failing(), "scheduling policy 'failing': order() has to return a number, not str"),
        (Failing(answer=math.nan), "order() has to be finite, not nan"),
        (Failing(answer="raise"), "scheduling policy 'failing': order() failed: KeyError"),
        (Failing(answer=0, gap=0), "preemption_gap() has to be positive"),
        (Failing(answer=0, gap=None), "preemption_gap() has to return a number, not NoneType"),
    ],
)
def test_a_wrong_policy_is_refused_when_the_engine_is_made(policy: SchedulingPolicy, why: str) -> None:
    with pytest.raises(PluginError) as refusal:
        OrderedQueue(policy, Clock())
    assert why in str(refusal.value)


def test_a_policy_that_fails_later_is_set_aside(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    made = scheduler(clock=clock, policy=Failing(good_until=1.0))
    for clock.now, name in ((0.0, "a"), (1.0, "b"), (2.0, "c"), (3.0, "d")):
        with caplog.at_level(logging.ERROR, "kvframe"):
            made.add(request(name))
    assert ["b", "a", "c", "d"] == [each.request_id for each in made.waiting]
    (line,) = caplog.messages
    assert line.endswith("it is set aside, and requests are served in the order in which they come")


# --- the kit ----------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Wrong(SchedulingPolicy):
    """Breaks one law."""

    name: ClassVar[str] = "wrong"
    law: str = ""

    def order(self, request: QueuedRequest) -> float:
        if self.law == "form":
            return math.inf
        if self.law == "turn":
            return -request.arrival
        if self.law == "urgency":
            return request.arrival - request.priority / 2**32
        return request.arrival + (10.0**10 if self.law == "forgetting" else 1) * max(-9, min(9, request.priority))


def test_the_kit_accepts_right_policies() -> None:
    for policy in (FCFS, Priority(), NoGapWithin()):
        check_scheduling(policy)


@attrs.frozen(kw_only=True)
class NoGapWithin(NoGap):
    """The same, with few levels."""

    name: ClassVar[str] = "no_gap_within"

    def order(self, request: QueuedRequest) -> float:
        return request.arrival + max(-3, min(3, request.priority))


@pytest.mark.parametrize("law", ["form", "turn", "urgency", "forgetting"])
def test_the_kit_names_the_law_that_a_policy_breaks(law: str) -> None:
    with pytest.raises(ConformanceError, match=f": {law}: "):
        check_scheduling(Wrong(law=law))


# --- in an engine -----------------------------------------------------------------------------------------------------

SCRIPT = "the quick brown fox jumps over the lazy dog"


def test_priorities_change_when_requests_run_and_no_token() -> None:
    params = SamplingParams(max_new_tokens=8)
    hints = [Hints(priority=priority) for priority in (3, 0, -3, 5, -5, 0)]
    with ScriptedModel(SCRIPT).engine(max_num_seqs=2) as engine:
        (expected,) = engine.generate(["the "], params)
    with ScriptedModel(SCRIPT).engine(max_num_seqs=2, scheduling="priority") as engine:
        ids = [engine.add_request("the ", params, hints=each) for each in hints]
        ended = []
        while engine.has_unfinished:
            outputs = engine.step()
            ended += [ids.index(each.request_id) for each in outputs if each.finish_reason is not None]
            assert {expected.text} >= {each.text for each in outputs if each.finish_reason is not None}
        assert [4, 2, 1, 5, 0, 3] == ended
        assert [expected.text] * 6 == [each.text for each in engine.generate(["the "] * 6, params, hints=hints)]
        (streamed,) = list(engine.stream("the ", SamplingParams(max_new_tokens=1), hints=hints[0]))
        assert expected.text[0] == streamed.text


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"priority": 1.5}, "priority must be a whole number from -2147483647 to 2147483647, not 1.5"),
        ({"priority": True}, "priority must be a whole number from -2147483647 to 2147483647, not True"),
        ({"priority": 2**31}, "priority must be a whole number from -2147483647 to 2147483647, not 2147483648"),
        ({"keep_seconds": -1}, "keep_seconds must be a number of seconds, at least 0, or None, not -1"),
        ({"keep_seconds": math.inf}, "keep_seconds must be a number of seconds, at least 0, or None, not inf"),
        ({"keep_seconds": math.nan}, "keep_seconds must be a number of seconds, at least 0, or None, not nan"),
        (
            {"session_id": "x" * 1025},
            f"session_id must be a string of at most 1,024 characters, not {shown('x' * 1025)}",
        ),
        ({"session_id": None}, "session_id must be a string of at most 1,024 characters, not None"),
        ({"keep_seconds": "1h"}, "keep_seconds must be a number of seconds, at least 0, or None, not '1h'"),
    ],
)
def test_wrong_hints_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError) as refusal:
        Hints(**options)
    assert ("bad_hints", why) == (refusal.value.code, str(refusal.value))


@pytest.mark.parametrize("hints", [5, {"priority": 1}, "urgent"])
def test_what_is_no_hints_is_refused(hints: Any) -> None:
    with ScriptedModel(SCRIPT).engine() as engine:
        for ask in (
            lambda: engine.add_request("the", hints=hints),
            lambda: engine.stream("the", hints=hints),
            lambda: engine.generate(["the"], hints=hints),
            lambda: engine.generate(["the", "the"], hints=[Hints()]),
        ):
            with pytest.raises(RequestError, match="hints") as refusal:
                ask()
            assert "bad_hints" == refusal.value.code
        assert not engine.has_unfinished


@pytest.mark.parametrize(
    ("hints", "num_found"), [(None, 0), (Hints(keep_seconds=3600), 16), (Hints(keep_seconds=0), 0)], ids=range(3)
)
def test_hints_of_ended_requests_reach_the_eviction_policy(hints: Hints | None, num_found: int) -> None:
    params = SamplingParams(max_new_tokens=1)
    with ScriptedModel(SCRIPT).engine(eviction="scan_resistant", max_num_seqs=8) as engine:
        engine.generate(["the quick brown fox"], params, hints=hints, owner="a")
        # Each of these is two blocks at least: together they fill the pool.
        engine.generate([f"{index:<9}" for index in range(engine.plan.num_slabs)], params)
        (output,) = engine.generate(["the quick brown fox"], params)
        assert engine.stats().evictions > 0
    assert output.cached is not None
    assert num_found == output.cached.num_tokens
