"""The census of model types compares them, and its page is what was recorded."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.models.census.__main__ import PAGE, RECORD, main
from tests.models.census.compare import GROUPS, Verdict, compare
from tests.models.census.table import Census, as_json, from_json, render

CENSUS = Census(
    day="2026-11-28",
    commit="abc1234",
    versions="transformers 5.9.0",
    verdicts={"decoders": {"llama": Verdict("equal"), "bloom": Verdict("refused", "has no | interface")}},
)


def test_the_page_is_what_was_recorded() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(from_json(RECORD.read_text(encoding="utf-8")))


def test_no_recorded_type_is_wrong() -> None:
    recorded = from_json(RECORD.read_text(encoding="utf-8"))
    assert {} == {
        (group, name): verdict
        for group, verdicts in recorded.verdicts.items()
        for name, verdict in verdicts.items()
        if verdict.word == "wrong"
    }
    assert set(GROUPS) == set(recorded.verdicts)


def test_the_readme_says_how_many_types_are_served() -> None:
    recorded = from_json(RECORD.read_text(encoding="utf-8"))
    verdicts = [
        (name, verdict) for group_verdicts in recorded.verdicts.values() for name, verdict in group_verdicts.items()
    ]
    served = {name for name, verdict in verdicts if verdict.word == "equal"}
    readme = (PAGE.parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"[{len(served)} of its types](plugins/MODELS.md)" in readme


def test_a_page_counts_verdicts_and_says_why_a_type_is_not_equal() -> None:
    page = render(from_json(as_json(CENSUS)))
    assert "| decoders | 1 | 1 | 0 | 0 | 0 |" in page
    assert "Equal: llama." in page
    assert "| bloom | refused | has no \\| interface |" in page


def test_types_are_compared_in_processes_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["mamba", "t5", "cpmant", "--jobs", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert ["decoders", "mamba", "equal"] == lines[1].split("\t")[:3]
    assert ["decoders", "cpmant", "refused"] == lines[0].split("\t")[:3]
    assert "encoders {'equal': 1}" == lines[-1]


def test_a_type_that_takes_too_long_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*_: Any) -> Verdict:
        signal.raise_signal(signal.SIGALRM)
        return Verdict("equal")

    monkeypatch.setattr("tests.models.census.compare._compare", endless)
    assert Verdict("fails", "took more than 60 s") == compare("decoders", "gpt2", seconds=60)
