"""Runs a Python program in a process of its own that has imported torch and transformers before it began.

The processes are forks of one that only imports, so a program takes the time of its work. A test whose subject is what
a process imports starts an interpreter instead.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import runpy
import shlex
import site
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["kvframe.engine.engine", "kvframe_transformers.adapter", "kvframe_transformers.testing"])

PYTEST = ("-m", "pytest", "-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning")
"""The arguments that run pytest, some of whose plugins are imported already."""


def run_program(*arguments: str, cwd: Path = ROOT, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS``, a file or ``-m`` and a module; return its exit code, output and error as text."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = _FORKS.Process(target=_run_into, args=(arguments, cwd, out, err))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(arguments, timeout, out.read_text(), err.read_text())
        code = process.exitcode
        process.close()
        return subprocess.CompletedProcess(arguments, code, out.read_text(), err.read_text())


def _run_into(arguments: Sequence[str], cwd: Path, out: Path, err: Path) -> None:
    _run(arguments, cwd, {1: os.open(out, os.O_WRONLY | os.O_CREAT), 2: os.open(err, os.O_WRONLY | os.O_CREAT)})


def _run(arguments: Sequence[str], cwd: Path, files: Mapping[int, int]) -> None:
    for number, file in files.items():
        os.dup2(file, number)
        name, mode = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))[number]
        # The stream that was made for another kind of file would seek in a pipe.
        setattr(sys, name, os.fdopen(number, mode, buffering=1, closefd=False))
    os.chdir(cwd)
    warnings.resetwarnings()
    warnings.simplefilter("ignore", DeprecationWarning)  # as Python does outside of the main module
    kind = arguments[0] if arguments[0] in ("-m", "-c") else ""
    sys.argv = [*arguments[1:]] if kind == "-m" else [*arguments]
    sys.path.insert(0, str(cwd) if kind else str(Path(arguments[0]).parent.resolve()))
    if kind == "-m":
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(arguments[0], run_name="__main__")


# --- commands of a shell ----------------------------------------------------------------------------------------------

_ASK = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as asked:
    asked.connect(sys.argv[1])
    request = json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(asked, [len(request).to_bytes(4)], [0, 1, 2])
    asked.sendall(request)
    sys.exit(int(asked.recv(16)))
"""


@contextmanager
def commands_in_forks(folder: Path, commands: Mapping[str, Sequence[str]], packages: Path) -> Iterator[None]:
    """Write shell commands into a folder; each runs ``python ARGUMENTS`` with those of the shell, one at a time.

    Args:
        folder: Where the commands are.
        commands: The first arguments by the command's name; none for ``python`` itself.
        packages: A folder of installed packages that the programs find besides those of this process.
    """
    with tempfile.TemporaryDirectory() as short:
        address = Path(short, "ask")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
            listener.listen()
            server = _FORKS.Process(target=_serve, args=(listener, packages))
            server.start()
        try:
            for name, arguments in commands.items():
                ask = shlex.join([sys.executable, "-ISc", _ASK, str(address), *arguments])
                (folder / name).unlink(missing_ok=True)
                (folder / name).write_text(f'#!/bin/sh\nexec {ask} "$@"\n')
                (folder / name).chmod(0o755)
            yield
        finally:
            server.kill()
            server.join()


def _serve(listener: socket.socket, packages: Path) -> None:
    while True:
        asked, _ = listener.accept()
        with asked:
            start, files, _, _ = socket.recv_fds(asked, 4, 3)
            with asked.makefile("rb") as stream:
                arguments, cwd, environment = json.loads(stream.read(int.from_bytes(start)))
            fork = multiprocessing.get_context("fork").Process(
                target=_run_command, args=(arguments, Path(cwd), files, environment, packages)
            )
            fork.start()
            for file in files:
                os.close(file)
            fork.join()
            assert fork.exitcode is not None
            asked.sendall(b"%d" % (fork.exitcode if fork.exitcode >= 0 else 128 - fork.exitcode))


def _run_command(
    arguments: Sequence[str], cwd: Path, files: Sequence[int], environment: Mapping[str, str], packages: Path
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in environment
    sys.path.append(str(packages))
    for path in sorted(packages.glob("__editable__*.pth")):
        site.addpackage(str(packages), path.name, None)
    importlib.invalidate_caches()
    _run(arguments, cwd, dict(enumerate(files)))
