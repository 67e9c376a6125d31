"""Finds the C++ kernels for this machine: compiled in the wheel, or compiled once into the user's cache folder."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path

from kvframe_kernels.cpu.variants import CPU_FACTS, FLAGS, SOURCES, find_library

COMPILERS = ("c++", "g++", "clang++")
NATIVE_FLAGS = ("-march=native",)
TIMEOUT_S = 300


class BuildError(Exception):
    """The kernels cannot be built on this machine; the message says why in one sentence."""


def cache_folder() -> Path:
    """Return the folder of compiled kernels: ``KVFRAME_KERNELS_CACHE``, or a folder in the user's cache folder."""
    if folder := os.environ.get("KVFRAME_KERNELS_CACHE"):
        return Path(folder)
    return user_cache_path("kvframe", appauthor=False) / "kernels"


def find_compiler() -> str | None:
    """Return the path of the C++ compiler: ``CXX``, or the first usual one that is found; None if there is none."""
    compiler = os.environ.get("CXX")
    return next((path for name in ([compiler] if compiler else COMPILERS) if (path := shutil.which(name))), None)


def load_library() -> ctypes.CDLL:
    """Return the compiled kernels for this machine: the wheel's, or those of the cache; build them if there are none.

    The outcome is kept for the whole process.

    Raises:
        BuildError: There is no compiler, it fails, or its library cannot be loaded.
    """
    library = _try_to_load()
    if isinstance(library, BuildError):
        raise library
    return library


@functools.cache
def _try_to_load() -> ctypes.CDLL | BuildError:
    # torch's thread pool must be loaded first, because the library looks it up among the process's symbols.
    import torch  # noqa: F401

    if library := find_library():
        with suppress(OSError):  # made for another C library
            return ctypes.CDLL(str(library))
    try:
        return ctypes.CDLL(str(build(NATIVE_FLAGS)))
    except BuildError as error:
        failure = error
    except OSError as error:
        failure = BuildError(f"its compiled kernels do not load: {error}")
    print(f"kvframe-kernels: no compiled attention for this CPU: {failure}", file=sys.stderr, flush=True)
    return failure


def build(machine_flags: Sequence[str]) -> Path:
    """Return the library of these flags, from the cache; compile it if it is not there.

    Processes that want the same library at once wait for the first of them. A build is reported in one line on stderr.

    Args:
        machine_flags: The compiler's flags for this machine.

    Raises:
        BuildError: There is no compiler, it fails, or the cache folder cannot be written to.
    """
    compiler = find_compiler()
    if compiler is None:
        names = os.environ.get("CXX") or ", ".join(COMPILERS)
        raise BuildError(f"there is no C++ compiler to build its kernels with ({names})")
    library = cache_folder() / f"cpu-{fingerprint(compiler, machine_flags)}.so"
    if _is_whole(library):
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(library.with_suffix(".lock")):
            if not _is_whole(library):
                _compile(compiler, machine_flags, library)
    except (OSError, NotImplementedError) as error:  # some file systems have no locks
        raise BuildError(f"its kernels cannot be built in {library.parent}: {error}") from error
    return library


def fingerprint(compiler: str, machine_flags: Sequence[str]) -> str:
    """Return a digest of all that a library depends on: sources, flags, the compiler and the machine's processor."""
    parts = [path.name.encode() + b"\n" + path.read_bytes() for path in sorted(SOURCES.iterdir())]
    where = Path(compiler).resolve()
    stat = where.stat()
    parts += [" ".join((*FLAGS, *machine_flags)).encode(), f"{where} {stat.st_size} {stat.st_mtime_ns}".encode()]
    parts.append(_processor().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def _processor() -> str:
    """Return a text that changes with the processor's instruction sets."""
    try:
        lines = CPU_FACTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    prefixes = ("model name", "flags", "Features", "CPU part")
    lines_by_name = {line.partition(":")[0].strip(): line for line in lines if line.startswith(prefixes)}
    return f"{platform.system()} {platform.machine()} {platform.processor()} {sorted(lines_by_name.values())}"


def _is_whole(library: Path) -> bool:
    """Return whether the library in the cache is complete: loading an incomplete one would end the process."""
    try:
        return _digest(library) == _digest_file(library).read_text(encoding="ascii")
    except (OSError, ValueError):
        return False


def _digest(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _digest_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _compile(compiler: str, machine_flags: Sequence[str], library: Path) -> None:
    print(
        f"kvframe-kernels: compiling attention for this CPU with {compiler}, once (about 20 s)",
        file=sys.stderr,
        flush=True,
    )
    started = time.monotonic()
    # Compiled in a temporary folder and then renamed, so that no process loads an incomplete library.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        new_library = Path(folder) / library.name
        command = [compiler, *FLAGS, *machine_flags, "-o", str(new_library), str(SOURCES / "attention.cpp")]
        if sys.platform == "darwin":
            command += ["-undefined", "dynamic_lookup"]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise BuildError(f"{compiler} took more than {TIMEOUT_S} s to compile its kernels") from None
        if result.returncode:
            lines = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()
            raise BuildError(f"{compiler} cannot compile its kernels: {lines[0] if lines else 'it says nothing'}")
        _digest_file(new_library).write_text(_digest(new_library), encoding="ascii")
        os.replace(_digest_file(new_library), _digest_file(library))
        os.replace(new_library, library)
    print(f"kvframe-kernels: compiled in {time.monotonic() - started:.0f} s, kept in {library}", file=sys.stderr)
