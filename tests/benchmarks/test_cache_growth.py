"""What the cache core's benchmarks find as sizes grow and blocks are evicted is recorded, told and drawn."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.cache import core, growth, growth_cases, growth_report, studies, worker


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
    (axis,), (population,) = growth_cases.tiny_axes(), growth_cases.tiny_populations()
    points = {value: core.measure(case, engines, 2, lambda _: None) for value, case in axis.cases.items()}
    shared = growth_cases.siblings()
    shared = dataclasses.replace(shared, sizes={**shared.sizes, "shared": 256, "own": 48})
    places = ("date", "command", "processor", "cores", "threads", "system", "commit")
    machine = dict.fromkeys((*places, "python", "torch", "transformers", "kvframe"), "?")
    found = growth.study("eviction", population, engines, lambda make: growth.hits_left(population, make))
    lost = growth.study(
        "random", population, engines, lambda make: growth.hits_after_loss(population, make, (0, 5, 100))
    )
    return {
        "machine": machine,
        "repeats": 2,
        "versions": {},
        "axes": {axis.name: {"title": axis.title, "words": axis.words, "points": points}},
        "siblings": growth.study("siblings", shared, engines, lambda make: make()),
        "populations": {population.name: found},
        "losses": {population.name: lost},
    }


def test_prompts_that_begin_alike_find_what_they_share_from_the_second_on(record: dict[str, Any]) -> None:
    assert [0, 256, 256, 256, 256] == record["siblings"]["sides"]["kvframe"]


def test_hits_fall_from_all_tokens_to_none_as_blocks_are_evicted(record: dict[str, Any]) -> None:
    found = record["populations"]["tiny"]["sides"]["kvframe"]
    assert [0, 100] == [found["evicted"][0], found["evicted"][-1]]
    assert 50 <= found["evicted"][1] < 100
    assert [100, 0] == [found["found"][0], found["found"][-1]]
    assert 2 * 128 // 16 * 2 == found["num_cached"]


def test_random_losses_evict_the_chosen_blocks_alone(record: dict[str, Any]) -> None:
    of_kvframe = record["losses"]["tiny"]["sides"]["kvframe"]
    assert [100, 0] == [of_kvframe["found"][0], of_kvframe["found"][-1]]
    assert 0 < of_kvframe["found"][1] < 90
    assert [0, 3.125, 100] == of_kvframe["evicted"]
    assert [100, 96.875, 0] == of_kvframe["kept"]


def test_the_longest_prefix_whose_live_blocks_are_left() -> None:
    longest = studies._longest
    whole = np.zeros((2, 6), dtype=bool)
    assert 6 == longest((None, 32), whole)
    for group, block, expected in [(0, 4, 4), (1, 5, 5), (1, 4, 4), (1, 3, 6), (0, 0, 0)]:
        lost = whole.copy()
        lost[group, block] = True
        assert expected == longest((None, 32), lost), (group, block)
    sizes = {"length": 128, "num_prompts": 2}
    found = studies.loss_by_definition((None, 32), sizes, (0, 20, 100))["found"]
    assert [100, 0] == [found[0], found[-1]]
    assert 0 < found[1] < 80


def test_pools_have_room_for_as_many_rounds_as_may_be_asked_for() -> None:
    for axis in growth_cases.standard_axes():
        for case in (each for each in axis.cases.values() if each.work == "Decode"):
            setting, sizes = case.sides[0].setting, case.sizes
            # One block of each request is filled before the rounds, two in each, one when calls are counted.
            most = -(-(sizes["length"] + 15) // 16) + sizes["num_cycles"] * growth_cases.MAX_ROUNDS + 2
            assert sizes["num_requests"] * most * len(setting.windows) < setting.num_blocks, case.name
            assert 16 * most <= setting.max_model_len


def test_the_tree_grows_in_depth_turns_and_width() -> None:
    axes = {axis.name: axis for axis in growth_cases.standard_axes()}
    widths = [case.sizes["num_branches"] for case in axes["branches"].cases.values()]
    depths = [case.sizes["depth"] for case in axes["depth"].cases.values()]
    turns = [case.sizes["num_turns"] for case in axes["turns"].cases.values()]
    assert (10, 10_000) == (widths[0], widths[-1]) == (depths[0], depths[-1])
    assert (10, 1000) == (turns[0], turns[-1])


def test_each_value_of_a_size_is_measured_in_each_round(record: dict[str, Any]) -> None:
    points = record["axes"]["tiny"]["points"]
    assert [1, 2] == list(points)
    for value, point in points.items():
        assert 2 == len(point["sides"]["kvframe"]["seconds"])
        assert value == point["sides"]["kvframe"]["num_groups"]


def test_where_many_prompts_go_on_from_one_each_step_gives_up_pages(engines: dict[str, Here]) -> None:
    (axis,) = (each for each in growth_cases.standard_axes() if each.name == "branches")
    case, answers = axis.cases[10], engines["kvframe"].answers
    question = {"side": "branches", "work": case.work, "sizes": case.sizes}
    answers({**question, "do": "set up", "setting": dataclasses.asdict(case.sides[1].setting)})
    work = answers._works["branches"]
    before = work.core.num_evicted()
    work.turn()
    assert work.core.num_evicted() - before >= case.sizes["num_requests"]
    answers({**question, "do": "check"})


def test_the_slope_is_the_power_of_the_size() -> None:
    for power in (0, 0.5, 1):
        points = {str(size): {"sides": {"one": {"seconds": [3 * size**power] * 3}}} for size in (1, 16, 1024)}
        assert power == pytest.approx(growth_report.slope(points, "one"))


def test_the_page_has_every_size_and_side(record: dict[str, Any]) -> None:
    page = growth_report.write_report(record)
    assert "### Against groups" in page
    assert "| groups | vLLM, µs | kvframe, µs | times as fast |" in page
    assert "The time grows with this power of the groups (0: not at all; 1: in proportion): " in page
    assert "| kvframe | 0, 256, 256, 256, 256 |" in page
    assert "| kvframe | 32 | 0: 100, 50: 50, 100: 0 |" in page


def test_plots_show_every_side_and_depend_on_the_record_alone(record: dict[str, Any], tmp_path: Path) -> None:
    for draw, part, label in (
        (growth_report.plot_growth, "axes", "groups"),
        (growth_report.plot_hits, "populations", "% of the cached blocks evicted"),
        (growth_report.plot_hits, "losses", "% of the tokens found"),
    ):
        draw(record[part], tmp_path / "first.svg")
        draw(json.loads(json.dumps(record[part])), tmp_path / "second.svg")
        drawn = (tmp_path / "first.svg").read_text(encoding="utf-8")
        assert drawn == (tmp_path / "second.svg").read_text(encoding="utf-8")
        for text in ("kvframe", "vLLM", label):
            assert f">{text}</text>" in drawn


def test_cached_blocks_are_there_before_the_steps(engines: dict[str, Here]) -> None:
    case = growth_cases.tiny_axes()[0].cases[1]
    # Prompts of 16 blocks each leave 240 of 256: then the requests' 2 times 5 blocks fit, and these grow into 16 that
    # are free; with 256 they evict some.
    for num_cached, evicts in ((240, False), (256, True)):
        answers = engines["kvframe"].answers
        setting = dataclasses.asdict(case.sides[1].setting)
        question = {"side": "one", "work": case.work, "sizes": {**case.sizes, "num_cached": num_cached}}
        answers({**question, "do": "set up", "setting": setting})
        assert evicts == (answers._works["one"].core.num_evicted() > 0)
        answers({**question, "do": "check"})
