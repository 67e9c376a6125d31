"""A wheel may hold compiled kernels: the fastest that the processor can run are taken, before any are compiled."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvframe_kernels.cpu import build, variants
from kvframe_kernels.cpu.build import BuildError

KERNELS = Path(__file__).resolve().parents[1]
NAMES = {machine: [variant.name for variant in builds] for machine, builds in variants.VARIANTS.items()}
OLD = "sse2 ssse3 avx"
AVX2 = f"{OLD} avx2 fma f16c bmi1 bmi2 movbe abm"
AVX512 = f"{AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.fixture(autouse=True)
def _found_out_anew() -> Iterator[None]:
    build._try_to_load.cache_clear()
    yield
    build._try_to_load.cache_clear()


@pytest.fixture
def lib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a wheel for both machines, whose libraries are empty."""
    monkeypatch.setattr(variants, "LIBRARIES", tmp_path / "lib")
    monkeypatch.setattr(variants, "CPU_FACTS", tmp_path / "cpuinfo")
    (tmp_path / "lib").mkdir()
    for names in NAMES.values():
        for name in names:
            (tmp_path / "lib" / f"{name}.so").touch()
    return tmp_path / "lib"


def run_on(lib: Path, monkeypatch: pytest.MonkeyPatch, machine: str, line: str) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    (lib.parent / "cpuinfo").write_text(f"processor\t: 0\nmodel name\t: any\n{line}\n\nprocessor\t: 1\n{line}\n")


@pytest.mark.parametrize(
    ("machine", "line", "name"),
    [
        ("x86_64", f"flags\t\t: fpu {AVX512} avx512_bf16 avx512vbmi amx_tile", "avx512_bf16"),
        ("x86_64", f"flags\t\t: fpu {AVX512} avx512_bf16", "avx512"),
        ("x86_64", f"flags\t\t: fpu {AVX512}", "avx512"),
        ("x86_64", f"flags\t\t: fpu {AVX2} avx512f", "avx2"),
        ("x86_64", f"flags\t\t: fpu {OLD}", None),
        ("aarch64", "Features\t: fp asimd evtstrm", "neon"),
        ("riscv64", "isa\t\t: rv64imafdc", None),
    ],
)
def test_the_fastest_kernels_are_taken_that_the_processor_can_run(
    machine: str, line: str, name: str | None, lib: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_on(lib, monkeypatch, machine, line)
    assert (None if name is None else lib / f"{name}.so") == variants.find_library()


def test_kernels_that_the_wheel_lacks_are_passed_over(lib: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_on(lib, monkeypatch, "x86_64", f"flags\t\t: {AVX512}")
    (lib / "avx512.so").unlink()
    assert lib / "avx2.so" == variants.find_library()
    shutil.rmtree(lib)
    assert variants.find_library() is None


def test_a_system_that_names_no_instructions_has_none(lib: Path) -> None:
    assert set() == variants.instructions()
    assert variants.find_library() is None


@pytest.mark.skipif(build.find_compiler() is None, reason="there is no C++ compiler here")
def test_the_kernels_of_the_wheel_need_no_compiler(lib: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_on(lib, monkeypatch, "x86_64", f"flags\t\t: {AVX512}")
    (lib / "any.c").write_text("int number(void) { return 512; }\n")
    command = [str(build.find_compiler()), "-shared", "-fPIC", "-x", "c", str(lib / "any.c")]
    subprocess.run([*command, "-o", str(lib / "avx512.so")], check=True)
    monkeypatch.setenv("CXX", "none")
    assert 512 == build.load_library().number()


def test_kernels_that_do_not_load_are_compiled(lib: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_on(lib, monkeypatch, "x86_64", f"flags\t\t: {AVX512}")
    monkeypatch.setenv("CXX", "none")
    with pytest.raises(BuildError, match="there is no C\\+\\+ compiler"):
        build.load_library()


@pytest.mark.parametrize("machine", NAMES)
def test_a_wheel_of_a_machine_holds_each_variant_for_every_version_of_python(machine: str, tmp_path: Path) -> None:
    names = build_wheel(tmp_path, KVFRAME_KERNELS_PREBUILT="1", KVFRAME_KERNELS_MACHINE=machine)
    (wheel,) = (name for name in names if name.endswith(".whl"))
    assert wheel.startswith("kvframe_kernels-")
    assert "-py3-none-" in wheel
    assert not wheel.endswith("-any.whl")
    libraries = {f"kvframe_kernels/cpu/lib/{name}.so" for name in NAMES[machine]}
    assert libraries == {name for name in names if name.endswith(".so")}
    calls = (tmp_path / "calls").read_text().splitlines()
    for variant, call in zip(variants.VARIANTS[machine], calls, strict=True):
        assert {*variants.FLAGS, *variant.flags} <= {*call.split()}


def test_the_wheel_of_all_other_machines_compiles_nothing(tmp_path: Path) -> None:
    names = build_wheel(tmp_path)
    assert ["-py3-none-any.whl"] == [name[-17:] for name in names if name.endswith(".whl")]
    assert [] == [name for name in names if name.endswith(".so")]
    assert "kvframe_kernels/cpu/src/attention.cpp" in names
    assert not (tmp_path / "calls").exists()


def build_wheel(folder: Path, **environment: str) -> list[str]:
    """Build a wheel with a compiler that makes empty libraries; return its name and those of its files."""
    compiler = folder / "c++"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n')
    compiler.chmod(0o755)
    source = folder / "kernels"
    shutil.copytree(KERNELS, source, ignore=shutil.ignore_patterns("*.egg-info", "build", "tests", "__pycache__"))
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        cwd=source,
        env={**os.environ, "CXX": str(compiler), **environment},
        check=True,
        capture_output=True,
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return [wheel.name, *archive.namelist()]
