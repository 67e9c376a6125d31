"""The scheduler alone, over a cache that only counts blocks: which requests run when, and that every one ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvframe_engine.requests.progress import NO_INPUTS, NO_SEQUENCES, input_sequences
from kvframe_engine.requests.request import Request, SamplingParams
from kvframe_engine.scheduling.scheduler import Scheduler
from kvframe_engine.scheduling.step import ScheduledStep

from kvframe.cache.input_index import InputSequence
from kvframe.cache.stats import FoundPrefix
from kvframe.contract.errors import SpecError
from kvframe.contract.model import ModelInput

IntArray = npt.NDArray[np.int64]


class CountingCache:
    """Holds ``num_blocks`` blocks of 4 tokens; there are no prefix hits unless ``hits`` names a request."""

    def __init__(self, num_blocks: int = 1000, hits: dict[str, int] | None = None) -> None:
        self.num_free = num_blocks
        self.held: dict[str, int] = {}
        self.names: list[str] = []
        self.token_ids: dict[str, Sequence[int]] = {}
        self.hits = hits or {}
        self.stored_inputs: set[InputSequence] = set()
        self.missing: dict[str, frozenset[str]] = {}
        self.to_store: dict[str, set[InputSequence]] = {}

    def start(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        salt: str = "",
        use_prefix: bool = True,
        inputs: Mapping[str, InputSequence] = NO_SEQUENCES,
        ranges: Sequence[tuple[int, int]] = (),
        num_prompt_tokens: int | None = None,
    ) -> int:
        assert request_id not in self.held
        self.held[request_id] = 0
        self.token_ids[request_id] = token_ids
        self.missing[request_id] = frozenset(name for name, each in inputs.items() if each not in self.stored_inputs)
        self.to_store[request_id] = set(inputs.values())
        return self.hits.get(request_id, 0) if use_prefix else 0

    def found_prefix(self, request_id: str) -> FoundPrefix:
        return FoundPrefix()

    def missing_inputs(self, request_id: str) -> frozenset[str]:
        return self.missing[request_id]

    def has_capacity(self, request_id: str, num_tokens: int) -> bool:
        return -(-num_tokens // 4) - self.held[request_id] <= self.num_free

    def extend(self, request_id: str, num_tokens: int) -> bool:
        wanted = -(-num_tokens // 4) - self.held[request_id]
        if wanted > self.num_free:
            return False
        self.num_free -= max(0, wanted)
        self.held[request_id] += max(0, wanted)
        return True

    def extend_rows(self, rows: IntArray, num_tokens: IntArray) -> bool:
        before = self.num_free, dict(self.held)
        if all(self.extend(self.names[row], count) for row, count in zip(rows, num_tokens.tolist(), strict=True)):
            return True
        self.num_free, self.held = before
        return False

    def commit_rows(self, rows: IntArray, num_computed: IntArray, *, keeps_extended: bool = False) -> None:
        for row, count in zip(rows, num_computed.tolist(), strict=True):
            name = self.names[row]
            assert count <= min(len(self.token_ids[name]), 4 * self.held[name])
            self.stored_inputs |= self.to_store[name]
            self.missing[name] = frozenset()

    def free(self, request_id: str, **hints: Any) -> None:
        self.num_free += self.held.pop(request_id)

    def row(self, request_id: str) -> int:
        if request_id not in self.names:
            self.names.append(request_id)
        return self.names.index(request_id)


class ForkingCache(CountingCache):
    """Forks requests."""

    def fork(self, request_id: str, new_id: str, token_ids: Sequence[int]) -> bool:
        self.held[new_id], self.token_ids[new_id] = self.held[request_id], token_ids
        self.missing[new_id], self.to_store[new_id] = frozenset(), set()
        return True


def request(
    name: str,
    num_prompt_tokens: int,
    max_new_tokens: int = 4,
    first: int | None = None,
    inputs: Mapping[str, ModelInput] = NO_INPUTS,
    salt: str = "",
) -> Request:
    """Return a request whose prompt starts with ``first``; requests share a prefix only if ``first`` is equal."""
    tokens = [crc32(name.encode()) if first is None else first, *range(1, num_prompt_tokens)]
    params = SamplingParams(max_new_tokens=max_new_tokens)
    return Request.create(
        name,
        tokens,
        params,
        eos_token_ids=frozenset(),
        max_model_len=100,
        inputs=inputs,
        input_sequences=input_sequences(inputs),
        cache_salt=salt,
    )


def encoder(key: str, num_tokens: int = 5) -> dict[str, ModelInput]:
    """Return an input for an encoder; inputs with one ``key`` are equal."""
    return {"encoder": ModelInput(num_tokens=num_tokens, key=key.encode(), data=None)}


def scheduler(cache: CountingCache, *requests: Request, seqs: int = 8, tokens: int = 16, shared: int = 0) -> Scheduler:
    made = Scheduler(cache, max_num_seqs=seqs, max_num_batched_tokens=tokens, shared_block_size=shared)
    for each in requests:
        made.add(each)
    return made


def complete(made: Scheduler, step: ScheduledStep) -> None:
    made.complete(step, [7] * len(step.generating))


def run(made: Scheduler, num_steps: int) -> list[dict[str, int]]:
    """Complete steps, and return the tokens of each request in each of them."""
    seen = []
    for _ in range(num_steps):
        step = made.schedule()
        assert step is not None
        names = [each.request_id for each in step.requests]
        seen.append(dict(zip(names, step.num_scheduled.tolist(), strict=True)))
        assert [each.row for each in step.requests] == step.rows.tolist()
        assert [each.num_computed for each in step.requests] == step.num_computed.tolist()
        assert [len(each.token_ids) for each in step.requests] == step.num_known.tolist()
        assert sum(seen[-1].values()) == step.num_tokens
        complete(made, step)
    return seen


def test_nothing_to_do_is_no_step() -> None:
    assert scheduler(CountingCache()).schedule() is None


def test_a_long_prompt_is_computed_in_chunks_and_running_requests_come_first() -> None:
    made = scheduler(CountingCache(), request("a", 3), request("b", 30))
    assert [{"a": 3, "b": 13}, {"a": 1, "b": 15}, {"a": 1, "b": 2}, {"a": 1, "b": 1}] == run(made, 4)


def test_no_more_requests_run_than_allowed() -> None:
    made = scheduler(CountingCache(), request("a", 2, 2), request("b", 2, 3), request("c", 2, 1), seqs=2)
    assert [{"a": 2, "b": 2}, {"a": 1, "b": 1}, {"b": 1, "c": 2}] == run(made, 3)
    assert made.schedule() is None


def test_a_prefix_hit_is_not_computed() -> None:
    made = scheduler(CountingCache(hits={"a": 8}), request("a", 10))
    assert [{"a": 2}, {"a": 1}] == run(made, 2)
    assert (10, 8) == (made.stats.prompt_tokens, made.stats.cached_prompt_tokens)


def test_a_step_ends_at_each_boundary_of_a_prompt() -> None:
    first = request("a", 30)
    first.boundaries = (4, 8, 24)
    made = scheduler(CountingCache(), first, request("b", 9))
    assert [
        {"a": 4, "b": 9},
        {"a": 4, "b": 1},
        {"a": 16},
        {"a": 6, "b": 1},
        {"a": 1, "b": 1},
        {"a": 1},
    ] == run(made, 6)


def test_boundaries_within_a_hit_and_before_a_fork_change_nothing_else() -> None:
    first, second = request("a", 20, first=1), request("b", 20, first=1)
    first.boundaries = second.boundaries = (4, 12)
    first.pause_for_forks(19)
    second.forks_from = first
    made = scheduler(ForkingCache(hits={"a": 8}), first, second)
    assert [{"a": 4}, {"a": 7}, {"a": 1, "b": 1}] == run(made, 3)


def test_requests_that_were_admitted_when_the_cache_breaks_end_and_hold_nothing() -> None:
    cache = CountingCache()
    made = scheduler(cache, request("a", 3), request("b", 5, inputs=encoder("x")), request("c", 2))
    extend = cache.extend

    def break_once(request_id: str, num_tokens: int) -> bool:
        if request_id == "b":
            vars(cache).pop("extend")
            raise AssertionError("the cache is broken")
        return extend(request_id, num_tokens)

    vars(cache)["extend"] = break_once
    with pytest.raises(AssertionError, match="the cache is broken"):
        made.schedule()
    assert ["a"] == [each.request_id for each in made.take_failed()]
    assert (["b", "c"], 0, {}) == ([each.request_id for each in made.waiting], len(made.running), cache.held)
    step = made.schedule()
    assert step is not None
    # The encoder's input belongs to the step that admits its request.
    assert [("b", {"encoder"}), ("c", set())] == [(each.request_id, each.new_inputs) for each in step.admitted]


@pytest.mark.parametrize(
    ("error", "why"),
    [(SpecError("the cache spec lies"), "the cache spec lies"), (KeyboardInterrupt("no"), "KeyboardInterrupt: no")],
    ids=["an error", "an interrupt"],
)
@pytest.mark.parametrize("verb", ["start", "extend", "has_capacity"])
def test_a_request_that_the_cache_cannot_take_in_ends_alone(verb: str, error: BaseException, why: str) -> None:
    cache = CountingCache()
    others = request("a", 3, 1), request("c", 2, 1)
    made = scheduler(cache, others[0], faulty := request("b", 20), others[1])
    ask = getattr(cache, verb)

    def refuse(request_id: str, *args: Any, **options: Any) -> Any:
        if request_id == "b":
            raise error
        return ask(request_id, *args, **options)

    vars(cache)[verb] = refuse
    assert [{"a": 3, "c": 2}] == run(made, 1)
    assert ("error", f"no further token of it can be computed: {why}") == (faulty.finish_reason, faulty.error)
    assert ([faulty], []) == (made.take_failed(), made.take_failed())
    assert (["length", "length"], {}, False) == ([each.finish_reason for each in others], cache.held, made.has_work)


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_running_request_that_gets_no_room_by_an_error_ends_alone(is_alone: bool) -> None:
    cache = CountingCache()
    good, faulty = request("a", 3, 3), request("b", 4, 3)
    made = scheduler(cache, *([faulty] if is_alone else [good, faulty]))
    run(made, 1)
    extend, extend_rows = cache.extend, cache.extend_rows

    def refuse(request_id: str, num_tokens: int) -> bool:
        if request_id == "b":
            raise SpecError("the cache spec lies")
        return extend(request_id, num_tokens)

    def refuse_rows(rows: IntArray, num_tokens: IntArray) -> bool:
        if faulty.row in rows.tolist():
            raise SpecError("the cache spec lies")
        return extend_rows(rows, num_tokens)

    vars(cache).update(extend=refuse, extend_rows=refuse_rows)
    if is_alone:
        assert made.schedule() is None
    else:
        assert [{"a": 1}, {"a": 1}] == run(made, 2)
    assert ([faulty], "error", 5) == (made.take_failed(), faulty.finish_reason, len(faulty.token_ids))
    assert ({}, False) == (cache.held, made.has_work)


def test_a_step_that_nobody_can_schedule_ends_its_requests_and_raises_once() -> None:
    cache = CountingCache(num_blocks=4)
    first, second, third = request("a", 8, 5), request("b", 7, 3), request("c", 3, 1)
    made = scheduler(cache, first, second, third)
    run(made, 1)

    def refuse_once(request_id: str, **hints: object) -> None:
        del vars(cache)["free"]
        raise KeyError(request_id)

    vars(cache)["free"] = refuse_once
    with pytest.raises(KeyError):
        made.schedule()
    assert [first, second] == made.take_failed()
    assert {"the step that was to compute it failed"} == {first.error, second.error}
    assert [{"c": 3}] == run(made, 1)
    assert ({}, False) == (cache.held, made.has_work)


@pytest.mark.parametrize("frees", [True, False])
def test_an_outcome_that_the_cache_cannot_note_ends_the_step_and_raises_once(frees: bool) -> None:
    cache = CountingCache()
    first, second, third = request("a", 8, 5), request("b", 8, 3), request("c", 3, 1)
    made = scheduler(cache, first, second, third)
    step = made.schedule()
    assert step is not None
    commit_rows, free = cache.commit_rows, cache.free

    def refuse(*arguments: object, **options: object) -> None:
        raise KeyError("rows")

    def refuse_to_free(request_id: str) -> None:
        raise KeyError(request_id)

    vars(cache)["commit_rows"] = refuse
    if not frees:
        vars(cache)["free"] = refuse_to_free
    with pytest.raises(KeyError, match="rows"):
        complete(made, step)
    assert ([first, second], {"error"}) == (made.take_failed(), {first.finish_reason, second.finish_reason})
    vars(cache).update(commit_rows=commit_rows, free=free)
    assert [{"c": 3}] == run(made, 1)
    assert not made.has_work


def test_the_request_admitted_last_is_preempted_and_computed_again() -> None:
    cache = CountingCache(num_blocks=4)
    first, second = request("a", 8, 5), request("b", 7, 3)
    made = scheduler(cache, first, second)
    # Both hold 2 blocks; the ninth token of "a" needs a third.
    assert [{"a": 8, "b": 7}, {"a": 1}, {"a": 1}, {"a": 1}, {"a": 1}] == run(made, 5)
    assert 1 == made.stats.preemptions
    # The prompt and the token generated before the preemption, then the rest.
    assert [{"b": 8}, {"b": 1}] == run(made, 2)
    assert "length" == second.finish_reason
    assert (4, {}) == (cache.num_free, cache.held)


def test_a_preempted_request_goes_before_those_that_came_later() -> None:
    made = scheduler(CountingCache(num_blocks=4), request("a", 8, 5), request("b", 7, 3), request("c", 1, 1), seqs=2)
    run(made, 5)
    assert ["b", "c"] == list(run(made, 1)[0])


def test_a_prompt_in_parts_begins_when_there_is_room_for_all_of_it() -> None:
    made = scheduler(CountingCache(num_blocks=6), request("a", 8, 4), request("b", 17, 1), tokens=8)
    # "a" holds up to 3 of the 6 blocks, and "b" takes 5.
    assert [{"a": 8}, {"a": 1}, {"a": 1}, {"a": 1}, {"b": 8}, {"b": 8}, {"b": 1}] == run(made, 7)
    assert 0 == made.stats.preemptions


def test_what_was_preempted_does_not_start_again_in_the_same_step() -> None:
    made = scheduler(CountingCache(num_blocks=5), request("a", 8, 8), request("b", 8, 8), tokens=8)
    # The ninth token of "b" has no block. Its first seven tokens would have two, but the eighth would be preempted.
    assert [{"a": 8}, {"a": 1, "b": 7}, {"a": 1, "b": 1}, {"a": 1}] == run(made, 4)
    assert 1 == made.stats.preemptions


class AskedCache(CountingCache):
    """Records the rows of each batch, and refuses calls for single requests."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, list[int], list[int]]] = []

    def extend_rows(self, rows: IntArray, num_tokens: IntArray) -> bool:
        self.asked.append(("extend", rows.tolist(), num_tokens.tolist()))
        return True

    def commit_rows(self, rows: IntArray, num_computed: IntArray, *, keeps_extended: bool = False) -> None:
        self.asked.append(("commit", rows.tolist(), num_computed.tolist()))


