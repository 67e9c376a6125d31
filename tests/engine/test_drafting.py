"""How many drafts a request gets, what the scheduler does with them, and a proposer that fails."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvframe_engine.contract import DraftRequest, Proposer
from kvframe_engine.requests.request import Request, SamplingParams
from kvframe_engine.scheduling import drafting
from kvframe_engine.scheduling.drafting import Drafting
from kvframe_engine.scheduling.pace import MAX_PAUSE, Pace
from kvframe_engine.scheduling.scheduler import Scheduler
from kvframe_engine.scheduling.step import PackedStep, ScheduledStep

from tests.engine.test_scheduler import CountingCache


@attrs.define(kw_only=True, eq=False)
class Counting(Proposer):
    """Proposes the numbers after a request's last token; the first ``num_right`` of a step are what it generates."""

    name = "counting"
    answers: Any = None
    asked: list[list[DraftRequest]] = attrs.field(factory=list)
    forgotten: list[str] = attrs.field(factory=list)

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        self.asked.append(list(requests))
        if self.answers is not None:
            answer: Sequence[Sequence[int]] = self.answers(requests)
            return answer
        return [[each.token_ids[-1] + 1 + place for place in range(each.max_drafts)] for each in requests]

    def forget(self, request_ids: Sequence[str]) -> None:
        self.forgotten += request_ids


def request(name: str, prompt: int = 3, new: int = 20, **options: Any) -> Request:
    return Request.create(
        name,
        range(1, prompt + 1),
        SamplingParams(max_new_tokens=new, **options),
        eos_token_ids=frozenset(),
        max_model_len=99,
    )


def scheduler(
    proposer: Proposer, num_blocks: int = 1000, budget: int = 64, max_num_seqs: int = 8
) -> tuple[Scheduler[Request], CountingCache]:
    cache = CountingCache(num_blocks)
    drafting: Drafting[Request] = Drafting(proposer, vocab_size=None, max_num_seqs=max_num_seqs)
    return Scheduler(cache, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, drafting=drafting), cache


def compute(step: ScheduledStep[Request], num_right: int = 99) -> Sequence[Any]:
    """Return what a model that counts on gives: after token ``n`` comes ``n + 1``; so many drafts are accepted."""
    generating = step.generating.tolist()
    if not step.drafts:
        return [step.requests[place].token_ids[-1] + 1 for place in generating]
    runs = []
    for place in generating:
        num_accepted = min(num_right, len(step.drafts[place]))
        first = step.requests[place].token_ids[-1] + 1
        runs.append(list(range(first, first + num_accepted + 1)))
    return runs


def run_step(scheduled: Scheduler[Request], num_right: int = 99) -> ScheduledStep[Request]:
    step = scheduled.schedule()
    assert step is not None
    scheduled.complete(step, compute(step, num_right))
    return step


# --- the pace ---------------------------------------------------------------------------------------------------------


def test_a_request_begins_with_all_drafts_and_doubles_them_while_all_are_accepted() -> None:
    proposer = Counting(max_drafts=8)
    scheduled, _ = scheduler(proposer)
    scheduled.add(request("a", new=60))
    # A prompt's step has no drafts. Of the first drafts four are accepted, later all.
    found = [run_step(scheduled, num_right).drafts for num_right in (0, 4, 99, 99)]
    assert [0, 8, 4, 8] == [len(each[0]) if each else 0 for each in found]


@pytest.mark.parametrize(("num_requests", "num_first"), [(1, 8), (4, 8), (5, 6), (16, 2), (40, 1)])
def test_requests_begin_with_fewer_drafts_if_many_of_them_generate(num_requests: int, num_first: int) -> None:
    proposer = Counting(max_drafts=8)
    scheduled, _ = scheduler(proposer, budget=1024, max_num_seqs=num_requests)
    for number in range(num_requests):
        scheduled.add(request(str(number)))
    run_step(scheduled)
    step = run_step(scheduled)
    assert num_requests * [num_first] == [len(each) for each in step.drafts]
    assert num_requests * [1 + num_first] == step.num_scheduled.tolist()


