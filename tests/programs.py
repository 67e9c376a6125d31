"""Runs a Python program in a process of its own that has imported torch and transformers before it began.

The processes are forks of one that only imports, so a program takes the time of its work. A test whose subject is what
a process imports starts an interpreter instead.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["kvframe.engine.engine", "kvframe_transformers.adapter", "kvframe_transformers.testing"])


def run_program(*arguments: str, cwd: Path = ROOT, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS``, a file or ``-m`` and a module; return its exit code, output and error as text."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = _FORKS.Process(target=_run, args=(arguments, cwd, out, err))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(arguments, timeout, out.read_text(), err.read_text())
        code = process.exitcode
        process.close()
        return subprocess.CompletedProcess(arguments, code, out.read_text(), err.read_text())


def _run(arguments: Sequence[str], cwd: Path, out: Path, err: Path) -> None:
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)  # sys.stdout and sys.stderr write to the numbers
    os.chdir(cwd)
    warnings.resetwarnings()
    warnings.simplefilter("ignore", DeprecationWarning)  # as Python does outside of the main module
    is_module = arguments[0] == "-m"
    sys.argv = [*arguments[is_module:]]
    sys.path.insert(0, str(cwd) if is_module else str(Path(arguments[0]).parent))
    if is_module:
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(arguments[0], run_name="__main__")
