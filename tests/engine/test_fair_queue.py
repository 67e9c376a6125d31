"""The order of waiting requests: the owner with the fewest running requests is next; equal owners take turns."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kvframe_engine.requests.request import Request, SamplingParams
from kvframe_engine.scheduling.fair_queue import FairQueue


def request(name: str) -> Request:
    """Return a request of the owner that the first letter names."""
    params = SamplingParams()
    return Request.create(name, [1], params, eos_token_ids=frozenset(), max_model_len=100, owner=name[0])


def queue_of(*names: str) -> FairQueue[Request]:
    queue: FairQueue[Request] = FairQueue()
    for name in names:
        queue.append(request(name))
    return queue


def take(queue: FairQueue[Request]) -> Request:
    first = queue.first
    queue.take(first)
    return first


def taken(queue: FairQueue[Request]) -> list[str]:
    """Return the names in the order in which the queue gives all of them."""
    return [take(queue).request_id for _ in range(len(queue))]


def test_requests_of_one_owner_come_in_the_order_of_their_arrival() -> None:
    assert ["a1", "a2", "a3"] == taken(queue_of("a1", "a2", "a3"))


def test_owners_take_turns() -> None:
    assert ["a1", "b1", "c1", "a2", "b2", "a3"] == taken(queue_of("a1", "a2", "a3", "b1", "b2", "c1"))


def test_the_owner_with_the_fewest_running_requests_is_the_next() -> None:
    queue = queue_of("a1", "a2", "a3")
    running = [take(queue) for _ in range(2)]
    for name in ("b1", "b2", "b3"):
        queue.append(request(name))
    assert ["b1", "b2"] == [take(queue).request_id for _ in range(2)]
    for each in running:
        queue.note_stop(each)
    assert ["a3", "b3"] == taken(queue)


def test_a_request_that_is_not_ready_lets_others_go_first() -> None:
    queue = queue_of("a1", "a2", "a3", "b1", "b2")
    assert "a2" == getattr(queue.first_of(lambda each: each.request_id != "a1"), "request_id", "")
    other = queue.first_of(lambda each: each.owner == "b")
    assert other is not None
    queue.take(other)
    assert ("a1", None) == (queue.first.request_id, queue.first_of(lambda each: False))
    assert ["a1", "b2", "a2", "a3"] == taken(queue)


def test_a_preempted_request_comes_before_the_others_of_its_owner() -> None:
    queue = queue_of("a1", "a2", "b1")
    preempted = take(queue)
    queue.note_stop(preempted)
    queue.appendleft(preempted)
    assert ["a1", "b1", "a2"] == taken(queue)


def test_an_owner_without_requests_is_forgotten() -> None:
    queue = queue_of("a1", "b1")
    assert queue.has_several_owners
    queue.note_stop(take(queue))
    assert not queue.has_several_owners
    assert ["b1"] == [each.request_id for each in queue]


def test_an_owner_that_only_runs_counts() -> None:
    queue = queue_of("a1")
    take(queue)
    assert not queue.has_several_owners
    queue.append(request("b1"))
    assert queue.has_several_owners


@given(st.data())
def test_it_serves_as_a_scan_of_all_owners_would(data: st.DataObject) -> None:
    queue: FairQueue[Request] = FairQueue()
    waiting: list[Request] = []
    running: list[Request] = []
    for number in range(data.draw(st.integers(0, 30))):
        verb = data.draw(st.sampled_from(["append", "take", "remove", "stop", "preempt"]))
        if verb == "append":
            waiting.append(request(f"{data.draw(st.sampled_from('abc'))}{number}"))
            queue.append(waiting[-1])
        elif verb == "take" and waiting:
            counts = {each.owner: sum(other.owner == each.owner for other in running) for each in waiting}
            first = take(queue)
            assert min(counts.values()) == counts[first.owner]
            assert first is next(each for each in waiting if each.owner == first.owner)
            waiting.remove(first)
            running.append(first)
        elif verb == "remove" and waiting:
            queue.remove(waiting.pop(data.draw(st.integers(0, len(waiting) - 1))))
        elif running:
            stopped = running.pop(data.draw(st.integers(0, len(running) - 1)))
            queue.note_stop(stopped)
            if verb == "preempt":
                queue.appendleft(stopped)
                waiting.insert(0, stopped)
        assert len(waiting) == len(queue)
        assert {each.request_id for each in waiting} == {each.request_id for each in queue}
        assert (len({each.owner for each in [*waiting, *running]}) > 1) == queue.has_several_owners