def test_a_step_asks_the_cache_once_for_all_that_run() -> None:
    cache = AskedCache()
    made = scheduler(cache, request("a", 4), request("b", 5), request("c", 3, 1), request("d", 2))
    run(made, 1)
    cache.asked.clear()
    run(made, 1)
    assert [("extend", [0, 1, 3], [5, 6, 3]), ("commit", [0, 1, 3], [5, 6, 3])] == cache.asked


class UncopiedCache(CountingCache):
    """Fails once to copy a page that "b" shares with others."""

    failing = True

    def extend(self, request_id: str, num_tokens: int) -> bool:
        if self.failing and request_id == "b" and num_tokens > 4:
            raise RuntimeError("the copy failed")
        return super().extend(request_id, num_tokens)


def test_a_request_for_which_nothing_can_be_copied_is_computed_again() -> None:
    cache = UncopiedCache()
    made = scheduler(cache, request("a", 4), request("b", 4), request("c", 4))
    run(made, 1)
    step = made.schedule()
    assert step is not None
    assert (["a", "c"], 1) == ([each.request_id for each in step.requests], made.stats.preemptions)
    complete(made, step)
    cache.failing = False
    assert [{"a": 1, "c": 1, "b": 5}] == run(made, 1)


class ScatteredCache(CountingCache):
    """The blocks of a prefix hit are so placed that a request with a hit gets at most ``most`` tokens."""

    def __init__(self, hits: dict[str, int], most: int) -> None:
        super().__init__(hits=hits)
        self.most = most
        self.took_hit: set[str] = set()

    def start(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        salt: str = "",
        use_prefix: bool = True,
        inputs: Mapping[str, InputSequence] = NO_SEQUENCES,
        ranges: Sequence[tuple[int, int]] = (),
        num_prompt_tokens: int | None = None,
    ) -> int:
        found = super().start(request_id, token_ids, salt=salt, use_prefix=use_prefix, inputs=inputs)
        self.took_hit = self.took_hit | {request_id} if found else self.took_hit - {request_id}
        return found

    def extend(self, request_id: str, num_tokens: int) -> bool:
        return (request_id not in self.took_hit or num_tokens <= self.most) and super().extend(request_id, num_tokens)


