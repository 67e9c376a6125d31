"""The benchmark of attention on a CPU counts what a step reads and computes, runs, and its page shows every figure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TINY = ("tiny-decode", "tiny-window", "tiny-mixed")


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "cpu_attention.py"), "--rounds", "2", "--threads", "1", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    shapes = [option for name in TINY for option in ("--shape", name)]
    done = run("--system", "torch", "--system", "naive", "--results", str(folder), *shapes)
    assert done.returncode == 0, done.stderr
    return folder


def record_of(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "cpu_attention.json").read_text(encoding="utf-8"))
    return record


def test_every_shape_is_measured_in_every_round(results: Path) -> None:
    shapes = record_of(results)["shapes"]
    assert TINY == tuple(shapes)
    for measured in shapes.values():
        values = measured["systems"]["torch"]
        assert [2, 2, 2] == [len(values[name]) for name in ("seconds", "metadata_seconds", "share")]
        assert 2 == len(measured["ceiling"])


def test_what_a_system_refuses_is_said_and_not_measured(results: Path) -> None:
    assert [["torch"]] * 3 == [[*measured["systems"]] for measured in record_of(results)["shapes"].values()]
    page = (results / "cpu_attention.md").read_text(encoding="utf-8")
    assert 3 == page.count("Not measured: naive (is for dense batches only).")


def test_outputs_are_compared_with_the_reference(results: Path) -> None:
    errors = {name: each["systems"]["torch"]["error"] for name, each in record_of(results)["shapes"].items()}
    assert 0 < errors["tiny-decode"] < 1e-6
    assert 1e-6 < errors["tiny-window"] < 1e-2  # bfloat16


def test_an_engine_that_is_not_installed_is_asked_for_by_one_line(tmp_path: Path) -> None:
    done = run("--system", "vllm", "--peer", str(tmp_path), "--shape", "tiny-decode", "--results", str(tmp_path))
    assert 2 == done.returncode
    assert f"vLLM is not in {tmp_path}; run make peer" in done.stderr


# --- what a step has to read and compute ------------------------------------------------------------------------------


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import attention_shapes

    return attention_shapes


def test_a_decode_reads_every_key_and_value_once(shapes: Any) -> None:
    shape = shapes.Shape(name="", kind="decode", requests=((2047, 1),) * 16, dtype="float32")
    assert 16 * 2048 * 2 * 8 * 128 * 4 == shape.read_bytes
    assert 4 * 16 * 2048 * 32 * 128 == shape.num_flops


def test_a_window_reads_what_it_covers(shapes: Any) -> None:
    shape = shapes.Shape(name="", kind="decode", requests=((99, 1), (4, 1)), dtype="bfloat16", window=32)
    assert (32 + 5) * 2 * 8 * 128 * 2 == shape.read_bytes
    table = shape.block_table()
    assert [0, 0, 0, 0] == table[0, :4].tolist()
    assert 0 not in table[0, 4:].tolist()


def test_a_prefill_computes_half_of_the_square(shapes: Any) -> None:
    shape = shapes.Shape(name="", kind="prefill", requests=((0, 2048),), dtype="float32")
    assert 4 * (2048 * 2049 // 2) * 32 * 128 == shape.num_flops


def test_every_standard_shape_is_named_once_and_its_pages_are_all_different(shapes: Any) -> None:
    standard = shapes.standard_shapes()
    assert len(standard) == len({shape.name for shape in standard})
    for shape in standard:
        ids = shape.block_table().flatten()
        ids = ids[ids > 0]
        assert len(ids) == len(ids.unique())
        assert int(ids.max()) < shape.num_pages
