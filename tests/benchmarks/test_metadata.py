"""The benchmark of metadata runs, and its page shows every figure."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PARTS = (
    "chunked_local, 64 requests, decodes",
    "chunked_local, 64 requests, mixed",
    "chunked_local, 256 requests, decodes",
    "chunked_local, 256 requests, mixed",
    "decode_only, 256 requests, idle",
    "decode_only, 256 requests, armed",
    "ten groups, windows 32 to 288, 256 requests, decodes",
    "ten groups, windows 32 to 288, 256 requests, mixed",
    "ten groups, windows 16 to 4,096, 256 requests, decodes",
    "ten groups, windows 16 to 4,096, 256 requests, mixed",
    "ten groups, all windows of 256, 256 requests, decodes",
    "ten groups, nothing built, 256 requests, decodes",
    "ten groups, nothing built, 256 requests, mixed",
    "triton, ten groups, windows 32 to 288, 256 requests, decodes",
    "triton, ten groups, windows 32 to 288, 256 requests, mixed",
    "triton, ten groups, windows 16 to 4,096, 256 requests, decodes",
    "triton, ten groups, windows 16 to 4,096, 256 requests, mixed",
    "triton, one group's share, 256 requests, decodes",
    "triton, one group's share, 256 requests, mixed",
)


def parts_of(path: Path) -> dict[str, Any]:
    parts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["parts"]
    return parts


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    command = [sys.executable, str(BENCHMARKS / "metadata.py"), "--repeats", "1", "--results", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_part_is_measured_beside_a_dense_operation(results: Path) -> None:
    parts = parts_of(results / "metadata.json")
    assert PARTS == tuple(parts)
    for part in parts.values():
        assert [1, 1] == [len(part["microseconds"]), len(part["dense_microseconds"])]
        assert part["microseconds"][0] / part["dense_microseconds"][0] == part["times_dense"]


def test_the_record_says_where_and_how(results: Path) -> None:
    machine = json.loads((results / "metadata.json").read_text(encoding="utf-8"))["machine"]
    assert {"processor", "cores", "threads", "python", "torch", "numpy", "kvframe", "command"} <= set(machine)
    assert "python benchmarks/metadata.py --repeats 1" == machine["command"]


def test_the_page_shows_every_figure(results: Path) -> None:
    page = (results / "metadata.md").read_text(encoding="utf-8")
    assert list(PARTS) == re.findall(r"^\| ([^|µ]*[a-z]) \|(?: [^|]* \|){5}$", page, re.M)


def test_an_idle_wrapper_uploads_nothing_and_chunks_at_most_4_kb(results: Path) -> None:
    parts = parts_of(results / "metadata.json")
    assert 0 == parts["decode_only, 256 requests, idle"]["uploaded_bytes"]
    assert 4096 >= max(part["uploaded_bytes"] for name, part in parts.items() if name.startswith("chunked_local"))


def test_the_recorded_run_measured_the_same_parts() -> None:
    record = json.loads((BENCHMARKS / "results" / "metadata.json").read_text(encoding="utf-8"))
    assert PARTS == tuple(record["parts"])
    assert 7 <= record["repeats"]