def test_a_lone_request_that_cannot_start_from_a_prefix_starts_from_nothing_and_runs_alone() -> None:
    made = scheduler(ScatteredCache({"a": 8}, most=8), request("a", 9, 3), request("b", 9, 1))
    assert [{"a": 9}, {"a": 1}, {"a": 1}, {"b": 9}] == run(made, 4)


def test_a_lone_request_that_cannot_go_on_starts_from_nothing_in_the_same_step() -> None:
    made = scheduler(ScatteredCache({"a": 8}, most=10), request("a", 9, 4), request("b", 20, 1), seqs=1)
    assert [{"a": 1}, {"a": 1}, {"a": 11}, {"a": 1}, {"b": 16}] == run(made, 5)
    assert 1 == made.stats.preemptions


def test_a_request_that_runs_alone_waits_until_the_others_are_done() -> None:
    waiting = request("b", 4)
    made = scheduler(CountingCache(), request("a", 4, 2), waiting)
    waiting.runs_alone = True
    assert [{"a": 4}, {"a": 1}, {"b": 4}] == run(made, 3)


def test_a_request_waits_one_step_for_a_prefix_that_is_being_computed() -> None:
    made = scheduler(CountingCache(), request("a", 9, first=1), request("b", 9, first=1), request("c", 3), shared=4)
    assert [{"a": 9}, {"a": 1, "b": 9, "c": 3}] == run(made, 2)


