"""Owners share what runs: nobody waits for the others' queues, every request ends, and no preemption is undone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvframe_engine.requests.request import Request, SamplingParams
from kvframe_engine.scheduling.scheduler import Scheduler

from kvframe.cache.manager import KVCacheManager
from kvframe.contract.specs import KVCacheSpec
from tests.cache.plans import full, make_plan
from tests.cache.test_manager import SPECS
from tests.engine import test_scheduler as alone
from tests.engine.test_scheduler import CountingCache, ForkingCache, run, scheduler


def request(name: str, num_prompt_tokens: int, max_new_tokens: int = 4) -> Request:
    """Return a request of the owner that the first letter names."""
    made = alone.request(name, num_prompt_tokens, max_new_tokens)
    made.owner = name[0]
    return made


def many(owner: str, count: int, num_prompt_tokens: int = 4, max_new_tokens: int = 50) -> list[Request]:
    return [request(f"{owner}{index}", num_prompt_tokens, max_new_tokens) for index in range(count)]


def owners_running(made: Scheduler[Request]) -> dict[str, int]:
    return dict(Counter(each.owner for each in made.running))


# --- rows -------------------------------------------------------------------------------------------------------------


def test_an_owner_without_running_requests_gets_a_row_in_the_next_step() -> None:
    made = scheduler(CountingCache(), *many("a", 100), seqs=4)
    run(made, 2)
    made.add(request("b", 2))
    assert [{"a0": 1, "a1": 1, "a2": 1, "b": 2}] == run(made, 1)


def test_owners_get_equally_many_rows() -> None:
    made = scheduler(CountingCache(), *many("a", 100), seqs=8, tokens=64)
    run(made, 2)
    for each in [*many("b", 100), *many("c", 1)]:
        made.add(each)
    run(made, 10)
    assert {"a": 4, "b": 3, "c": 1} == owners_running(made)


def test_what_one_owner_does_not_need_goes_to_the_others() -> None:
    made = scheduler(CountingCache(), *many("a", 100), *many("b", 1, max_new_tokens=3), seqs=4)
    seen = run(made, 6)
    assert {"b0", "a0", "a1", "a2"} == set(seen[1])
    assert {"a0", "a1", "a2", "a3"} == set(seen[5])


def test_equal_owners_do_not_preempt_each_other() -> None:
    made = scheduler(CountingCache(), *many("a", 20), seqs=4)
    run(made, 2)
    for each in many("b", 20):
        made.add(each)
    run(made, 60)
    assert ({"a": 2, "b": 2}, 2) == (owners_running(made), made.stats.preemptions)


def test_a_preempted_request_is_the_next_of_its_owner() -> None:
    made = scheduler(CountingCache(), *many("a", 6, 4, 9), seqs=3)
    run(made, 2)
    made.add(request("b", 2, 1))
    assert [{"a0", "a1", "b"}, {"a0", "a1", "a2"}] == [set(step) for step in run(made, 2)]


def test_with_as_many_rows_as_tokens_each_owner_has_tokens() -> None:
    made = scheduler(CountingCache(), *many("a", 8, 1), seqs=8, tokens=4)
    run(made, 2)
    made.add(request("b", 1))
    assert 1 == run(made, 1)[0]["b"]


def test_nothing_is_preempted_for_a_sample_that_waits_for_another_one() -> None:
    first, second = request("b1", 20), request("b2", 20)
    first.pause_for_forks(19)
    second.forks_from = first
    made = scheduler(ForkingCache(), *many("a", 4), seqs=4)
    run(made, 1)
    made.add(first)
    made.add(second)
    run(made, 1)
    assert first.num_computed < first.pause_at
    run(made, 1)
    assert ({"a": 3, "b": 1}, 1) == (owners_running(made), made.stats.preemptions)
    run(made, 1)
    assert {"a": 2, "b": 2} == owners_running(made)


def test_a_sample_that_waits_for_another_one_holds_up_no_request() -> None:
    first, second = request("b1", 60), request("b2", 60)
    first.pause_for_forks(59)
    second.forks_from = first
    made = scheduler(ForkingCache(), request("a1", 2, 50), request("a2", 2, 50), seqs=8)
    run(made, 1)
    for each in [first, second, request("a3", 2)]:
        made.add(each)
    seen = run(made, 3)
    assert {"a1", "a2", "a3", "b1"} == set(seen[-1])
    assert first.num_computed < first.pause_at
    while first.num_computed < first.pause_at:
        seen += run(made, 1)
    assert "b2" not in {name for step in seen for name in step}
    assert 1 == run(made, 1)[0]["b2"]


# --- blocks -----------------------------------------------------------------------------------------------------------


def test_an_owner_without_running_requests_gets_blocks_after_one_step_without_them() -> None:
    # Four requests hold all eight blocks until they end; the new one needs four.
    made = scheduler(CountingCache(8), *many("a", 4, 5, 3), seqs=8, tokens=64)
    run(made, 1)
    made.add(request("b", 14, 1))
    assert [{"a0", "a1", "a2", "a3"}, {"a0", "a1", "b"}] == [set(step) for step in run(made, 2)]


def test_requests_of_the_owner_with_the_most_give_their_blocks_first() -> None:
    # The requests have eight blocks after the second step, and three of them need another one in the third step.
    made = scheduler(CountingCache(8), *many("a", 3, 7), seqs=8, tokens=64)
    run(made, 1)
    made.add(request("b", 8))
    seen = run(made, 2)
    assert {"a0", "a1", "a2", "b"} == set(seen[0])
    assert {"a0", "b"} == set(seen[1])


def test_the_only_running_request_of_an_owner_is_not_preempted_for_another() -> None:
    made = scheduler(CountingCache(5), request("a", 16, 4), seqs=4, tokens=64)
    run(made, 1)
    made.add(request("b", 8, 1))
    assert [{"a": 1}, {"a": 1}, {"a": 1}, {"b": 8}] == run(made, 4)
    assert 0 == made.stats.preemptions


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_prompts_of_several_owners_share_a_step() -> None:
    made = scheduler(CountingCache(), request("a", 90))
    run(made, 1)
    made.add(request("b", 4))
    made.add(request("c", 90))
    assert [{"a": 15, "b": 1}, {"a": 12, "b": 3, "c": 1}, {"a": 7, "b": 1, "c": 8}] == run(made, 3)


def test_two_prompts_of_one_owner_have_one_part() -> None:
    made = scheduler(CountingCache(), request("a1", 40), request("b1", 90), tokens=16)
    run(made, 1)
    made.add(request("a2", 90))
    seen = run(made, 4)
    assert {"a1": 8, "b1": 8} == seen[1]
    assert {16} == {sum(step.values()) for step in seen}


def test_as_many_running_requests_as_tokens_get_one_each() -> None:
    made = scheduler(CountingCache(), *many("a", 2, 1), request("b", 30), seqs=3, tokens=3)
    run(made, 2)
    assert [{"a0": 1, "b": 1, "a1": 1}] * 2 == run(made, 2)


def test_with_one_owner_a_prompt_has_the_whole_step() -> None:
    made = scheduler(CountingCache(), request("a1", 40), request("a2", 40))
    assert [{"a1": 16}, {"a1": 16}, {"a1": 8, "a2": 8}, {"a1": 1, "a2": 15}] == run(made, 4)


# --- all of it --------------------------------------------------------------------------------------------------------

MAX_LEN, CHUNK, NUM_ROWS = 24, 8, 4
OWNERS = "abc"


@attrs.frozen
class Arrival:
    """A request that comes before a step; it is aborted before another one perhaps."""

    owner: str
    prompt: int
    new: int
    step: int
    aborted: int | None


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        st.sampled_from(OWNERS),
        st.integers(1, MAX_LEN - 1),
        st.integers(1, MAX_LEN),
        st.integers(0, 40),
        st.one_of(st.none(), st.integers(0, 60)),
    ),
    min_size=1,
    max_size=12,
)
LONGEST_WAIT = len(OWNERS) * MAX_LEN
"""Before an owner's first request starts, one request of each other owner may have to end. Each has so many tokens at
most. The longest wait seen is 28 steps."""


def serve(
    specs: Sequence[KVCacheSpec], arrivals: Sequence[Arrival], spare_slabs: int, prefix_caching: bool
) -> dict[str, int]:
    """Serve requests whose next token is always their length; return each owner's longest wait for a first token."""
    plan = make_plan(*specs, max_model_len=MAX_LEN, max_num_batched_tokens=CHUNK)
    needed = max(plan.num_slabs_for(plan.peak_blocks(min(MAX_LEN, each.prompt + each.new))) for each in arrivals)
    plan = attrs.evolve(plan, num_slabs=needed + spare_slabs)
    manager = KVCacheManager(plan, max_num_seqs=NUM_ROWS, prefix_caching=prefix_caching)
    made: Scheduler[Request] = Scheduler(
        manager, max_num_seqs=NUM_ROWS, max_num_batched_tokens=CHUNK, shared_block_size=4
    )
    to_come = {
        str(index): (
            each,
            Request.create(
                str(index),
                list(range(each.prompt)),
                SamplingParams(max_new_tokens=each.new),
                eos_token_ids=frozenset(),
                max_model_len=MAX_LEN,
                owner=each.owner,
            ),
        )
        for index, each in enumerate(arrivals)
    }
    requests = [each for _, each in to_come.values()]
    waits: dict[str, int] = {}
    waiting_since: dict[str, int] = {}
    for number in range(20_000):
        for arrival, each in list(to_come.values()):
            if arrival.step <= number:
                del to_come[each.request_id]
                if all(other.owner != each.owner for other in [*made.waiting, *made.running]):
                    waiting_since[each.owner] = number
                made.add(each)
        for arrival, each in zip(arrivals, requests, strict=True):
            if arrival.aborted == number and each.request_id not in to_come:
                made.end(each, "aborted")
        step = made.schedule()
        if step is None:
            if not to_come:
                break
            continue
        generated = made.complete(step, step.num_known[step.generating].tolist())
        with_requests = {each.owner for each in [*made.waiting, *made.running, *generated]}
        for owner in [*waiting_since]:
            if owner not in with_requests:
                del waiting_since[owner]
            elif any(each.owner == owner for each in generated):
                waits[owner] = max(waits.get(owner, 0), number - waiting_since.pop(owner))
    for arrival, each in zip(arrivals, requests, strict=True):
        assert list(range(len(each.token_ids))) == list(each.token_ids)
        if each.finish_reason == "aborted":
            assert arrival.aborted is not None
        else:
            assert ("length", min(MAX_LEN, arrival.prompt + arrival.new)) == (each.finish_reason, len(each.token_ids))
    assert 0 == manager.num_held_pages
    assert 0 == len(made.waiting) == len(made.running)
    assert not made.waiting.has_several_owners
    assert [0] * len(OWNERS) == [made.waiting.num_running(owner) for owner in OWNERS]
    return waits


@given(
    specs=st.lists(SPECS, min_size=1, max_size=3),
    arrivals=ARRIVALS,
    flood=st.integers(0, 40),
    spare_slabs=st.integers(0, 12),
    prefix_caching=st.booleans(),
)
def test_every_request_ends_with_its_tokens_and_no_owner_waits_for_the_queues_of_others(
    specs: list[KVCacheSpec],
    arrivals: list[Arrival],
    flood: int,
    spare_slabs: int,
    prefix_caching: bool,
) -> None:
    arrivals = [Arrival("a", 3, MAX_LEN, 0, None)] * flood + arrivals
    waits = serve(specs, arrivals, spare_slabs, prefix_caching)
    assert max(waits.values(), default=0) <= LONGEST_WAIT


@pytest.mark.parametrize("flood", [0, 10, 100])
def test_the_wait_for_a_first_token_does_not_depend_on_how_much_the_others_queue(flood: int) -> None:
    arrivals = [Arrival("a", 3, MAX_LEN, 0, None)] * flood + [Arrival("b", 3, 2, 10, None)]
    waits = serve([full()], arrivals, 20, True)
    assert waits["b"] <= 1
