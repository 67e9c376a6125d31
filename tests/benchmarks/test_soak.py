"""The soak runs, a short one here; what is recorded is an hour of each scenario in which nothing differed or leaked."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RECORDED = BENCHMARKS / "results" / "soak.json"
NAMES = {"windows", "states", "encoder", "three-blocks"}


def record(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    chosen = ["--minutes", "1", "--scenario", "windows", "--scenario", "three-blocks"]
    command = [sys.executable, str(BENCHMARKS / "soak.py"), *chosen, "--results", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_minute_of_traffic_ends_without_a_difference_or_a_leak(results: Path) -> None:
    scenarios = record(results / "soak.json")["scenarios"]
    assert ["windows", "three-blocks"] == list(scenarios)
    for each in scenarios.values():
        assert ([], [], []) == (each["differences"], each["mirror_differences"], each["leaks"])
        assert each["requests"] == sum(each["ends"].get(end, 0) for end in ("length", "aborted", "error")) > 5
        # Whoever computes a pin's prefix generates one token besides.
        assert each["compared_tokens"] <= each["generated_tokens"] <= each["compared_tokens"] + each["pins_asked"]
        assert each["compared_tokens"] > 50
        assert each["mirrors"] > 0
    assert sum(sum(each["faults"].values()) for each in scenarios.values()) > 3


def test_the_page_shows_every_count(results: Path) -> None:
    page = (results / "soak.md").read_text(encoding="utf-8")
    assert re.search(r"^\| \*\*leaks\*\* \| 0 \| 0 \| 0 \|$", page, re.M)
    assert 11 == len(re.findall(r"^\| fault: ", page, re.M))


def test_the_method_lists_every_scenario() -> None:
    method = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([a-z-]+)` \| `[a-z0-9_]+`", method, re.M)) >= NAMES


def test_what_is_recorded_is_an_hour_of_each_scenario_without_a_difference_or_a_leak() -> None:
    recorded = record(RECORDED)
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