def test_a_request_does_not_wait_for_what_is_cached_already() -> None:
    first, second = request("a", 13, first=1), request("b", 13, first=1)
    second.token_ids[9] = 99
    made = scheduler(CountingCache(hits={"a": 8, "b": 8}), first, second, shared=4)
    assert [{"a": 5, "b": 5}] == run(made, 1)


def test_a_request_does_not_wait_for_the_block_of_its_last_token() -> None:
    first, second = request("a", 12, first=1), request("b", 8, first=1)
    made = scheduler(CountingCache(hits={"a": 4, "b": 4}), first, second, shared=4)
    assert [{"a": 8, "b": 4}] == run(made, 1)


def test_a_request_that_shares_less_than_a_block_does_not_wait() -> None:
    made = scheduler(CountingCache(), request("a", 8, first=1), request("b", 8, first=2), shared=4)
    assert [{"a": 8, "b": 8}] == run(made, 1)


def test_ending_a_request_frees_it_whether_it_runs_or_waits() -> None:
    cache = CountingCache(num_blocks=4)
    running, waiting = request("a", 8), request("b", 8)
    made = scheduler(cache, running, waiting, seqs=1)
    run(made, 1)
    for each in (running, waiting, running):
        made.end(each, "aborted")
    assert not made.has_work
    assert (4, "aborted", "aborted") == (cache.num_free, running.finish_reason, waiting.finish_reason)


