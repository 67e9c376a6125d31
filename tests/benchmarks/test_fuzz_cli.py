"""The fuzz of the command line runs, a short one here; what is recorded is at least 400 calls without a fault."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cli import fuzz
from tests.benchmarks.calling import RESULTS, measured, page_of, record_of

COMMANDS = {"generate", "embed", "plan", "explain", "tune", "plugins"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    return measured(folder, "cli.fuzz", "--count", "24", "--seed", "7", "--without-processes")


def test_hostile_calls_end_in_one_sentence(results: Path) -> None:
    found = record_of("fuzz_cli", results)
    assert (24, 0, []) == (found["count"], found["processes"], found["faults"])
    assert set(found["ended"]) <= COMMANDS
    assert {code for counts in found["ended"].values() for code in counts} <= {"0", "1", "2", "130"}
    assert 24 == sum(sum(counts.values()) for counts in found["ended"].values())


def test_the_page_shows_every_command(results: Path) -> None:
    page = page_of("fuzz_cli", results)
    assert all(f"| `kvframe {command}` |" in page for command in record_of("fuzz_cli", results)["ended"])


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({}, []),
        ({"code": 0, "stderr": "some note\n"}, []),
        ({"code": None}, ["it hangs"]),
        ({"code": -11}, ["it ends with -11"]),
        ({"code": 70, "stderr": "Traceback (most recent call last):\n"}, ["it ends with 70", "it prints a traceback"]),
        ({"stderr": "Exception ignored in: <stdout>\n"}, ["it prints a traceback"]),
        ({"stderr": "Usage: kvframe\n\nError: no\n"}, ["it says 3 lines"]),
        ({"changed": ("config.json",), "left": ("part",)}, ["changed config.json", "left part"]),
    ],
)
def test_what_a_fault_is(changes: dict[str, Any], faults: list[str]) -> None:
    good = {"code": 2, "stderr": "kvframe: error: no\n", "changed": (), "left": ()}
    assert faults == fuzz.Ending(**{**good, **changes}).faults


def test_what_is_recorded_is_at_least_400_calls_without_a_fault() -> None:
    found = record_of("fuzz_cli")
    assert found["count"] >= 400
    assert found["processes"] >= 20
    assert [] == found["faults"]
    assert COMMANDS == set(found["ended"])
    assert {"option", "stack", "model", "prompts", "environment", "closed stream", "full output"} <= set(
        found["hostile"]
    )
    assert found["machine"]["command"].endswith(" --count 400 --seed 1")


def test_no_record_names_a_folder_of_the_machine_that_made_it(results: Path) -> None:
    records = [results, RESULTS]
    for text in (path.read_text(encoding="utf-8") for folder in records for path in folder.glob("fuzz_*")):
        assert tempfile.gettempdir() not in text
        assert "kvframe-fuzz-" not in text
