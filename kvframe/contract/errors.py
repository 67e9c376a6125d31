"""All errors that a user can cause.

A message says what was asked, what exists and what to do. ``assert`` is kept for kvframe's own bugs.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from typing import Any

MAX_TEXT = 200
"""The most characters of a value that an error shows."""

MAX_NAMES = 30
"""The most names that an error lists."""

_MAX_COMPARED = 5_000
"""The most names that are compared to find the nearest: each takes microseconds, and a file may have any number."""


def shorten(text: str, limit: int = MAX_TEXT) -> str:
    """Return ``text``, without its middle if it is longer than ``limit`` characters."""
    if len(text) <= limit:
        return text
    return f"{text[: limit * 2 // 3]} … {text[-limit // 3 :]} ({len(text):,} characters)"


def shown(value: Any, limit: int = MAX_TEXT) -> str:
    """Return how a value is written in Python, without its middle if that is long."""
    try:
        return shorten(repr(value), limit)
    except Exception:  # a number of too many digits, a value nested too deeply, a foreign repr that raises
        return f"a {type(value).__name__} that cannot be shown"


def listed(names: Iterable[str], limit: int = MAX_NAMES) -> str:
    """Return names on one line, the first ones if there are more than ``limit``."""
    all_names = [*names]
    ending = f", … and {len(all_names) - limit:,} more" if len(all_names) > limit else ""
    return ", ".join(map(shorten, all_names[:limit])) + ending


def nearest_of(name: str, known_names: Collection[str]) -> str | None:
    """Return the known name that is most like ``name``; None if none is like it, or there are too many to compare."""
    if len(name) > MAX_TEXT or len(known_names) > _MAX_COMPARED:
        return None
    return next(iter(difflib.get_close_matches(name, known_names, n=1)), None)


class KVFrameError(Exception):
    """Base of every error that a user's input, file, plugin or model can cause."""


class CodedError(KVFrameError):
    """An error with a stable ``snake_case`` ``code`` for programs, beside the sentence for a person."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class UnknownNameError(KVFrameError):
    """A name is used that no installed plugin provides."""

    def __init__(self, what: str, name: str, known: Iterable[str], hint: str = "") -> None:
        """Compose the sentence.

        Args:
            what: What the name was to be (``"backend"``, ``"cache spec"``).
            name: The name that was asked for.
            known: The names that exist.
            hint: What to do, if more than picking a known name helps.
        """
        existing = sorted(known)
        nearest = nearest_of(name, existing)
        parts = [f"there is no {what} named {shown(name)}"]
        parts.append(f"known: {listed(existing)}" if existing else "none is known")
        if nearest is not None:
            parts.append(f"did you mean {nearest!r}?")
        if hint:
            parts.append(hint)
        super().__init__("; ".join(parts))
        self.name = name
        self.hint = hint


class ContestedNameError(KVFrameError):
    """A name that two plugins claim is used without the name of the plugin."""


class PluginError(KVFrameError):
    """A plugin that the stack requires cannot be used."""


class StackError(CodedError):
    """A stack file (or the options that stand for one) is wrong: file, key, what exists.

    The code is ``not_captured``, ``nothing_generated`` or ``no_hidden_states`` if the parts of the stack do not go
    together.
    """

    def __init__(self, message: str, code: str = "bad_stack") -> None:
        super().__init__(message, code)


class FileError(KVFrameError):
    """A file cannot be read or has the wrong content. The caller puts the file's name before the sentence."""


class SpecError(KVFrameError):
    """A cache spec or a layer spec is not valid."""


class PlanError(KVFrameError):
    """No cache plan satisfies what was asked."""


class BackendError(CodedError):
    """No backend can serve a layer, the named backend cannot, or a backend or builder breaks the contract.

    The code is that of the ``Refusal`` if one is the reason.
    """

    def __init__(self, message: str, code: str = "not_served") -> None:
        super().__init__(message, code)


class WrapperError(CodedError):
    """A wrapper cannot serve a layer or a step, or the wrappers of a chain must not be in this order."""


class BatchError(KVFrameError):
    """A step's batch cannot be padded as asked."""


class ModelError(CodedError):
    """A model cannot be read, understood or served.

    The code is ``not_compiled`` if the model can be served, and cannot be compiled.
    """

    def __init__(self, message: str, code: str = "bad_model") -> None:
        super().__init__(message, code)


class RequestError(CodedError):
    """One request is refused; the others continue."""

    def __init__(self, message: str, code: str = "invalid_request") -> None:
        super().__init__(message, code)
