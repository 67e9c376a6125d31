"""Keeps the command line's own output apart from what plugins, libraries and subprocesses print."""

from __future__ import annotations

import io
import os
import sys


def keep_output_apart() -> None:
    """Let only ``sys.stdout`` write to the process's standard output; redirect all other output there to stderr.

    C code and subprocesses print to file descriptor 1 even if ``sys.stdout`` is replaced. Their text would corrupt a
    JSON document. Nothing is done if ``sys.stdout`` is not that of the process, as in a test.
    """
    stdout = sys.stdout
    if stdout is not sys.__stdout__ or not isinstance(stdout, io.TextIOWrapper):
        return
    try:
        if (stdout.fileno(), sys.stderr.fileno()) != (1, 2):
            return
        stdout.flush()
        own_stdout = os.dup(1)
        os.dup2(2, 1)
    except (OSError, AttributeError):  # a closed stream
        return
    sys.stdout = io.TextIOWrapper(
        os.fdopen(own_stdout, "wb"),
        encoding=stdout.encoding,
        errors=stdout.errors,
        line_buffering=stdout.line_buffering,
    )
