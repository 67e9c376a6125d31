"""Runs a command and turns every failure into an exit code and one sentence."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import click

from kvframe.contract.errors import KVFrameError, shorten
from kvframe.contract.foreign import explain_failed_import

ERROR_EXIT_CODE = 2
"""Exit code for a user's mistake; click uses the same for wrong options."""

UNREAD_EXIT_CODE = 1
"""Exit code if the reader of the output is closed (``kvframe plugins | head -1``), which is not reported."""

BUG_EXIT_CODE = 70
"""Exit code for a bug in kvframe, after its traceback; ``EX_SOFTWARE`` of sysexits.h."""

INTERRUPTED_EXIT_CODE = 130
"""Exit code after Ctrl-C: 128 plus the number of the signal, as in shells."""

_MAX_SENTENCE = 2_000
_MAX_NEAR = 2
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EBADF, errno.EIO, errno.EFBIG, errno.EDQUOT, errno.EAGAIN)
_MEMORY_SIGNS = ("can't allocate memory", "not enough memory", "out of memory")


def run_guarded(command: Callable[[], Any]) -> int:
    """Run a command and return its exit code, which it returns itself, or 0.

    A user's mistake is reported in one line on stderr. A bug is reported as such, with its traceback.
    """
    _occupy_closed_streams()
    if sys.stdout is None:
        _say("error: standard output is closed, so there is nowhere to print to; redirect it to /dev/null")
        return ERROR_EXIT_CODE
    with _Interrupts() as interrupts:
        try:
            code = command()
            sys.stdout.flush()
        except SystemExit:
            raise
        except BaseException as error:
            # An interrupt during the import of a module may appear as another exception.
            if interrupts.came or isinstance(error, KeyboardInterrupt | click.Abort):
                _say("interrupted")
                _drop_output()
                return INTERRUPTED_EXIT_CODE
            return _report(error)
    return code if isinstance(code, int) else 0


def joined_lines(text: str) -> str:
    """Return a message as one printable line, without its middle if it is long."""
    line = "; ".join(content for part in text.splitlines() if (content := part.strip()))
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in shorten(line, _MAX_SENTENCE)
    )


def _report(error: BaseException) -> int:
    """Report an error; return the exit code."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return error.exit_code
    if isinstance(error, BrokenPipeError):
        _drop_output()
        return UNREAD_EXIT_CODE
    sentence = _sentence_of(error)
    if sentence is None:
        traceback.print_exception(error)
        _say("this is a bug of kvframe: please report the command and the lines above")
        return BUG_EXIT_CODE
    _say(f"error: {sentence}")
    return ERROR_EXIT_CODE


def _sentence_of(error: BaseException) -> str | None:
    """Return the sentence that a user reads about an error; None if the error is a bug."""
    if isinstance(error, KVFrameError):
        return str(error)
    import_failure = explain_failed_import(error, joined_lines(f"{type(error).__name__}: {error}"))
    if import_failure is not None:
        return import_failure
    if isinstance(error, click.ClickException):
        if isinstance(error, click.NoSuchOption) and error.possibilities:
            near = " or ".join(map(repr, sorted(error.possibilities)[:_MAX_NEAR]))
            return f"No such option {error.option_name!r}; did you mean {near}?"
        context = error.ctx if isinstance(error, click.UsageError) else None
        hint = "" if context is None else f"; see `{context.command_path} --help`"
        return f"{' '.join(error.format_message().split()).rstrip('.')}{hint}"
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        if isinstance(error.filename, str | bytes):
            return f"{os.fsdecode(error.filename)}: {reason}"
        _drop_output()
        # Errors of input files have the file's name, because these are opened by name.
        return f"standard output cannot be written: {reason}" if error.errno in _OUTPUT_ERRORS else reason
    if isinstance(error, MemoryError) or any(sign in str(error) for sign in _MEMORY_SIGNS):
        reason = joined_lines(str(error)).partition(";")[0]
        return f"there is not enough memory{reason and f': {reason}'}"
    return None


def _say(sentence: str) -> None:
    with suppress(OSError):  # if stderr is closed, the report is lost
        click.echo(f"kvframe: {joined_lines(sentence)}", err=True)


def _drop_output() -> None:
    """Flush the output. If that fails, drop it: Python would flush again at exit, and report the failure."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):
            number = sys.stdout.fileno()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)


def _is_typed_at() -> bool:
    """Return whether standard input is a terminal."""
    try:
        return os.isatty(0)
    except OSError:
        return False


def _occupy_closed_streams() -> None:
    """Open the null device for closed standard streams, so that no other file gets their descriptors."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115


class _Interrupts:
    """A context manager that records Ctrl-C, wherever it is raised. It has no effect outside the main thread.

    Attributes:
        came: Whether it was pressed.
    """

    def __init__(self) -> None:
        self.came = False
        self._before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            # A shell starts what runs in the background with Ctrl-C ignored. It ignores it unless somebody types here.
            if handler is signal.default_int_handler or (handler is signal.SIG_IGN and _is_typed_at()):
                self._before = signal.signal(signal.SIGINT, self._note)
            self._hook, sys.unraisablehook = sys.unraisablehook, self._try_again
        else:
            self._hook = sys.unraisablehook
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.unraisablehook = self._hook
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt

    def _try_again(self, hook_arguments: Any) -> None:
        """Send Ctrl-C again if it was raised where Python prints exceptions and continues, as in a weakref callback."""
        if issubclass(hook_arguments.exc_type, KeyboardInterrupt):
            timer = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT))
            timer.daemon = True
            timer.start()
        else:
            self._hook(hook_arguments)
