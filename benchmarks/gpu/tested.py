"""A pytest plugin: run tests first that never passed on a device, and record which tests ran and which did not begin.

    pytest -p benchmarks.gpu.tested --gpu-record FILE -m gpu …

The record counts the outcomes of each test function's cases. A later run keeps those of functions that it did not
collect.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

OUTCOMES = ("passed", "failed", "skipped", "not begun")
Record = dict[str, dict[str, int]]
"""The number of cases with each outcome, by the test function's node id; outcomes without a case are left out."""


def function_of(node_id: str) -> str:
    """Return the node id of a case's function."""
    return node_id.partition("[")[0]


def read_record(path: Path) -> Record:
    """Return a record; an empty one if the file is missing."""
    record: Record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return record


def totals(record: Record) -> Counter[str]:
    """Return the number of cases with each outcome."""
    counts: Counter[str] = Counter()
    for outcomes in record.values():
        counts.update(outcomes)
    return counts


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the record's file."""
    parser.addoption(
        "--gpu-record", type=Path, required=True, help="The file that records which tests ran on a device."
    )


def pytest_configure(config: pytest.Config) -> None:
    """Record the outcomes, except in the worker processes of pytest-xdist, which report to the first process."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config.getoption("--gpu-record")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort functions: first those that never passed, then those with a case that failed or did not begin."""
    record = read_record(config.getoption("--gpu-record"))

    def rank(item: pytest.Item) -> int:
        outcomes = record.get(function_of(item.nodeid), {})
        if not outcomes.get("passed"):
            return 0
        return 1 if outcomes.get("failed") or outcomes.get("not begun") else 2

    items.sort(key=rank)


class Recorder:
    """Counts the outcomes of a run."""

    def __init__(self, path: Path) -> None:
        """Start without outcomes."""
        self._path = path
        self._outcomes: dict[str, str] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Expect the collected cases; a process with workers collects none itself."""
        self._expect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        """Expect the cases that a worker collected."""
        self._expect(ids)

    def _expect(self, ids: Sequence[str]) -> None:
        for node_id in ids:
            self._outcomes.setdefault(node_id, "not begun")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the outcome of a case: that of its call, unless its set-up or its clean-up went wrong."""
        if report.when == "call" or not report.passed:
            self._outcomes[report.nodeid] = report.outcome

    def pytest_sessionfinish(self) -> None:
        """Write the record."""
        counts: dict[str, Counter[str]] = {}
        for node_id, outcome in self._outcomes.items():
            counts.setdefault(function_of(node_id), Counter())[outcome] += 1
        record = {**read_record(self._path), **{name: dict(count) for name, count in counts.items()}}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n", encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """List the functions that did not begin."""
        waiting = Counter(function_of(name) for name, outcome in self._outcomes.items() if outcome == "not begun")
        if waiting:
            terminalreporter.section("tests that did not begin")
            for name, count in sorted(waiting.items()):
                terminalreporter.line(f"{count:6} {name}")
