"""Every error a user can cause, in one place.

A message says what was asked, what exists and what to do. ``assert`` is kept for kvframe's own bugs.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KVFrameError(Exception):
    """Base of every error that a user's input, file, plugin or model can cause."""


class UnknownNameError(KVFrameError):
    """A name was asked for that nothing provides."""

    def __init__(self, what: str, name: str, known: Iterable[str], hint: str = "") -> None:
        """Compose the sentence.

        Args:
            what: What the name was to be (``"backend"``, ``"cache spec"``).
            name: The name that was asked for.
            known: The names that exist.
            hint: What to do, if more than picking a known name helps.
        """
        existing = sorted(known)
        nearest = difflib.get_close_matches(name, existing, n=1)
        parts = [f"there is no {what} named {name!r}"]
        parts.append(f"known: {', '.join(existing)}" if existing else "none is known")
        if nearest:
            parts.append(f"did you mean {nearest[0]!r}?")
        if hint:
            parts.append(hint)
        super().__init__("; ".join(parts))
        self.name = name
        self.hint = hint


class ContestedNameError(KVFrameError):
    """A name that two plugins claim was used without saying whose is meant."""


class PluginError(KVFrameError):
    """A plugin that the stack requires cannot be used."""


class StackError(KVFrameError):
    """A stack file (or the options that stand for one) is wrong: file, key, what exists."""


class SpecError(KVFrameError):
    """A cache spec or a layer spec is not valid."""


class PlanError(KVFrameError):
    """No cache plan satisfies what was asked."""


class BackendError(KVFrameError):
    """No backend can serve a layer, the one that was named cannot, or one is called otherwise than was agreed."""

    def __init__(self, message: str, code: str = "not_served") -> None:
        """Keep a stable code beside the sentence.

        Args:
            message: The sentence for a person.
            code: The ``snake_case`` code for a program: that of a ``Refusal``, where one is the reason.
        """
        super().__init__(message)
        self.code = code


class WrapperError(KVFrameError):
    """A wrapper cannot serve a layer or take a step, or a chain has an order that its wrappers forbid."""

    def __init__(self, message: str, code: str) -> None:
        """Keep a stable code beside the sentence.

        Args:
            message: The sentence for a person.
            code: The ``snake_case`` code for a program.
        """
        super().__init__(message)
        self.code = code


class BatchError(KVFrameError):
    """A step's batch cannot be cut or padded as asked."""


class ModelError(KVFrameError):
    """A model cannot be read, understood or served."""


class RequestError(KVFrameError):
    """One request is refused; the others go on."""

    def __init__(self, message: str, code: str = "invalid_request") -> None:
        """Keep a stable code beside the sentence.

        Args:
            message: The sentence for a person.
            code: The ``snake_case`` code for a program.
        """
        super().__init__(message)
        self.code = code


class PrefixFileError(KVFrameError):
    """A file of saved prefixes cannot be written, read, or used for this model."""

    def __init__(self, message: str, code: str) -> None:
        """Keep a stable code beside the sentence.

        Args:
            message: The sentence for a person.
            code: The ``snake_case`` code for a program: ``unwritable``, ``unreadable``, ``damaged``, ``version``,
                ``other_model``, ``other_cache``, ``no_key``, ``other_key``.
        """
        super().__init__(message)
        self.code = code
