"""Runs kernels such that an access to memory that is not theirs is found: C++, numba's loops, and interpreted Triton.

The C++ kernels are built with GCC's or Clang's sanitizers, which end the process at the first wrong access. Numba's
loops are compiled with checks of every index (``NUMBA_BOUNDSCHECK``), those of vectors included. Triton's interpreter
compares each address with the tensors of the launch.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kvframe_kernels.cpu import build
from kvframe_kernels.triton import attention_native

SANITIZERS = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


def sanitizer_environment() -> Mapping[str, str] | None:
    """Return the environment of a process that loads such kernels; None if the compiler lacks the sanitizers."""
    compiler = build.find_compiler()
    if compiler is None:
        return None
    libraries = []
    # The sanitizer looks up how exceptions are thrown before anything else is loaded.
    for name in ("libasan.so", "libstdc++.so"):
        found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=False)
        libraries.append(Path(found.stdout.strip()))
    if not all(library.is_absolute() for library in libraries):
        return None
    return {
        **os.environ,
        # The sanitizer must be the first library of the process. Python's own allocator would hide its memory from it.
        "LD_PRELOAD": " ".join(str(library.resolve()) for library in libraries),
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
    }


def build_sanitized(machine: str) -> Path:
    """Return the library of the C++ kernels with sanitizers; compile it unless it is in the cache.

    Args:
        machine: The processor to compile for, as the compiler names it (``"native"``, ``"x86-64-v3"``).
    """
    return build.build((f"-march={machine}", *SANITIZERS))


def use_library(path: Path) -> None:
    """Let this process's C++ kernels be those of a library."""
    library = ctypes.CDLL(str(path))
    vars(build)["_try_to_load"] = lambda: library


def build_sanitized_plan(folder: Path) -> Path:
    """Return the module of the C code that plans Triton's steps, compiled into a folder, with sanitizers."""
    compiler = build.find_compiler()
    assert compiler is not None
    source, module = folder / "plan.c", folder / f"kvframe_kernels_plan{sysconfig.get_config_var('EXT_SUFFIX')}"
    source.write_text(attention_native.source(), encoding="utf-8")
    include = sysconfig.get_paths()["include"]
    command = [compiler, "-x", "c", "-shared", "-fPIC", *SANITIZERS, f"-I{include}", str(source), "-o", str(module)]
    subprocess.run(command, check=True)
    return module


def use_plan(path: Path) -> None:
    """Let this process plan Triton's steps by a module."""
    spec = importlib.util.spec_from_file_location("kvframe_kernels_plan", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(attention_native)["load"] = lambda: module


NUMBA_CHECKS = {"NUMBA_BOUNDSCHECK": "1"}
"""The environment of a process whose numba loops are checked; their cache must be another than that of usual ones."""


@contextmanager
def numba_errors_raised() -> Iterator[None]:
    """Raise what loops raise: numba's C callbacks cannot, and hand it to ``sys.unraisablehook``."""
    errors: list[BaseException] = []

    def note(unraisable: Any) -> None:
        errors.append(unraisable.exc_value)

    before, sys.unraisablehook = sys.unraisablehook, note
    try:
        yield
    finally:
        sys.unraisablehook = before
        # What else was raised follows from it.
        if errors:
            raise MemoryError("a loop reads or writes beside an array") from errors[0]


@contextmanager
def triton_addresses_checked() -> Iterator[None]:
    """Raise ``MemoryError`` if an interpreted kernel reads or writes an address outside of its launch's tensors."""
    from triton.runtime import interpreter

    known: dict[tuple[int, int], None] = {}
    wrong: list[str] = []
    builder_class = interpreter.InterpreterBuilder
    convert, load, store = (
        interpreter._implicit_cvt,
        builder_class.create_masked_load,
        builder_class.create_masked_store,
    )
    start = interpreter.GridExecutor.__call__

    def check(pointers: Any, mask: Any, what: str) -> None:
        addresses = pointers.data[np.broadcast_to(mask.data.astype(bool), pointers.data.shape)].astype(np.int64)
        if not addresses.size:
            return
        size = pointers.get_element_ty().primitive_bitwidth // 8
        is_inside = np.zeros(addresses.shape, bool)
        for first, stop in known:
            is_inside |= (addresses >= first) & (addresses + size <= stop)
        if not is_inside.all():
            wrong.append(f"a kernel {what} {(~is_inside).sum()} elements outside of its tensors")
            raise MemoryError(wrong[0])

    def begin(self: Any, *arguments: Any, **named: Any) -> Any:
        known.clear()
        wrong.clear()
        try:
            return start(self, *arguments, **named)
        except Exception as error:
            # The interpreter replaces every error of a kernel by an error of its own.
            if wrong:
                raise MemoryError(wrong[0]) from error
            raise

    def convert_and_note(argument: Any) -> Any:
        if isinstance(argument, torch.Tensor) and argument.numel():
            length = 1 + sum(
                (size - 1) * stride for size, stride in zip(argument.shape, argument.stride(), strict=True)
            )
            first = argument.data_ptr()
            known[first, first + length * argument.element_size()] = None
        return convert(argument)

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask, "reads")
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask, "writes")
        return store(self, pointers, value, mask, *rest)

    interpreter._implicit_cvt = convert_and_note
    builder_class.create_masked_load, builder_class.create_masked_store = checked_load, checked_store
    interpreter.GridExecutor.__call__ = begin
    try:
        yield
    finally:
        interpreter._implicit_cvt = convert
        builder_class.create_masked_load, builder_class.create_masked_store = load, store
        interpreter.GridExecutor.__call__ = start
