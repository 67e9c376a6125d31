"""The profile of an engine's steps runs, its parts make up the whole, and its page shows them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PARTS = ["scheduling", "cache", "metadata", "attention", "rest of the model", "sampling", "requests"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    command = [sys.executable, str(BENCHMARKS / "profile_step.py"), "--workload", "tiny", "--steps", "5"]
    done = subprocess.run(
        [*command, "--results", str(folder)], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return folder


def steps_of(folder: Path) -> dict[str, Any]:
    record = json.loads((folder / "step_profile.json").read_text(encoding="utf-8"))
    steps: dict[str, Any] = record["workloads"]["tiny"]["steps"]
    return steps


def test_every_part_of_every_step_is_timed(results: Path) -> None:
    steps = steps_of(results)
    assert [3] * 5 == steps["decode"]["tokens"]
    assert [60] == steps["prefill"]["tokens"]
    for found in steps.values():
        assert {*PARTS, "tokens", "host_share"} == set(found)
        assert all(second > 0 for part in PARTS for second in found[part])
        assert 0 < found["host_share"] < 1


def test_the_page_shows_every_part(results: Path) -> None:
    page = (results / "step_profile.md").read_text(encoding="utf-8")
    assert [1] * len(PARTS) == [page.count(f"\n| {part} |") for part in PARTS]
    assert "| the step |" in page
    assert "3 requests with prompts of 20 tokens" in page


def test_nothing_stays_of_the_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from profile_step import profiled

    from kvframe.attention.layer import AttentionLayer
    from kvframe.engine.running import runner
    from tests.engine.scripted_model import ScriptedModel

    before = AttentionLayer.__call__, runner.sample
    with ScriptedModel("on and on").engine(self_check=False) as engine:
        with profiled(engine) as clock:
            engine.generate([[1, 2, 3]])
        assert before == (AttentionLayer.__call__, runner.sample)
        assert "step" not in vars(engine)
        assert clock.seconds["scheduling"] > 0
