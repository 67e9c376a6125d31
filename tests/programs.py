"""Runs a Python program in a process of its own that has imported torch and transformers before it began.

The processes are forks of one that only imports, so a program takes the time of its work. A test whose subject is what
a process imports starts an interpreter instead.
"""

from __future__ import annotations

import atexit
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
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from multiprocessing import connection, reduction
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

_FORK = multiprocessing.get_context("fork")
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["kvframe_engine.engine", "kvframe_transformers.adapter", "kvframe_transformers.testing"])

IMPORTED = ("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning")
"""Options of pytest as a program: some of its plugins are imported already."""


def run_program(
    *arguments: str,
    cwd: Path = ROOT,
    timeout: float = 280,
    environment: Mapping[str, str] | None = None,
    packages: Path | None = None,
    executable: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS``: a file, or ``-m`` and a module, or ``-c`` and its text.

    Args:
        arguments: The arguments.
        cwd: Where it runs.
        timeout: How many seconds it may take.
        environment: Its environment variables; those of this process unless given.
        packages: A folder of installed packages that it finds besides those of this process.
        executable: Its ``sys.executable``, which the processes that it starts run; that of this process unless given.

    Returns:
        Its exit code, output and error as text.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        files = {1: out.fileno(), 2: err.fileno()}
        process = start_program(
            arguments, files, cwd=cwd, environment=environment, packages=packages, executable=executable
        )
        process.join(timeout)
        is_late = process.exitcode is None
        if is_late:
            process.kill()
            process.join()
        shown = []
        for stream in (out, err):
            stream.seek(0)
            shown.append(stream.read())
        if is_late:
            raise subprocess.TimeoutExpired(arguments, timeout, *shown)
        assert process.exitcode is not None
        return subprocess.CompletedProcess(arguments, process.exitcode, *shown)


def start_program(
    arguments: Sequence[str],
    files: Mapping[int, int],
    *,
    cwd: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    packages: Path | None = None,
    executable: Path | None = None,
) -> BaseProcess:
    """Start ``python ARGUMENTS`` as ``run_program`` does, with open files by their numbers there: 0, 1 and 2."""
    inherited = {number: _Inherited(file) for number, file in files.items()}
    environment = dict(os.environ if environment is None else environment)
    process = _FORKS.Process(target=_run, args=(arguments, cwd, inherited, environment, packages, executable))
    process.start()
    return process


class _Inherited:
    """An open file of this process, whose number in another process is what that one unpickles."""

    def __init__(self, file: int) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return _number_of, (reduction.DupFd(self._file),)


def _number_of(duplicate: Any) -> Any:
    return duplicate.detach()


def _run(
    arguments: Sequence[str],
    cwd: Path,
    files: Mapping[int, int],
    environment: Mapping[str, str],
    packages: Path | None,
    executable: Path | None = None,
) -> None:
    for number, file in files.items():
        os.dup2(file, number)
        os.close(file)
        name, mode = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))[number]
        # The stream that was made for another kind of file would seek in a pipe.
        setattr(sys, name, os.fdopen(number, mode, buffering=1, closefd=False))
    if executable is not None:
        sys.executable = str(executable)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in environment
    if packages is not None:
        sys.path.append(str(packages))
        for path in sorted(packages.glob("__editable__*.pth")):
            site.addpackage(str(packages), path.name, None)
        importlib.invalidate_caches()
    warnings.resetwarnings()
    warnings.simplefilter("ignore", DeprecationWarning)  # as Python does outside of the main module
    if arguments[0] == "-u":
        arguments = arguments[1:]  # no line stays in a buffer anyway
    kind = arguments[0] if arguments[0] in ("-m", "-c") else ""
    sys.argv = [kind, *arguments[2:]] if kind else [*arguments]
    sys.path.insert(0, str(cwd) if kind else str(Path(arguments[0]).parent.resolve()))
    if kind == "-m":
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif kind == "-c":
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
    """Write shell commands into a folder; each runs ``python ARGUMENTS`` with those of the shell.

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
            _FORK.Process(target=_answer, args=(listener, asked, packages)).start()


def _answer(listener: socket.socket, asked: socket.socket, packages: Path) -> None:
    listener.close()
    start, files, _, _ = socket.recv_fds(asked, 4, 3)
    with asked.makefile("rb") as stream:
        arguments, cwd, environment = json.loads(stream.read(int.from_bytes(start)))
    program = _FORK.Process(target=_run, args=(arguments, Path(cwd), dict(enumerate(files)), environment, packages))
    program.start()
    for file in files:
        os.close(file)
    # The connection ends before the program does if a signal ended the command of the shell.
    if program.sentinel not in connection.wait([program.sentinel, asked]):
        program.terminate()
    program.join()
    assert program.exitcode is not None
    with suppress(BrokenPipeError):
        asked.sendall(b"%d" % (program.exitcode if program.exitcode >= 0 else 128 - program.exitcode))


@cache
def python_in_forks() -> Path:
    """Return an interpreter for the processes that a program starts, which are forks too, beside the other commands."""
    stack = ExitStack()
    atexit.register(stack.close)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    for command in Path(sys.executable).parent.iterdir():
        (folder / command.name).symlink_to(command)
    stack.enter_context(commands_in_forks(folder, {"python": ()}, folder))
    return folder / "python"
