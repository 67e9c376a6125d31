"""The benchmark of whole engines runs without vLLM, compares tokens, and its record is joined from several calls."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import beside_vllm
from benchmarks.engine.stepping import ModelClock, SteppedEngine
from benchmarks.harness.pages import medians
from benchmarks.harness.record import join
from tests.benchmarks.calling import ROOT, call, page_of, record_of


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    options = ("--workload", "tiny", "--repeats", "2", "--threads", "1", "--peer", str(folder))
    done = call("engine.beside_vllm", *options, "--results", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"vLLM is not in {folder}: measured without it" in done.stderr
    return folder


def test_every_system_is_measured_in_every_round_with_equal_tokens(results: Path) -> None:
    systems = record_of("beside_vllm", results)["workloads"]["tiny"]["systems"]
    assert ["kvframe", "kvframe, packed", "transformers"] == list(systems)
    for figures in systems.values():
        assert [1.0, 1.0] == figures["equal_prompts"]
        assert {2} == {len(values) for values in figures.values()}
    assert "host_ms" in systems["kvframe"]
    assert "host_ms" in systems["kvframe, packed"]
    assert "host_ms" not in systems["transformers"]


def test_the_page_has_a_row_for_each_system(results: Path) -> None:
    page = page_of("beside_vllm", results)
    assert ["kvframe", "kvframe, packed", "transformers"] == re.findall(r"^\| ([a-z, ]+) \|", page, re.M)


def test_the_method_lists_every_batch() -> None:
    method = page_of("README", ROOT / "benchmarks").split("## Beside vLLM")[1].split("\n## ")[0]
    assert [each.name for each in beside_vllm.WORKLOADS] == re.findall(r"^\| `([a-z0-9-]+)`", method, re.M)


class ThreeSteps(SteppedEngine):
    """Two prompts: the first step gives one a token, and each of the next steps gives both one."""

    def __init__(self) -> None:
        super().__init__()
        self.left = [[0], *[[0, 1]] * 5, [1]]

    def add(self, prompts: Any, num_new_tokens: int) -> None:
        assert [[5], [6]] == prompts

    def has_unfinished(self) -> bool:
        return bool(self.left)

    def step(self) -> list[tuple[int, list[int]]]:
        self.model_clock.seconds += 1
        self.attention_clock.seconds += 0.5
        return [(index, [7]) for index in self.left.pop(0)]


def test_decodes_of_all_requests_count_but_for_the_first_two() -> None:
    served = ThreeSteps().serve([[5], [6]], 6)
    assert [[7] * 6, [7] * 6] == served["tokens"]
    # Of the five steps in which both get a token, the first ends the prompts.
    assert 2 == len(served["steps"]["step"])
    assert [pytest.approx(whole - 1) for whole in served["steps"]["step"]] == list(served["steps"]["host"])
    assert (0.5, 0.5) == served["steps"]["attention"]
    # Of the first step, and of the one in which the other prompt got its first token.
    assert 1.0 == served["first_attention_seconds"]


def test_a_clock_counts_what_it_watches() -> None:
    class Model:
        def forward(self, x: int) -> int:
            return x + 1

    model, clock = Model(), ModelClock()
    clock.watch(model, "forward")
    assert 3 == model.forward(2)
    assert 0 < clock.seconds < 1


def test_calls_of_the_same_commit_join_one_record() -> None:
    machine = {"commit": "abc", "command": "first", "date": "1"}
    before: dict[str, Any] = {"machine": machine, "workloads": {"one": 1, "two": 2}}
    record: dict[str, Any] = {"machine": {**machine, "command": "second", "date": "2"}, "workloads": {"two": 3}}
    joined = join(before, copy.deepcopy(record), "workloads")
    assert {"one": 1, "two": 3} == joined["workloads"]
    assert "first; second" == joined["machine"]["command"]
    record["machine"]["commit"] = "other"
    assert record == join(before, record, "workloads")


def made(case: str, repeats: Any, versions: dict[str, str], minutes: int = 60) -> dict[str, Any]:
    machine = {"commit": "abc", "command": f"measure {case}", "date": "1"}
    return {"machine": machine, "repeats": repeats, "versions": versions, "minutes": minutes, "cases": {case: 1}}


def test_a_joined_record_lists_the_rounds_and_the_versions_of_all_calls() -> None:
    first, second, third = made("one", 3, {"a": "1"}), made("two", 7, {"b": "2"}), made("three", 5, {"a": "1"})
    joined = join(join(first, second, "cases"), third, "cases")
    assert ["one", "two", "three"] == list(joined["cases"])
    assert [3, 5, 7] == joined["repeats"]
    assert {"a": "1", "b": "2"} == joined["versions"]
    assert ", median of 3 to 7 alternating repeats (lowest to highest in brackets)." == medians(joined)
    assert 3 == join(first, made("two", 3, {}), "cases")["repeats"]


@pytest.mark.parametrize("other", [made("two", 3, {"a": "2"}), made("two", 3, {"a": "1"}, minutes=1)])
def test_calls_with_other_versions_or_options_are_not_joined(other: dict[str, Any]) -> None:
    assert other == join(made("one", 3, {"a": "1"}), other, "cases")
