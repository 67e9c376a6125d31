"""The table of versions is what was recorded, has every tested version, and says what failed."""

from __future__ import annotations

import attrs
import pytest
from kvframe_transformers.names import TESTED

from tests.compatibility import columns, families
from tests.compatibility.__main__ import PAGE, RECORD
from tests.compatibility.columns import Column, as_json, from_json, summary, unmet
from tests.compatibility.table import INTRODUCTION, render

COLUMN = Column(
    package="transformers",
    version="5.9.0",
    day="2026-11-27",
    commit="abc1234",
    environment="Python 3.11.7, torch 2.13.0",
    families={"llama": "equal", "jamba": "other tokens than generate()"},
    suites={"the adapter kit": "passed (14)"},
)
LATER = attrs.evolve(
    COLUMN, version="5.10.0", families={"llama": "equal", "jamba": "equal"}, suites={"frozen": "passed (3)"}
)


def test_the_page_is_what_was_recorded() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(from_json(RECORD.read_text(encoding="utf-8")))


def test_every_tested_minor_has_a_column_in_which_all_is_well() -> None:
    recorded = from_json(RECORD.read_text(encoding="utf-8"))
    good = {column.version.rpartition(".")[0] for column in recorded if column.is_good}
    assert {*TESTED} <= good
    assert {f"{TESTED[0]}.0"} <= {column.version for column in recorded}


def test_every_family_is_in_every_column() -> None:
    recorded = from_json(RECORD.read_text(encoding="utf-8"))
    assert [{*families.ALL_FAMILIES}] * len(recorded) == [{*column.families} for column in recorded]


def test_versions_are_in_order_and_what_one_lacks_is_said() -> None:
    page = render(from_json(as_json([LATER, COLUMN])))
    assert page == (
        f"{INTRODUCTION}\n## transformers\n\n"
        "|  | 5.9.0 | 5.10.0 |\n"
        "| --- | --- | --- |\n"
        "| measured on | 2026-11-27 | 2026-11-27 |\n"
        "| kvframe at | abc1234 | abc1234 |\n"
        "| with | Python 3.11.7, torch 2.13.0 | Python 3.11.7, torch 2.13.0 |\n"
        "| families that are equal | 1 of 2 | 2 of 2 |\n"
        "| the adapter kit | passed (14) | not run |\n"
        "| frozen | not run | passed (3) |\n"
        "\n### Families with transformers\n\n"
        "| family | 5.9.0 | 5.10.0 |\n"
        "| --- | --- | --- |\n"
        "| llama | equal | equal |\n"
        "| jamba | other tokens than generate() | equal |\n"
    )
    assert [False, True] == [COLUMN.is_good, LATER.is_good]


def test_a_report_says_what_of_a_suite_passed_or_failed() -> None:
    def report(**results: str) -> str:
        cases = [
            f'<testcase classname="tests.kit.{name}" name="{name}">{result}</testcase>'
            for name, result in results.items()
        ]
        return f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"

    failure, skipped = "<failure/>", "<skipped/>"
    assert "passed (2)" == summary(report(test_a="", test_b="", test_c=skipped), ["tests/kit"])
    assert "passed (1)" == summary(report(test_a="", test_b=failure), ["tests/kit/test_a.py"])
    assert "1 of 2 fail: test_b" == summary(report(test_a="", test_b=failure), ["tests/kit", "tests/other"])
    assert "4 of 4 fail: a, b, c, …" == summary(report(a=failure, b="<error/>", c=failure, d=failure), ["tests/kit"])
    assert "no test ran" == summary(report(test_a=skipped, test_b=""), ["tests/ki", "tests/kit/test_a.py"])


def test_only_requirements_that_are_not_met_are_installed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "version", {"numpy": "2.1.0", "tokenizers": "0.23.2rc1"}.__getitem__)
    assert ["numpy>=2.2"] == unmet(["numpy>=2.2", "numpy>=1.17", "tokenizers<0.24,>=0.23", 'torch; extra == "torch"'])


def test_a_family_that_cannot_be_served_does_not_end_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(family: str, folder: object) -> str:
        raise AttributeError(f"{family} has\nno cache")

    monkeypatch.setattr(families, "_KINDS", {broken: ["llama"], lambda family, folder: "other tokens": ["bert"]})
    assert "AttributeError: llama has" == families.verdict_of("llama")
    assert "other tokens" == families.verdict_of("bert")
