"""Measures one column of the table: a version of a package, installed beside the other packages of this environment."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distributions, version
from pathlib import Path
from types import MappingProxyType
from typing import Any
from xml.etree import ElementTree

import attrs
from packaging.requirements import Requirement

from benchmarks.harness.machine import describe_machine

ROOT = Path(__file__).resolve().parents[2]

PASSED = "passed"

_OF_OLD_RELEASES = "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
"""A warning of torch about code of transformers before 5.21 (GPT-BigCode's). In tests, warnings are errors."""


@attrs.frozen
class Package:
    """A package whose versions are columns.

    Attributes:
        compares_families: Whether a column says which families are equal.
        suites: The tests that a column runs, by the name of their row.
    """

    compares_families: bool
    suites: Mapping[str, Sequence[str]]


PACKAGES: Mapping[str, Package] = MappingProxyType(
    {
        "transformers": Package(
            compares_families=True,
            suites={
                "the adapter kit": ["plugins/transformers/tests/test_adapter.py"],
                "the tests of kvframe-transformers": ["plugins/transformers/tests"],
                "the tests of prediction heads": ["tests/models/test_prediction_heads.py"],
                "frozen plugins in the engine": ["tests/frozen"],
            },
        )
    }
)


@attrs.frozen
class Column:
    """What was measured with one version of a package.

    Attributes:
        package: The package.
        version: Its version.
        day: When, as ``2026-11-27``.
        commit: Of kvframe.
        environment: The versions of Python and torch.
        families: By family, ``equal`` or what differs.
        suites: By suite, ``passed`` with a number of tests, or what failed.
    """

    package: str
    version: str
    day: str
    commit: str
    environment: str
    families: Mapping[str, str]
    suites: Mapping[str, str]

    @property
    def is_good(self) -> bool:
        """Whether every family is equal and every test passed."""
        return {*self.families.values()} <= {"equal"} and all(each.startswith(PASSED) for each in self.suites.values())


def measure(requirement: str) -> Column:
    """Install a version into a folder of its own, and run everything with it; takes some minutes.

    Args:
        requirement: As pip takes it: ``transformers==5.24.*``; the newest version if there is only a name.

    Raises:
        subprocess.CalledProcessError: It cannot be installed.
    """
    name = Requirement(requirement).name
    package = PACKAGES[name]
    with tempfile.TemporaryDirectory(prefix="kvframe-") as folder:
        found = install(requirement, Path(folder))
        machine = describe_machine(1)
        return Column(
            package=name,
            version=found.version,
            day=machine["date"],
            commit=machine["commit"],
            environment=f"Python {machine['python']}, torch {machine['torch']}",
            families=dict(_families(folder)) if package.compares_families else {},
            suites=_tested(folder, package.suites),
        )


def install(requirement: str, folder: Path) -> Distribution:
    """Install a package into a folder, and of its dependencies those that this environment has too old or not at all.

    Args:
        requirement: As for ``measure``.
        folder: The folder.
    """
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--target"]
    _run([*pip, str(folder), requirement], check=True)
    (found,) = distributions(path=[str(folder)])
    if others := unmet(found.requires or ()):
        _run([*pip, str(folder), *others], check=True)
    return found


def unmet(requirements: Iterable[str]) -> list[str]:
    """Return the requirements that the installed packages do not meet; those of extras are left out."""
    found = []
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            meets = requirement.specifier.contains(version(requirement.name), prereleases=True)
        except PackageNotFoundError:
            meets = False
        if not meets:
            found.append(f"{requirement.name}{requirement.specifier}")
    return found


def _families(folder: str) -> Iterator[tuple[str, str]]:
    done = _run([sys.executable, "-m", "tests.compatibility.families"], folder)
    for line in done.stdout.splitlines():
        family, verdict = json.loads(line)
        yield family, verdict
    if done.returncode:
        yield "the program", f"ended with {done.stderr.strip().splitlines()[-1]}"


def _tested(folder: str, suites: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Run the tests of all suites once, and return what is to be said of each suite."""
    with tempfile.TemporaryDirectory() as reports:
        report = Path(reports) / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", "-W", _OF_OLD_RELEASES, f"--junit-xml={report}"]
        paths = sorted({path for paths in suites.values() for path in paths})
        done = _run([sys.executable, "-m", "pytest", *options, *paths], folder)
        if not report.is_file():
            return dict.fromkeys(suites, f"pytest ended with {done.returncode}")
        text = report.read_text(encoding="utf-8")
        return {suite: summary(text, paths) for suite, paths in suites.items()}


def summary(report: str, paths: Sequence[str]) -> str:
    """Return what a report of pytest in JUnit's format says of some files: how many tests passed, or which failed.

    Args:
        report: The report.
        paths: The files, or folders, from the root.
    """
    prefixes = tuple(path.removesuffix(".py").replace("/", ".") for path in paths)
    found = ElementTree.fromstring(report).iter("testcase")
    cases = [case for case in found if f"{case.get('classname')}.".startswith(tuple(f"{each}." for each in prefixes))]
    failed = [case.get("name", "") for case in cases if any(case.find(tag) is not None for tag in ("failure", "error"))]
    num_run = sum(case.find("skipped") is None for case in cases)
    if failed:
        return f"{len(failed)} of {num_run} fail: {', '.join(sorted(failed)[:3])}{', …' * (len(failed) > 3)}"
    return f"{PASSED} ({num_run})" if num_run else "no test ran"


def _run(command: Sequence[str], folder: str = "", *, check: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a program in the root; it imports the packages of ``folder`` before those of the environment."""
    paths = filter(None, [folder, str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=check)


def as_json(columns: Iterable[Column]) -> str:
    """Return columns as JSON, in order of package and version."""
    ordered = sorted(columns, key=lambda column: (column.package, release_of(column)))
    return json.dumps([attrs.asdict(column) for column in ordered], indent=1, ensure_ascii=False) + "\n"


def from_json(text: str) -> list[Column]:
    """Return the columns that ``as_json`` wrote."""
    found: list[dict[str, Any]] = json.loads(text)
    return [Column(**fields) for fields in found]


def release_of(column: Column) -> tuple[int, ...]:
    """Return a column's version as numbers: ``(5, 24, 0)``."""
    return tuple(map(int, re.findall(r"\d+", column.version)[:3]))