@pytest.mark.parametrize(("num_requests", "pauses"), [(1, [1, 2, 4]), (16, [4, 8, 16]), (24, [9, 18, 32])])
def test_requests_pause_longer_if_many_of_them_generate(
    num_requests: int, pauses: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "MAX_SHARE_NEEDED", 0)  # no draft is tried first
    proposer = Counting(max_drafts=1)
    scheduled, _ = scheduler(proposer, budget=1024, max_num_seqs=num_requests)
    for number in range(num_requests):
        scheduled.add(request(str(number), new=80))
    run_step(scheduled)
    has_drafts = [bool(run_step(scheduled, num_right=0).drafts) for _ in range(sum(pauses) + 4)]
    expected = [True]
    for pause in pauses:
        expected += [*pause * [False], True]
    assert expected == has_drafts


@attrs.define
class Guess:
    """Answers of a proposer, all wrong until it is told to be right."""

    is_right: bool = False

    def __call__(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [[each.token_ids[-1] + (1 if self.is_right else 9)] for each in requests]

    def drafts_in(self, scheduled: Scheduler[Request], num_steps: int) -> list[int]:
        """Return the steps, counted from the first one of the scheduler, that have drafts."""
        found = []
        for _ in range(num_steps):
            step = run_step(scheduled, num_right=99 if self.is_right else 0)
            if step.drafts:
                assert scheduled._drafting is not None
                found.append(scheduled._drafting._num_steps)
        return found


def guessing(num_requests: int, guess: Guess) -> Scheduler[Request]:
    """Return a scheduler whose requests have computed their prompts, and got their first drafts."""
    scheduled, _ = scheduler(Counting(max_drafts=1, answers=guess), budget=1024, max_num_seqs=num_requests)
    for number in range(num_requests):
        scheduled.add(request(str(number), new=90))
    assert [2] == guess.drafts_in(scheduled, 2)
    return scheduled


def test_if_many_drafts_were_wrong_requests_get_some_after_right_ones_that_were_only_tried() -> None:
    guess = Guess()
    scheduled = guessing(24, guess)
    assert [] == guess.drafts_in(scheduled, 34)  # up to step 36
    guess.is_right = True
    # The draft that was tried in step 32 was wrong, so the next one is tried in step 66. Three right ones are enough:
    # then most of the latest drafts were right.
    assert [69, 70, 71] == guess.drafts_in(scheduled, 35)


def test_a_tried_draft_waits_for_its_token() -> None:
    pace = Pace(1, tried=(2, 7))
    assert [None, True, None] == [pace.compare(tokens) for tokens in ([5, 6], [5, 6, 7], [5, 6, 7])]


def test_drafts_of_a_draft_model_are_not_tried() -> None:
    scheduled = guessing(16, Guess())
    chosen: Any = scheduled._drafting
    assert drafting.NUM_TRIES == chosen._num_tries()
    chosen.continue_requests = lambda *_: []
    assert 0 == chosen._num_tries()


def test_only_some_steps_have_drafts_while_many_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    guess = Guess(is_right=True)
    scheduled = guessing(16, guess)
    monkeypatch.setattr(Drafting, "_num_tries", lambda _: 3)  # as if many were wrong
    assert [8, 16, 24, 32] == guess.drafts_in(scheduled, 30)


@pytest.mark.parametrize(("num_requests", "share"), [(4, 0.5), (5, 0.6), (8, 0.75), (99, 0.75)])
def test_the_more_requests_generate_the_more_drafts_have_to_be_right(num_requests: int, share: float) -> None:
    chosen: Any = scheduler(Counting(max_drafts=1))[0]._drafting
    chosen._num_generating = num_requests
    found = []
    for chosen._share_right in (share - 0.01, share):
        found.append(chosen._num_tries())
    assert [3, 0] == found


def test_requests_begin_with_one_draft_if_many_were_wrong() -> None:
    scheduled, _ = scheduler(Counting(max_drafts=4))
    chosen: Any = scheduled._drafting
    chosen._share_right = 0.0
    for number in range(4):
        scheduled.add(request(str(number), new=40))
    found = [run_step(scheduled).drafts for _ in range(8)]
    # First come the prompts, then three steps with tried drafts. These are right, so the next step has drafts.
    assert [[], [], [], [], 4 * [1]] == [[len(each) for each in drafts] for drafts in found[:5]]


@pytest.mark.parametrize("num_requests", [1, 2])
def test_few_requests_get_drafts_that_were_not_tried(num_requests: int) -> None:
    guess = Guess()
    assert [4, 7, 12, 21] == guess.drafts_in(guessing(num_requests, guess), 20)


@pytest.mark.parametrize(("num_requests", "most"), [(1, 0), (8, 0), (16, 3), (32, 15)])
def test_requests_without_drafts_are_asked_about_more_seldom_if_many_generate(num_requests: int, most: int) -> None:
    proposer = Counting(max_drafts=4, answers=lambda requests: [()] * len(requests))
    scheduled, _ = scheduler(proposer, budget=1024, max_num_seqs=num_requests)
    for number in range(num_requests):
        scheduled.add(request(str(number), new=80))
    run_step(scheduled)
    waits = [min(each, most) for each in (0, 1, 3, 7, 15)]
    for wait in waits:
        before = len(proposer.asked)
        for _ in range(1 + wait):
            run_step(scheduled)
        assert before + 1 == len(proposer.asked)
        assert num_requests == len(proposer.asked[-1])


def test_few_requests_without_drafts_are_asked_about_more_seldom_if_many_drafts_were_wrong() -> None:
    proposer = Counting(max_drafts=4, answers=lambda requests: [()] * len(requests))
    scheduled, _ = scheduler(proposer)
    chosen: Any = scheduled._drafting
    chosen._share_right = 0.0
    for number in range(4):
        scheduled.add(request(str(number), new=40))
    asked = []
    for _ in range(33):
        before = len(proposer.asked)
        run_step(scheduled)
        asked += [chosen._num_steps] * (len(proposer.asked) - before)
    # It waits for 0, 1, 3, 7, 8 and again 8 steps.
    assert [2, 3, 5, 9, 17, 26] == asked


def test_a_pause_ends_with_the_request_and_when_it_is_admitted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = Counting(max_drafts=4)
    scheduled, cache = scheduler(proposer, max_num_seqs=1)

    def row_of(request_id: str) -> int:
        cache.names = [request_id]
        return 0

    monkeypatch.setattr(cache, "row", row_of)
    scheduled.add(request("a", new=11))
    scheduled.add(request("b"))
    # "a" pauses for four steps after its third rejection, and ends in the fourth of them. "b" then gets its row.
    found = [bool(run_step(scheduled, num_right=0).drafts) for _ in range(15)]
    assert [1, 3, 6, 12, 14] == [place for place, has_drafts in enumerate(found) if has_drafts]
    assert ["a", "a", "a", "b", "b"] == [asked[0].request_id for asked in proposer.asked]
    scheduled.preempt_last()
    found = [bool(run_step(scheduled, num_right=0).drafts) for _ in range(2)]
    assert [False, True] == found


def test_nothing_of_requests_that_wait_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduled, _ = scheduler(Counting(max_drafts=1), budget=1024, max_num_seqs=16)
    for number in range(16):
        scheduled.add(request(str(number), new=80))
    for _ in range(2):
        run_step(scheduled, num_right=0)

    def fail(self: Request) -> int:
        raise AssertionError("it waits")

    monkeypatch.setattr(Request, "num_final_tokens", property(fail))
    monkeypatch.setattr(Drafting, "_counts", fail)
    assert 4 * [()] == [run_step(scheduled).drafts for _ in range(4)]


def test_after_a_rejection_a_request_gets_as_many_drafts_as_were_accepted() -> None:
    pace = Pace(num_drafts=8)
    assert 0 == pace.learn(8, 4, max_drafts=8)
    assert 4 == pace.num_drafts
    pace.learn(3, 3, max_drafts=8)
    assert 6 == pace.num_drafts


def test_a_request_pauses_if_fewer_than_half_of_its_drafts_are_accepted() -> None:
    pace = Pace(num_drafts=8)
    assert 1 == pace.learn(8, 3, max_drafts=8)
    assert 3 == pace.num_drafts


def test_a_request_whose_drafts_are_wrong_pauses_longer_each_time() -> None:
    proposer = Counting(max_drafts=4)
    scheduled, _ = scheduler(proposer)
    scheduled.add(request("a", new=60))
    found = [bool(run_step(scheduled, num_right=0).drafts) for _ in range(16)]
    assert [place for place, has_drafts in enumerate(found) if has_drafts] == [1, 3, 6, 11]
    pace = Pace(4)
    waits = [pace.learn(1, 0, max_drafts=4) for _ in range(20)]
    assert MAX_PAUSE == waits[-1]
    pace.learn(1, 1, max_drafts=4)
    assert 1 == pace.pause


# --- what the scheduler does ------------------------------------------------------------------------------------------


def test_accepted_drafts_and_the_token_after_them_are_taken_and_rejected_ones_are_computed_again() -> None:
    scheduled, _ = scheduler(Counting(max_drafts=2))
    served = request("a")
    scheduled.add(served)
    run_step(scheduled)
    step = run_step(scheduled, num_right=1)
    assert [[5, 6]] == step.drafts
    assert [3] == step.num_scheduled.tolist()
    assert [1, 2, 3, 4, 5, 6] == list(served.token_ids)
    assert 5 == served.num_computed
    assert (2, 1) == (scheduled.stats.draft_tokens, scheduled.stats.accepted_draft_tokens)
    assert 3 == scheduled.stats.generated_tokens


def test_drafts_never_exceed_what_a_request_may_generate() -> None:
    scheduled, _ = scheduler(Counting(max_drafts=8))
    served = request("a", new=4)
    scheduled.add(served)
    while scheduled.has_work:
        run_step(scheduled)
    assert ("length", [1, 2, 3, 4, 5, 6, 7]) == (served.finish_reason, list(served.token_ids))


def test_a_request_ends_at_a_stop_token_among_its_drafts() -> None:
    proposer = Counting(max_drafts=2)
    scheduled, cache = scheduler(proposer)
    served, other = request("a", stop_token_ids=(6,)), request("b")
    scheduled.add(served)
    scheduled.add(other)
    run_step(scheduled)
    run_step(scheduled)
    assert ("stop", [1, 2, 3, 4, 5, 6]) == (served.finish_reason, list(served.token_ids))
    assert [1, 2, 3, 4, 5, 6, 7] == list(other.token_ids)
    assert ["a"] == proposer.forgotten
    assert ["b"] == list(cache.held)


def test_drafts_take_what_the_budget_has_left() -> None:
    proposer = Counting(max_drafts=4)
    scheduled, _ = scheduler(proposer, budget=8)
    for name in "abc":
        scheduled.add(request(name, prompt=2))
    run_step(scheduled)
    scheduled.add(request("d", prompt=4))
    step = run_step(scheduled)
    # Three decodes and the new prompt's four tokens come first; one token is left.
    assert [1, 0, 0, 0] == [len(each) for each in step.drafts]
    assert 8 == step.num_tokens == int(step.num_scheduled.sum())


def test_drafts_preempt_nobody_and_take_no_blocks_that_are_not_free() -> None:
    # Two requests of three tokens hold a block of four each; the pool has no third.
    scheduled, cache = scheduler(Counting(max_drafts=4), num_blocks=2)
    for name in "ab":
        scheduled.add(request(name, prompt=3, new=4))
    run_step(scheduled)
    step = run_step(scheduled)
    assert () == step.drafts
    assert (0, 0) == (scheduled.stats.preemptions, cache.num_free)


def test_a_prompt_gets_no_drafts() -> None:
    proposer = Counting(max_drafts=2)
    scheduled, _ = scheduler(proposer, budget=4)
    scheduled.add(request("a", prompt=8))
    assert [(), ()] == [run_step(scheduled).drafts for _ in range(2)]
    assert [] == proposer.asked
    assert [[10, 11]] == run_step(scheduled).drafts


def test_the_first_step_of_a_request_has_no_drafts_because_no_state_is_before_it() -> None:
    proposer = Counting(max_drafts=4)
    scheduled, _ = scheduler(proposer)
    scheduled.add(request("a", prompt=1))
    assert () == run_step(scheduled).drafts
    assert [] == proposer.asked


def test_drafts_keep_to_their_requests_and_rows_of_logits_when_a_step_is_packed_in_another_order() -> None:
    requests = [request("a"), request("b"), request("c", prompt=9, prompt_logprobs=True)]
    step = ScheduledStep(
        requests,
        [],
        rows=np.array([0, 1, 2]),
        num_computed=np.array([4, 7, 0]),
        num_known=np.array([5, 8, 9]),
        num_scheduled=np.array([1, 3, 4]),
        num_tokens=8,
        drafts=[[], [30, 31], []],
    )
    plain = PackedStep.of(step, lambda query_lens: None)
    # Row 0 is that of the first request, 1 to 3 are those of the second one, and four of the third one's prompt follow.
    assert ([0, 1, 2, 3], [0, 2, 0]) == (plain.sampled.tolist(), [len(drafts) for drafts in plain.drafts])
    packed = PackedStep.of(step, lambda query_lens: np.array([1, 2, 0]))
    assert ([[30, 31], [], []], requests[1]) == (packed.drafts, packed.requests[0])
    assert ([0, 1, 2, 7], [1, 0]) == (packed.sampled.tolist(), list(packed.sampled_order))  # type: ignore[call-overload]
    assert [3, 4, 5, 6] == packed.prompt_rows()[0].tolist()


@pytest.mark.parametrize("fails_at", ["propose", "forget"])
def test_a_proposer_that_raises_is_set_aside_and_requests_go_on(
    fails_at: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer = Counting(max_drafts=4)

    def fail(self: Any, _: Any) -> Any:
        raise RuntimeError("no more guesses")

    monkeypatch.setattr(Counting, fails_at, fail)
    scheduled, _ = scheduler(proposer)
    for name, new in (("a", 3), ("b", 30)):
        scheduled.add(request(name, new=new))
    with caplog.at_level(logging.ERROR, "kvframe"):
        while scheduled.has_work:
            run_step(scheduled)
    assert [
        "the proposer Counting failed, and is set aside: no more drafts are computed: RuntimeError: no more guesses"
    ] == [record.message for record in caplog.records]
    assert 30 + 3 == scheduled.stats.generated_tokens


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda requests: [[5, 200, 6]], [[5]]),  # 200 is no token of the model
        (lambda requests: [[-1]], [[]]),
        (lambda requests: [list(range(5, 40))], [[5, 6]]),  # more than was asked for
        (lambda requests: [np.array([5, 6])], [[5, 6]]),
        (lambda requests: [], [[]]),  # no list for the request: set aside
        (lambda requests: [["five"]], [[]]),
        (lambda requests: None, [[]]),
    ],
)
def test_what_is_no_draft_is_left_out(answer: Any, expected: list[list[int]]) -> None:
    drafting: Drafting[Request] = Drafting(Counting(answers=answer, max_drafts=2), vocab_size=100, max_num_seqs=1)
    assert expected == drafting._propose([request("a")], [2])


