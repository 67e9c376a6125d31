"""The C++ kernels are compiled once, by one process; if that is not possible, one sentence says why."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvframe_kernels.cpu import build
from kvframe_kernels.cpu.build import BuildError

COMPILER = build.find_compiler()


@pytest.fixture(autouse=True)
def _found_out_anew() -> Iterator[None]:
    build._try_to_load.cache_clear()
    yield
    build._try_to_load.cache_clear()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache folder, with a compiler that makes an empty library and counts its calls."""
    compiler = tmp_path / "bin" / "counting-c++"
    compiler.parent.mkdir()
    compiler.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n[ -z "$SLOWLY" ] || sleep 0.3\n'
        'while [ "$1" != -o ]; do shift; done\n: > "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("KVFRAME_KERNELS_CACHE", str(tmp_path / "cache"))
    return tmp_path


def calls(folder: Path) -> int:
    file = folder / "calls"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_it_is_compiled_once_with_a_line_at_either_end(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = build.build(["-march=native"])
    assert first.parent == cache / "cache"
    begun, ended = capsys.readouterr().err.splitlines()
    assert f"kvframe-kernels: compiling attention for this CPU with {os.environ['CXX']}, once (about 20 s)" == begun
    assert f"kvframe-kernels: compiled in 0 s, kept in {first}" == ended
    assert first == build.build(["-march=native"])
    assert ("", "") == capsys.readouterr()
    assert 1 == calls(cache)


def test_processes_that_start_together_compile_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOWLY", "1")
    code = "from kvframe_kernels.cpu.build import build; print(build(['-march=native']))"
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = {process.communicate(timeout=60)[0] for process in started}
    assert [0, 0, 0] == [process.returncode for process in started]
    assert 1 == len(printed) == calls(cache)


@pytest.mark.parametrize("what", ["flags", "sources", "compiler", "processor"])
def test_what_the_library_depends_on_tells_it_apart(
    what: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, flags = build.build(["-march=native"]), ["-march=native"]
    if what == "flags":
        flags = ["-march=x86-64"]
    elif what == "sources":
        changed = tmp_path / "src"
        changed.mkdir()
        for path in build.SOURCES.iterdir():
            (changed / path.name).write_bytes(path.read_bytes() + b"\n")
        monkeypatch.setattr(build, "SOURCES", changed)
    elif what == "compiler":
        compiler = Path(os.environ["CXX"])
        compiler.write_text(compiler.read_text() + "# another version\n")
    else:
        monkeypatch.setattr(build, "_processor", lambda: "another")
    assert first != build.build(flags)
    assert 2 == calls(cache)


def test_without_a_compiler_one_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    for _ in range(2):
        with pytest.raises(BuildError) as raised:
            build.load_library()
        assert "there is no C++ compiler to build its kernels with (c++, g++, clang++)" == str(raised.value)
    # Reported once, for any number of calls.
    assert f"kvframe-kernels: no compiled attention for this CPU: {raised.value}\n" == capsys.readouterr().err


def test_a_compiler_that_fails_is_quoted(cache: Path) -> None:
    compiler = Path(os.environ["CXX"])
    compiler.write_text(
        '#!/bin/sh\necho "note: nothing" >&2\necho "attention.cpp:1: error: no such header" >&2\nexit 1\n'
    )
    with pytest.raises(BuildError, match=r"cannot compile its kernels: attention\.cpp:1: error: no such header"):
        build.load_library()
    assert [] == [*(cache / "cache").glob("*.so")]


def test_a_library_that_does_not_load_is_no_library(cache: Path) -> None:
    with pytest.raises(BuildError, match="its compiled kernels do not load"):
        build.load_library()


@pytest.mark.parametrize("damage", ["cut short", "changed", "digest lost", "digest damaged"])
def test_a_library_that_is_damaged_in_the_cache_is_compiled_again(damage: str, cache: Path) -> None:
    compiler = Path(os.environ["CXX"])
    compiler.write_text(compiler.read_text().replace(': > "$2"', 'echo compiled > "$2"'))
    library = build.build(["-march=native"])
    if damage == "digest lost":
        library.with_suffix(".sha256").unlink()
    elif damage == "digest damaged":
        library.with_suffix(".sha256").write_bytes(b"\xff")
    else:
        library.write_text("comp" if damage == "cut short" else "compilee\n")
    assert library == build.build(["-march=native"]) == build.build(["-march=native"])
    assert "compiled\n" == library.read_text()
    assert 2 == calls(cache)


def test_a_cache_folder_that_cannot_be_made_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "file").touch()
    monkeypatch.setenv("KVFRAME_KERNELS_CACHE", str(cache / "file" / "cache"))
    with pytest.raises(BuildError, match=r"its kernels cannot be built in .*file/cache"):
        build.load_library()


def test_a_cache_folder_without_locks_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def acquire(*_: object, **__: object) -> None:
        raise NotImplementedError("no flock here")

    monkeypatch.setattr(build.FileLock, "acquire", acquire)
    with pytest.raises(BuildError, match=r"its kernels cannot be built in .*/cache: no flock here"):
        build.load_library()


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVFRAME_KERNELS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tmp_path / "kvframe" / "kernels" == build.cache_folder()


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler here")
def test_no_second_thread_pool_is_loaded_beside_torchs() -> None:
    code = """
import torch
from kvframe_kernels.cpu.build import load_library
load_library()
mapped = {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.rpartition("/")[2]}
print(len(mapped))
"""
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    assert "1" == subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()


def test_importing_the_kernels_compiles_nothing(cache: Path) -> None:
    subprocess.run([sys.executable, "-c", "import kvframe_kernels.cpu.attention"], check=True)
    assert 0 == calls(cache)
