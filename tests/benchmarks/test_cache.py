"""The benchmarks of the cache do and check their works, know the best of evictions, and simulate every byte."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.cache import cases, core, eviction, eviction_traces, work, worker

TINY = {case.name: case for case in cases.tiny_cases()}


@pytest.fixture(autouse=True)
def _nothing_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing is timed here, and there is much to go through where torch is loaded.
    monkeypatch.setattr("gc.collect", lambda: 0)


def do(answers: Any, case: Any) -> tuple[list[float], Any]:
    """Set up kvframe's side of a case, do one turn and check, with all questions as JSON."""
    side = next(side for side in case.sides if side.engine == "kvframe")
    asked = [json.loads(json.dumps(core.question(case, side, what))) for what in ("set up", "turn", "check")]
    answers(asked[0])
    return answers(asked[1]), answers(asked[2])


def test_every_kind_of_work_is_done_and_checked() -> None:
    assert set(cases.WORKS) == {case.work.name for case in TINY.values()}
    answers = worker.Answers(lambda: worker.make_core("kvframe"))
    for case in TINY.values():
        assert all(seconds > 0 for seconds in do(answers, case)[0]), case.name


@pytest.mark.parametrize(
    ("case", "mistake", "broken"),
    [
        ("tiny-decode", "blocks held", {"held": lambda self, prompt: [(None, [1])]}),
        ("tiny-decode", "tokens found", {"look_up": lambda self, prompt: 0}),
        ("tiny-pass", "prompts found", {"look_up": lambda self, prompt: 0}),
        ("tiny-hit", "tokens found", {"look_up": lambda self, prompt: 16}),
        (
            "tiny-turns",
            "tokens found of a request that begins",
            {"begin": lambda self, prompt: 0, "compute": lambda self, prompt, chunk: 0},
        ),
        ("tiny-chain", "tokens found of the chain", {"compute": lambda self, prompt, chunk: 0}),
        ("tiny-lockstep", "tokens found of a prompt that is new", {"begin": lambda self, prompt: 16}),
        ("tiny-far-state", "early and late states", {"cached_states": lambda self: []}),
        ("tiny-far-state", "nearest state", {"lose": lambda self, blocks: None}),
    ],
)
def test_a_core_that_does_not_do_the_work_is_noticed(case: str, mistake: str, broken: Mapping[str, Any]) -> None:
    kind = type(worker.make_core("kvframe"))
    broken = {"let_go": lambda self, prompt: None, **broken} if "look_up" in broken else broken
    with pytest.raises(work.Mistake, match=mistake):
        do(worker.Answers(type("Broken", (kind,), broken)), TINY[case])


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
