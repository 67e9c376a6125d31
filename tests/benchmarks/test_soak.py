"""The soak runs, a short one here; what is recorded is an hour of each scenario in which nothing differed or leaked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.benchmarks.calling import ROOT, measured, page_of, record_of

NAMES = {"windows", "states", "encoder", "three-blocks"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    chosen = ["--minutes", "1", "--scenario", "windows", "--scenario", "three-blocks"]
    return measured(folder, "engine.soak", *chosen)


@pytest.mark.whole
def test_a_minute_of_traffic_ends_without_a_difference_or_a_leak(results: Path) -> None:
    scenarios = record_of("soak", results)["scenarios"]
    assert ["windows", "three-blocks"] == list(scenarios)
    for each in scenarios.values():
        assert ([], [], []) == (each["differences"], each["mirror_differences"], each["leaks"])
        assert each["requests"] == sum(each["ends"].get(end, 0) for end in ("length", "aborted", "error")) > 5
        # Whoever computes a pin's prefix generates one token besides.
        assert each["compared_tokens"] <= each["generated_tokens"] <= each["compared_tokens"] + each["pins_asked"]
        assert each["compared_tokens"] > 50
        assert each["mirrors"] > 0
    assert sum(sum(each["faults"].values()) for each in scenarios.values()) > 3


@pytest.mark.whole
def test_the_page_shows_every_count(results: Path) -> None:
    page = page_of("soak", results)
    assert re.search(r"^\| \*\*leaks\*\* \| 0 \| 0 \| 0 \|$", page, re.M)
    assert 11 == len(re.findall(r"^\| fault: ", page, re.M))


def test_the_method_lists_every_scenario() -> None:
    method = page_of("README", ROOT / "benchmarks")
    assert set(re.findall(r"^\| `([a-z-]+)` \| `[a-z0-9_]+`", method, re.M)) >= NAMES


def test_what_is_recorded_is_an_hour_of_each_scenario_without_a_difference_or_a_leak() -> None:
    recorded = record_of("soak")
    assert recorded["minutes"] >= 60
    assert set(recorded["scenarios"]) == NAMES
    struck: set[str] = set()
    for each in recorded["scenarios"].values():
        assert ([], [], []) == (each["differences"], each["mirror_differences"], each["leaks"])
        assert each["requests"] > 300
        assert min(each[what] for what in ("preemptions", "mirrors", "resets", "resizes", "pins")) > 0
        struck |= set(each["faults"])
    harmless = {"swap", "listener", "told", "resize"}
    assert {"backend", "memory", "shape", "logits", "state", "interrupt", "books"} | harmless <= struck
