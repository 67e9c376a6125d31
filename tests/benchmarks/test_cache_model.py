"""The long run of the cache against its definition is recorded and told, its failures too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvframe.cache.manager import KVCacheManager

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield import_module("cache_model")


def run(benchmark: Any, folder: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    arguments = ["--operations", "1000", "--seed", "4", "--results", str(folder), *options]
    answer = CliRunner().invoke(benchmark.main, arguments)
    record = json.loads((folder / "cache_model.json").read_text(encoding="utf-8"))
    return answer.exit_code, record, (folder / "cache_model.md").read_text(encoding="utf-8")


def test_every_operation_is_counted(benchmark: Any, tmp_path: Path) -> None:
    code, record, page = run(benchmark, tmp_path)
    assert (0, {}) == (code, record["failures"])
    assert 1000 <= record["operations"] == sum(record["verbs"].values())
    assert f"{record['operations']:,} operations" in page


def test_processes_share_the_seeds(benchmark: Any, tmp_path: Path) -> None:
    code, record, _ = run(benchmark, tmp_path, "--processes", "2")
    assert (0, {}) == (code, record["failures"])
    assert 1000 <= record["operations"] == sum(record["verbs"].values())
    assert record["seeds"] >= record["processes"] == 2


def test_a_failure_names_its_seed(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCacheManager, "commit", lambda *_: None)
    code, record, page = run(benchmark, tmp_path)
    assert code == 1
    assert "4" in record["failures"]
    assert "| 4 | event " in page


def test_ten_million_operations_are_recorded_without_a_failure() -> None:
    record = json.loads((BENCHMARKS / "results" / "cache_model.json").read_text(encoding="utf-8"))
    assert {} == record["failures"]
    assert 10_000_000 <= record["operations"] == sum(record["verbs"].values())
