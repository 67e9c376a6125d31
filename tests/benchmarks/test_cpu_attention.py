"""The benchmark of attention on a CPU counts what a step reads and computes, runs, and its page shows every figure."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.attention import cpu, cpu_systems, shapes
from tests.benchmarks.calling import call, page_of, record_of

TINY = ("tiny-decode", "tiny-window", "tiny-mixed")


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return call("attention.cpu", "--rounds", "2", "--threads", "1", *options, forks=False)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    shapes = [option for name in TINY for option in ("--shape", name)]
    done = run("--system", "torch", "--system", "mla", "--results", str(folder), *shapes)
    assert done.returncode == 0, done.stderr
    return folder


def shapes_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = record_of("cpu_attention", folder)["shapes"]
    return found


def test_every_shape_is_measured_in_every_round(results: Path) -> None:
    shapes = shapes_of(results)
    assert TINY == tuple(shapes)
    for measured in shapes.values():
        values = measured["systems"]["torch"]
        assert [2, 2, 2] == [len(values[name]) for name in ("seconds", "metadata_seconds", "share")]
        assert 2 == len(measured["ceiling"])


def test_what_a_system_refuses_is_said_and_not_measured(results: Path) -> None:
    assert [["torch"]] * 3 == [[*measured["systems"]] for measured in shapes_of(results).values()]
    page = page_of("cpu_attention", results)
    assert 3 == page.count("Not measured: mla (")


def test_outputs_are_compared_with_the_reference(results: Path) -> None:
    errors = {name: each["systems"]["torch"]["error"] for name, each in shapes_of(results).items()}
    assert 0 < errors["tiny-decode"] < 1e-6
    assert 1e-6 < errors["tiny-window"] < 1e-2  # bfloat16


def test_an_engine_that_is_not_installed_is_asked_for_by_one_line(tmp_path: Path) -> None:
    done = run("--system", "vllm", "--peer", str(tmp_path), "--shape", "tiny-decode", "--results", str(tmp_path))
    assert 2 == done.returncode
    assert f"vLLM is not in {tmp_path}; run make peer" in done.stderr


# --- what a step has to read and compute ------------------------------------------------------------------------------


def test_a_decode_reads_every_key_and_value_once() -> None:
    shape = shapes.Shape(name="", kind="decode", requests=((2047, 1),) * 16, dtype="float32")
    assert 16 * 2048 * 2 * 8 * 128 * 4 == shape.kv_bytes()
    assert 4 * 16 * 2048 * 32 * 128 == shape.num_flops


def test_a_window_reads_what_it_covers() -> None:
    shape = shapes.Shape(name="", kind="decode", requests=((99, 1), (4, 1)), dtype="bfloat16", window=32)
    assert (32 + 5) * 2 * 8 * 128 * 2 == shape.kv_bytes()
    table = cpu_systems.block_table(shape)
    assert [0, 0, 0, 0] == table[0, :4].tolist()
    assert 0 not in table[0, 4:].tolist()


def test_a_prefill_computes_half_of_the_square() -> None:
    shape = shapes.Shape(name="", kind="prefill", requests=((0, 2048),), dtype="float32")
    assert 4 * (2048 * 2049 // 2) * 32 * 128 == shape.num_flops


def test_every_standard_shape_is_named_once_and_its_pages_are_all_different() -> None:
    standard = [shape for shape in cpu.SHAPES if "tiny" not in shape.name]
    assert len(standard) == len({shape.name for shape in standard})
    for shape in standard:
        ids = cpu_systems.block_table(shape).flatten()
        ids = ids[ids > 0]
        assert len(ids) == len(ids.unique())
        assert int(ids.max()) < cpu_systems.num_pages(shape)
