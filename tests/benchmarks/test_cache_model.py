"""The long run of the cache against its definition is recorded and told, its failures too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.cache import definition
from kvframe.cache.manager import KVCacheManager
from tests.benchmarks.calling import page_of, record_of


def run(folder: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    arguments = ["--operations", "1000", "--seed", "4", "--results", str(folder), *options]
    answer = CliRunner().invoke(definition.main, arguments)
    record = record_of("cache_model", folder)
    return answer.exit_code, record, page_of("cache_model", folder)


def test_every_operation_is_counted(tmp_path: Path) -> None:
    code, record, page = run(tmp_path)
    assert (0, {}) == (code, record["failures"])
    assert 1000 <= record["operations"] == sum(record["verbs"].values())
    assert f"{record['operations']:,} operations" in page


def test_processes_share_the_seeds(tmp_path: Path) -> None:
    code, record, _ = run(tmp_path, "--processes", "2")
    assert (0, {}) == (code, record["failures"])
    assert 1000 <= record["operations"] == sum(record["verbs"].values())
    assert record["seeds"] >= record["processes"] == 2


def test_a_failure_names_its_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCacheManager, "commit", lambda *_: None)
    code, record, page = run(tmp_path)
    assert code == 1
    assert "4" in record["failures"]
    assert "| 4 | event " in page


def test_ten_million_operations_are_recorded_without_a_failure() -> None:
    record = record_of("cache_model")
    assert {} == record["failures"]
    assert 10_000_000 <= record["operations"] == sum(record["verbs"].values())
