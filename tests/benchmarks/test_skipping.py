"""The benchmark of prefill skipping runs, and what is recorded keeps what the project promises."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import skipping
from tests.benchmarks.calling import RESULTS, ROOT, measured, page_of, record_of


def workloads(folder: Path = RESULTS) -> dict[str, Any]:
    found: dict[str, Any] = record_of("skipping", folder)["workloads"]
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    chosen = ["--workload", "tiny-gemma3n", "--workload", "tiny-yoco", "--repeats", "2"]
    return measured(folder, "engine.skipping", *chosen)


@pytest.mark.parametrize(("name", "num_layers", "num_trailing"), [("tiny-gemma3n", 6, 2), ("tiny-yoco", 8, 4)])
def test_both_ways_prefill_the_same_prompts(results: Path, name: str, num_layers: int, num_trailing: int) -> None:
    measured = workloads(results)[name]
    assert (num_layers, num_trailing) == (measured["num_layers"], measured["num_trailing_layers"])
    assert {"off": 200, "on": 1} == measured["rows"]
    assert measured["tokens_equal"]
    for clock in ("time", "processor time"):
        seconds = measured["clocks"][clock]["seconds"]
        assert [2, 2, 2, 2] == [len(seconds[part][name]) for part in ("trailing", "whole") for name in ("off", "on")]


def test_the_record_says_where_and_how(results: Path) -> None:
    machine = record_of("skipping", results)["machine"]
    assert {"processor", "cores", "threads", "python", "torch", "transformers", "kvframe", "commit"} <= set(machine)
    assert machine["command"].startswith("python -m benchmarks.engine.skipping --workload tiny-gemma3n")


def test_the_page_shows_every_figure(results: Path) -> None:
    page = page_of("skipping", results)
    parts = re.findall(
        r"^\| (trailing layers|whole prefill), (?:processor )?time \|[^|]+\|[^|]+\| \d\.\d{3} \|$", page, re.M
    )
    assert ["trailing layers", "whole prefill"] * 4 == parts
    assert 4 == len(re.findall(r"^\| (?:processor )?time \| \d\.\d\d \| \d\.\d\d \| \d\.\d\d \|$", page, re.M))


def test_the_method_lists_every_workload() -> None:
    section = page_of("README", ROOT / "benchmarks").split("\n## Prefill skipping\n")[1]
    rows = "\n".join(re.findall(r"^\| (`.*?) \|", section.split("\n## ")[0], re.M))
    assert [each.name for each in skipping.WORKLOADS] == re.findall(r"`([a-z0-9-]+)`", rows)


# --- the recorded run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clock", ["time", "processor time"])
@pytest.mark.parametrize("name", ["gemma3n-8192", "yoco-8192"])
def test_the_trailing_layers_take_a_tenth_of_their_time_at_most(name: str, clock: str) -> None:
    measured = workloads()[name]
    assert 8192 == measured["num_prompt_tokens"]
    assert measured["tokens_equal"]
    figures = measured["clocks"][clock]
    times = figures["seconds"]["trailing"]
    assert len(times["on"]) >= 7
    ratio = statistics.median(on / off for on, off in zip(times["on"], times["off"], strict=True))
    assert figures["trailing_ratio"] == pytest.approx(ratio)
    assert ratio <= 0.10


# On a machine with other work to do, the clock on the wall says less.
@pytest.mark.parametrize(("clock", "tolerance"), [("time", 0.1), ("processor time", 0.05)])
@pytest.mark.parametrize("name", ["gemma3n-8192", "yoco-8192"])
def test_the_whole_prefill_falls_as_the_share_of_the_trailing_layers_predicts(
    name: str, clock: str, tolerance: float
) -> None:
    figures = workloads()[name]["clocks"][clock]
    trailing, whole = figures["seconds"]["trailing"], figures["seconds"]["whole"]
    saved = [off - on for off, on in zip(trailing["off"], trailing["on"], strict=True)]
    predicted = 1 - statistics.median(each / off for each, off in zip(saved, whole["off"], strict=True))
    measured = statistics.median(on / off for on, off in zip(whole["on"], whole["off"], strict=True))
    assert (figures["predicted_whole_ratio"], figures["whole_ratio"]) == pytest.approx((predicted, measured))
    assert measured == pytest.approx(predicted, abs=tolerance)
