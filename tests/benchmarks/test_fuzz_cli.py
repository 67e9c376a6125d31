"""The fuzz of the command line runs, a short one here; what is recorded is at least 400 calls without a fault."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
COMMANDS = {"generate", "embed", "plan", "explain", "tune", "plugins"}


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "fuzz_cli.json").read_text(encoding="utf-8"))
    return found


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "fuzz_cli.py"), *options, "--results", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    done = run(folder, "--count", "24", "--seed", "7", "--without-processes")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_hostile_calls_end_in_one_sentence(results: Path) -> None:
    found = record(results)
    assert (24, 0, []) == (found["count"], found["processes"], found["faults"])
    assert set(found["ended"]) <= COMMANDS
    assert {code for counts in found["ended"].values() for code in counts} <= {"0", "1", "2", "130"}
    assert 24 == sum(sum(counts.values()) for counts in found["ended"].values())


def test_the_page_shows_every_command(results: Path) -> None:
    page = (results / "fuzz_cli.md").read_text(encoding="utf-8")
    assert all(f"| `kvframe {command}` |" in page for command in record(results)["ended"])


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import fuzz_cli

    return fuzz_cli


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
def test_what_a_fault_is(fuzz: Any, changes: dict[str, Any], faults: list[str]) -> None:
    good = {"code": 2, "stderr": "kvframe: error: no\n", "changed": (), "left": ()}
    assert faults == fuzz.Ending(**{**good, **changes}).faults


def test_what_is_recorded_is_at_least_400_calls_without_a_fault() -> None:
    found = record(BENCHMARKS / "results")
    assert found["count"] >= 400
    assert found["processes"] >= 20
    assert [] == found["faults"]
    assert COMMANDS == set(found["ended"])
    assert {"option", "stack", "model", "prompts", "environment", "closed stream", "full output"} <= set(
        found["hostile"]
    )
    assert "python benchmarks/fuzz_cli.py --count 400 --seed 1" == found["machine"]["command"]


def test_no_record_names_a_folder_of_the_machine_that_made_it(results: Path) -> None:
    records = [results, BENCHMARKS / "results"]
    for text in (path.read_text(encoding="utf-8") for folder in records for path in folder.glob("fuzz_*")):
        assert tempfile.gettempdir() not in text
        assert "kvframe-fuzz-" not in text