def test_a_draft_model_continues_requests_when_their_drafts_have_blocks() -> None:
    continued: list[Any] = []

    def continue_requests(requests: Sequence[Request], *numbers: Any) -> list[list[int]]:
        continued.append([[each.request_id for each in requests], *(list(each) for each in numbers)])
        return [[each.token_ids[-1] + 1] for each in requests]

    found = {}
    for num_blocks in (2, 1):  # four tokens are known, as many as a block has
        proposer = Counting(max_drafts=4)
        scheduled, _ = scheduler(proposer, num_blocks)
        scheduled.use_draft_model(continue_requests)
        scheduled.add(request("a"))
        run_step(scheduled)
        step = scheduled.schedule()
        assert step is not None
        found[num_blocks] = (list(step.continued), [[*each.continuation] for asked in proposer.asked for each in asked])
    # The row, the known tokens, and how many tokens are wanted.
    assert [[["a"], [0], [4], [4]]] == continued
    assert {2: ([[5]], [[5]]), 1: ([], [])} == found


def test_an_aborted_request_is_forgotten() -> None:
    proposer = Counting()
    scheduled, _ = scheduler(proposer)
    served, waiting = request("a"), request("never asked about")
    scheduled.add(served)
    run_step(scheduled)
    run_step(scheduled)
    scheduled.add(waiting)
    scheduled.end(waiting, "aborted")
    scheduled.end(served, "aborted")
    assert ["a"] == proposer.forgotten


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 20)), min_size=1, max_size=6),
    st.lists(st.integers(0, 4), min_size=1, max_size=12),
    st.integers(4, 30),
    st.integers(4, 20),
)
def test_every_request_ends_with_its_tokens_whatever_is_accepted(
    wanted: list[tuple[int, int]], accepted: list[int], num_blocks: int, budget: int
) -> None:
    scheduled, cache = scheduler(Counting(max_drafts=4), max(num_blocks, 8), budget)
    requests = [request(str(index), prompt, new) for index, (prompt, new) in enumerate(wanted)]
    for each in requests:
        scheduled.add(each)
    for turn in range(2000):
        if not scheduled.has_work:
            break
        step = scheduled.schedule()
        assert step is not None
        assert step.num_tokens == int(step.num_scheduled.sum()) <= budget
        scheduled.complete(step, compute(step, accepted[turn % len(accepted)]))
    for each, (prompt, new) in zip(requests, wanted, strict=True):
        assert list(range(1, prompt + new + 1)) == list(each.token_ids)
    assert not cache.held
