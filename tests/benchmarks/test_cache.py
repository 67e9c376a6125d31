"""The benchmarks of the cache do and check their works, know the best of evictions, and simulate every byte."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.cache import cases, core, eviction, eviction_traces, growth, work, worker
from benchmarks.memory import padded_groups, traces, traffic
from kvframe.builtin.full_attention import FullAttentionSpec
from kvframe.contract.specs import LayerSpec
from tests.cache.plans import ranged

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


def test_the_slope_is_the_power_of_the_size() -> None:
    for power in (0, 0.5, 1):
        points = {str(size): {"sides": {"one": {"seconds": [3 * size**power] * 3}}} for size in (1, 16, 1024)}
        assert power == pytest.approx(growth.slope(points, "one"))


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


# --- simulated traffic ------------------------------------------------------------------------------------------------

LLAMA, GEMMA, FALCON = "llama_3_1_8b.toml", "gemma_3_27b.json", "falcon_h1_7b.toml"


def test_a_model_with_one_kind_of_layer_runs_alike_in_every_layout() -> None:
    ours, padded = (traffic.run(LLAMA, "multi-turn", 3, layout=layout) for layout in ("kvframe", "equal padded groups"))
    assert ours["was_full"]
    assert ours["hit_rate"] > 0.2
    # The pool evicts short runs of pages as a whole, and of equal blocks page by page.
    names = ("requests", "steps", "peak", "concurrency", "preemptions", "hit_rate")
    assert [ours[name] for name in names] == pytest.approx([padded[name] for name in names], rel=0.05)


def test_every_byte_is_somewhere_and_long_blocks_beside_states_are_half_empty() -> None:
    layouts = ("kvframe", "kvframe, few states", "equal padded groups")
    _, ours, padded = rows = [traffic.run(FALCON, "constant", 6, layout=layout) for layout in layouts]
    for row in rows:
        assert row["looks"]
        assert min(row["use"].values()) >= 0
        assert 1.0 == pytest.approx(sum(row["use"].values()))
    assert padded["use"]["unfinished"] > 0.25 > 0.01 > ours["use"]["unfinished"]
    assert ours["concurrency"] > 1.3 * padded["concurrency"]


def test_groups_of_ten_hold_eight_windows_that_are_not_there() -> None:
    # Of 60 layers' blocks of windows 52 are used; full attention's ten are whole.
    assert 0.08 < traffic.run(GEMMA, "constant", 1, layout="equal padded groups")["use"]["padding"] < 8 / 60


def test_each_turn_goes_on_from_the_one_before_and_none_is_too_long() -> None:
    for name, lengths in traces.TRACES.items():
        drawn = traces.draw(lengths, 20, 448)
        assert drawn == traces.draw(lengths, 20, 448) != traces.draw(lengths, 20, 448, seed=1)
        for conversation in drawn:
            ends = [0, *(end for turn in conversation.turns for end in (turn.prompt_end, turn.end))]
            assert ends == sorted(set(ends)), name
            assert 448 >= ends[-1] == len(conversation.token_ids), name


@pytest.mark.parametrize(
    ("num_full", "num_windows", "num_groups", "group_size", "num_missing"),
    [(10, 20, 3, 10, 0), (10, 52, 7, 10, 8), (13, 12, 2, 13, 1), (32, 0, 1, 32, 0)],
)
def test_padded_groups_are_as_large_as_the_rarest_type_or_nearly_equal_ones(
    num_full: int, num_windows: int, num_groups: int, group_size: int, num_missing: int
) -> None:
    full = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=4)
    specs = [full] * num_full + [ranged(block_size=16, window=32)] * num_windows
    padded = padded_groups.PaddedGroups.of([LayerSpec(name=str(index), spec=spec) for index, spec in enumerate(specs)])
    counts = [len(names) for _, names in padded.types]
    assert group_size == padded.group_size
    assert num_groups == sum(-(-count // group_size) for count in counts)
    assert num_missing == sum(-count % group_size for count in counts)
