"""What a step of the cache core costs as sizes grow is recorded, told and drawn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cache import core, growth, work, worker, worst_work


class Here:
    """An engine's process, in this one."""

    def __init__(self, answers: Any) -> None:
        self.answers = answers

    def ask(self, question: Any) -> Any:
        return json.loads(json.dumps(self.answers(json.loads(json.dumps(question)))))


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Here]]:
    """Return kvframe twice, once under the peer's name."""
    with pytest.MonkeyPatch.context() as patch:
        # Nothing is timed here, and there is much to go through where torch is loaded.
        patch.setattr("gc.collect", lambda: 0)
        yield {name: Here(worker.Answers(lambda: worker.make_core("kvframe"))) for name in ("vllm", "kvframe")}


@pytest.fixture(scope="module")
def record(engines: dict[str, Here]) -> dict[str, Any]:
    axis = growth.tiny_axis()
    points = {str(value): core.measure(case, engines, 2, lambda _: None) for value, case in axis.cases.items()}
    places = ("date", "command", "processor", "cores", "threads", "system", "commit")
    return {
        "machine": dict.fromkeys((*places, "python", "torch", "transformers", "kvframe"), "?"),
        "repeats": 2,
        "versions": {},
        "axes": {axis.name: {"title": axis.title, "words": axis.words, "points": points}},
    }


def test_pools_have_room_for_as_many_rounds_as_may_be_asked_for() -> None:
    for axis in growth.standard_axes():
        for case in (each for each in axis.cases.values() if each.work is work.decode):
            setting, steps = case.sides[0].setting, case.sizes
            # One block of each request is filled before the rounds, two in each.
            most = -(-(steps["length"] + 15) // 16) + steps["num_cycles"] * worst_work.MAX_ROUNDS + 1
            assert steps["num_requests"] * most * len(setting.windows) < setting.num_blocks, case.name
            assert 16 * most <= setting.max_model_len


def test_the_tree_grows_in_depth_turns_and_width() -> None:
    axes = {axis.name: axis for axis in growth.standard_axes()}

    def sizes(axis: str, size: str) -> list[int]:
        return [case.sizes[size] for case in axes[axis].cases.values()]

    widths, depths, turns = sizes("branches", "num_branches"), sizes("depth", "depth"), sizes("turns", "num_turns")
    assert (10, 10_000) == (widths[0], widths[-1]) == (depths[0], depths[-1])
    assert (10, 1000) == (turns[0], turns[-1])


def test_each_value_of_a_size_is_measured_in_each_round(record: dict[str, Any]) -> None:
    points = record["axes"]["tiny"]["points"]
    assert ["1", "2"] == list(points)
    for value, point in points.items():
        assert 2 == len(point["sides"]["kvframe"]["seconds"])
        assert int(value) == point["sides"]["kvframe"]["num_groups"]


def set_up(answers: Any, case: Any) -> Any:
    """Set a case up on kvframe; return the core and the work."""
    answers({**core.question(case, case.sides[1], "set up"), "side": "one"})
    return answers.works["one"]


def test_where_many_prompts_go_on_from_one_each_step_gives_up_pages(engines: dict[str, Here]) -> None:
    (axis,) = (each for each in growth.standard_axes() if each.name == "branches")
    kvframe, steps = set_up(engines["kvframe"].answers, axis.cases[10])
    before = kvframe._manager.stats.num_evictions
    steps.send(True)
    assert kvframe._manager.stats.num_evictions - before >= axis.cases[10].sizes["num_requests"]
    engines["kvframe"].answers({"do": "check", "side": "one"})


def test_the_slope_is_the_power_of_the_size() -> None:
    for power in (0, 0.5, 1):
        points = {str(size): {"sides": {"one": {"seconds": [3 * size**power] * 3}}} for size in (1, 16, 1024)}
        assert power == pytest.approx(growth.slope(points, "one"))


def test_the_page_has_every_size_and_side(record: dict[str, Any]) -> None:
    page = growth.write_report(record)
    assert "## Against groups" in page
    assert "| groups | vLLM, µs | kvframe, µs | times as fast |" in page
    assert "The time grows with this power of the groups (0: not at all; 1: in proportion): " in page


def test_the_plot_shows_every_side_and_depends_on_the_record_alone(record: dict[str, Any], tmp_path: Path) -> None:
    growth.draw_plot(record, tmp_path / "first.svg")
    growth.draw_plot(json.loads(json.dumps(record)), tmp_path / "second.svg")
    drawn = (tmp_path / "first.svg").read_text(encoding="utf-8")
    assert drawn == (tmp_path / "second.svg").read_text(encoding="utf-8")
    assert all(f">{text}</text>" in drawn for text in ("kvframe", "vLLM", "groups"))
