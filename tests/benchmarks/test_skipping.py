"""The benchmark of prefill skipping runs, and the recorded run keeps what the project promises."""

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


def test_both_ways_prefill_the_same_prompts_in_every_round(results: Path) -> None:
    assert ["tiny-gemma3n", "tiny-yoco"] == list(workloads(results))
    for found in workloads(results).values():
        assert ["off", "on"] == list(found["systems"])
        assert [[2, 2], [2, 2]] == [[len(times) for times in each.values()] for each in found["systems"].values()]


def test_only_one_engine_is_told_to_skip() -> None:
    asked: dict[str, Any] = {}

    class Engine:
        def ask(self, question: Any) -> None:
            asked.update({name: each["is_skipping"] for name, each in question["settings"].items()})

    setting, _ = skipping.setting_of(skipping.WORKLOADS[-1])
    engines: Any = {name: Engine() for name in skipping.SYSTEMS.values()}
    skipping.load(engines, setting)
    assert {"kvframe": False, "kvframe, prefill skipping": True} == asked


def test_the_page_shows_every_figure(results: Path) -> None:
    page = page_of("skipping", results)
    row = r"^\| whole prefill, ((?:processor )?time) \|[^|]+\|[^|]+\| \d+\.\d{3} \|$"
    assert ["time", "processor time"] * 2 == re.findall(row, page, re.M)


def test_the_method_lists_every_workload() -> None:
    section = page_of("README", ROOT / "benchmarks").split("\n## Prefill skipping\n")[1]
    rows = "\n".join(re.findall(r"^\| (`.*?) \|", section.split("\n## ")[0], re.M))
    assert [each.name for each in skipping.WORKLOADS] == re.findall(r"`([a-z0-9-]+)`", rows)


@pytest.mark.parametrize("clock", ["seconds", "cpu_seconds"])
@pytest.mark.parametrize(("name", "most"), [("gemma3n-8192", 0.65), ("yoco-8192", 0.35)])
def test_the_recorded_prefills_take_as_much_less_as_the_layers_that_skip(name: str, most: float, clock: str) -> None:
    found = workloads()[name]
    assert 8192 == found["num_prompt_tokens"]
    off, on = (found["systems"][way][clock] for way in ("off", "on"))
    assert len(on) >= 7
    assert statistics.median(after / before for after, before in zip(on, off, strict=True)) <= most