def test_a_failed_step_ends_its_requests_and_no_other() -> None:
    cache = CountingCache(num_blocks=4)
    running, waiting = request("a", 8), request("b", 8)
    made = scheduler(cache, running, waiting, seqs=1)
    step = made.schedule()
    assert step is not None
    assert [running] == made.fail(step, "broken")
    assert ("error", "broken", None) == (running.finish_reason, running.error, waiting.finish_reason)
    assert 4 == cache.num_free
    assert [{"b": 8}] == run(made, 1)


def test_a_request_without_a_token_ends_with_an_error() -> None:
    only = request("a", 3)
    made = scheduler(CountingCache(), only)
    step = made.schedule()
    assert step is not None
    made.complete(step, [-1])
    assert ("error", 3) == (only.finish_reason, len(only.token_ids))
    assert not made.has_work


def test_a_request_on_a_prefix_is_computed_again_without_before_it_fails() -> None:
    each, other = request("a", 9), request("b", 4)
    cache = CountingCache(hits={"a": 8})
    made = scheduler(cache, other, each)
    step = made.schedule()
    assert step is not None
    assert [other] == made.complete(step, [7, -1])
    assert (1, None, [each]) == (made.stats.retries, each.finish_reason, list(made.waiting))
    step = made.schedule()
    assert step is not None
    assert [1, 9] == step.num_scheduled.tolist()
    made.complete(step, [7, -1])
    assert (1, "error") == (made.stats.retries, each.finish_reason)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=8),
    spare_blocks=st.integers(0, 6),
    seqs=st.integers(1, 4),
    tokens=st.integers(1, 40),
    shared=st.sampled_from([0, 4]),
)
def test_every_request_ends_in_turn_and_every_block_comes_back(
    lengths: list[tuple[int, int]], spare_blocks: int, seqs: int, tokens: int, shared: int
) -> None:
    num_blocks = max(-(-(prompt + new) // 4) for prompt, new in lengths) + spare_blocks
    cache = CountingCache(num_blocks)
    requests = [request(str(index), prompt, new, first=0) for index, (prompt, new) in enumerate(lengths)]
    made = scheduler(cache, *requests, seqs=seqs, tokens=tokens, shared=shared)
    started: list[str] = []
    for _ in range(5000):
        step = made.schedule()
        if step is None:
            break
        assert 0 < step.num_tokens <= tokens
        assert len(step.requests) <= len(made.running) <= seqs
        assert len(set(map(id, step.requests))) == len(step.requests)
        started += [each.request_id for each in step.admitted if each.request_id not in started]
        complete(made, step)
    assert not made.has_work
    # First come, first served.
    assert [each.request_id for each in requests] == started
    assert [prompt + new for prompt, new in lengths] == [len(each.token_ids) for each in requests]
    assert (num_blocks, {}) == (cache.num_free, cache.held)


# --- inputs beside a request's tokens ---------------------------------------------------------------------------------


def test_a_request_waits_one_step_for_an_input_that_is_being_computed() -> None:
    requests = [request(name, 2, inputs=encoder("one")) for name in "abc"]
    made = scheduler(CountingCache(), *requests, shared=4)
    assert [{"a": 2}, {"a": 1, "b": 2, "c": 2}] == run(made, 2)
    assert 5 == made.stats.computed_input_tokens


def test_a_request_with_another_input_does_not_wait_though_its_tokens_are_the_same() -> None:
    requests = [request(name, 6, first=1, inputs=encoder(name)) for name in "ab"]
    made = scheduler(CountingCache(), *requests, shared=4)
    assert [{"a": 6, "b": 6}] == run(made, 1)
    assert 10 == made.stats.computed_input_tokens


def test_a_request_waits_for_the_tokens_of_one_with_an_equal_input() -> None:
    cache = CountingCache()
    requests = [request(name, 6, first=1, inputs=encoder("one")) for name in "ab"]
    cache.stored_inputs |= {*requests[0].input_sequences.values()}
    assert [{"a": 6}, {"a": 1, "b": 6}] == run(scheduler(cache, *requests, shared=4), 2)


def test_nobody_waits_where_nothing_is_shared() -> None:
    requests = [request(name, 2, inputs=encoder("one")) for name in "ab"]
    assert [{"a": 2, "b": 2}] == run(scheduler(CountingCache(), *requests), 1)


def test_a_step_computes_as_many_tokens_of_inputs_as_of_requests_or_a_single_longer_input() -> None:
    lengths = {"a": 20, "b": 10, "c": 6, "d": 1}
    requests = [request(name, 1, 2, inputs=encoder(name, length)) for name, length in lengths.items()]
    made = scheduler(CountingCache(), *requests, tokens=16)
    assert [{"a": 1}, {"a": 1, "b": 1, "c": 1}, {"b": 1, "c": 1, "d": 1}] == run(made, 3)


def test_what_a_request_computes_of_its_inputs_is_said_of_the_step_alone() -> None:
    each = request("a", 20, inputs=encoder("one"))
    made = scheduler(CountingCache(), each)
    step = made.schedule()
    assert step is not None
    assert frozenset({"encoder"}) == each.new_inputs
    made.complete(step, [])
    assert frozenset() == each.new_inputs


def test_a_request_that_is_preempted_brings_its_input_again() -> None:
    cache = CountingCache(num_blocks=4)
    made = scheduler(cache, request("a", 8, 5), request("b", 7, 3, inputs=encoder("one")))
    run(made, 1)
    cache.stored_inputs.clear()
    run(made, 6)
    assert (1, 10) == (made.stats.preemptions, made.stats.computed_input_tokens)
