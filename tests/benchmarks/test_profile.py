"""The profile of an engine's steps runs, its parts make up the whole, and its page shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import profile_step
from tests.benchmarks.calling import measured, page_of, record_of

PARTS = ["scheduling", "cache", "metadata", "attention", "rest of the model", "sampling", "requests"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    return measured(folder, "engine.profile_step", "--workload", "tiny", "--steps", "5")


def steps_of(folder: Path) -> dict[str, Any]:
    record = record_of("step_profile", folder)
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
    page = page_of("step_profile", results)
    assert [1] * len(PARTS) == [page.count(f"\n| {part} |") for part in PARTS]
    assert "| the step |" in page
    assert "3 requests with prompts of 20 tokens" in page


def test_nothing_stays_of_the_clocks() -> None:
    from kvframe_engine.running import model_runner

    from kvframe.attention.layer import AttentionLayer
    from tests.engine.scripted_model import ScriptedModel

    before = AttentionLayer.__call__, model_runner.sample
    with ScriptedModel("on and on").engine(self_check=False) as engine:
        with profile_step.profiled(engine) as clock:
            engine.generate([[1, 2, 3]])
        assert before == (AttentionLayer.__call__, model_runner.sample)
        assert "step" not in vars(engine)
        assert clock.seconds["scheduling"] > 0
