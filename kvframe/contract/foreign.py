"""Calls a plugin's code at set-up, and turns every exception of it into one ``PluginError``.

The error says what was called and why it failed. It replaces every exception, also ``SystemExit``, ``CancelledError``,
``GeneratorExit`` and a plugin's own ``BaseException``. Only ``KeyboardInterrupt`` passes, because it comes from the
user. The texts and values of a plugin are made safe to print, because its ``__str__`` and ``__repr__`` may raise, exit,
or return anything. What the code prints goes to stderr, apart from kvframe's own output.

Python cannot contain everything: code that ends the process (``os._exit``, a crash in C), never returns, raises in its
own thread, or changes the process (``os.chdir``, ``signal``, ``warnings``, attributes of other modules) takes effect.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from importlib.metadata import Distribution, distributions
from traceback import walk_tb
from typing import Any, TypeVar

from kvframe.contract.errors import KVFrameError, ModelError, PluginError, shorten, shown

T = TypeVar("T")

MAX_CHARACTERS = 1000
"""The most characters of a plugin's text that are shown."""


def call(
    what: str,
    function: Callable[..., T],
    /,
    *args: Any,
    passes: tuple[type[KVFrameError], ...] = (),
    **kwargs: Any,
) -> T:
    """Call a function of a plugin and return its answer.

    Args:
        what: What is called, for the error: the plugin or the registered name, then the hook or the method
            (``"backend 'kvframe-x:x': unusable_reason()"``).
        function: The plugin's function, or what calls it (``getattr`` for an attribute that may be computed).
        args: Its arguments.
        passes: The errors of kvframe that the contract lets the function raise; they pass as they are.
        kwargs: Its arguments by name.

    Raises:
        PluginError: It raised anything but ``passes`` and ``KeyboardInterrupt``.
    """
    try:
        with _printing_to_stderr:
            return function(*args, **kwargs)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if issubclass(type(error), passes) and _is_readable(error):
            raise
        text = safe_text(error)
        raise PluginError(f"{what} failed: {explain_failed_import(error, text) or text}") from error


def refuse_exit(what: str, error: BaseException) -> None:
    """Raise a ``ModelError`` in place of an exception that would end the program without a word, like ``SystemExit``.

    Nothing is done for an ``Exception``, and for ``KeyboardInterrupt``; ``what`` failed, for the error.
    """
    if not isinstance(error, Exception | KeyboardInterrupt):
        raise ModelError(f"{what}: {safe_text(error)}") from error


class _PrintingToStderr:
    """Lets ``sys.stdout`` be ``sys.stderr`` while a block runs, in any order in which threads enter and leave it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._stdout: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if self._num_inside == 0:
                self._stdout, sys.stdout = sys.stdout, sys.stderr
            self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside == 0:
                sys.stdout = self._stdout


_printing_to_stderr = _PrintingToStderr()


def safe_text(error: BaseException) -> str:
    """Return an error of a plugin as ``Type: message``, in one line of printable characters, shortened if long."""
    return f"{_type_name(error)}: {in_one_line(_read(str, error))}".rstrip(": ")


def safe_reason(error: BaseException) -> str:
    """Return an error's message without its type, as ``safe_text`` shows it; the type if it has none."""
    argument: Any = error.args[0] if error.args else None
    return in_one_line(argument) if issubclass(type(argument), str) else safe_text(error)


def safe_repr(value: Any) -> str:
    """Return ``repr(value)`` of a plugin's value, in one line of printable characters, shortened if long."""
    return in_one_line(_read(repr, value))


def in_one_line(text: str) -> str:
    """Return a text with each run of white space as one space, control characters escaped, shortened if long."""
    beginning = str.__getitem__(text, slice(0, 8 * MAX_CHARACTERS))
    line = "".join(char if char.isprintable() else _escape(char) for char in " ".join(beginning.split()))
    left_out = len(line) - MAX_CHARACTERS + str.__len__(text) - len(beginning)
    return line if left_out <= 0 else f"{line[:MAX_CHARACTERS]}... ({left_out} more characters)"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _read(reader: Callable[[Any], str], value: Any) -> str:
    """Return what ``str`` or ``repr`` says of a value, or what this raises."""
    try:
        return reader(value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"<{reader.__name__}() of {_type_name(value)} raises {_type_name(error)}>"


def _is_readable(error: BaseException) -> bool:
    try:
        str(error)
        return True
    except KeyboardInterrupt:
        raise
    except BaseException:
        return False


def _type_name(value: Any) -> str:
    """Return the name of a value's class, which its metaclass cannot compute."""
    name: str = type.__dict__["__name__"].__get__(type(value))
    return in_one_line(name)


# --- failed imports ---------------------------------------------------------------------------------------------------


def explain_failed_import(error: BaseException, text: str) -> str | None:
    """Return why torch cannot be imported and what to do; None if an error, ``text`` in one line, has another cause.

    At its import, torch reads the entry points of every installed distribution, so that one broken
    ``entry_points.txt`` prevents it.
    """
    if isinstance(error, ModuleNotFoundError) and _is_torch(error.name):
        return "torch is not installed; try: pip install torch"
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
    is_of_torch = any(map(_is_torch, modules)) and not any(map(_is_torch, sys.modules))
    if not is_of_torch and not any(module.startswith("importlib.metadata") for module in modules):
        return None
    for dist in distributions():
        try:
            tuple(dist.entry_points)
        except Exception as reason:
            name, location = _identify(dist)
            return (
                f"the distribution {name}{location} has an entry_points.txt that cannot be read "
                f"({shorten(f'{type(reason).__name__}: {reason}')}), and torch reads it when it is imported; "
                "reinstall or uninstall that distribution, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
            )
    return f"torch cannot be imported: {text}" if is_of_torch else None


def _is_torch(module: str | None) -> bool:
    return f"{module}." == "torch."  # without the dot, the name is that of a backend


def _identify(dist: Distribution) -> tuple[str, str]:
    """Return a distribution's name, and where it lies, as far as they can be read."""
    try:
        return shown(dist.metadata["Name"]), f" in {dist.locate_file('')}"
    except Exception:
        return "of an unknown name", ""
