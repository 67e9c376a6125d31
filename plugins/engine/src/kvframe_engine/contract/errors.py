"""Errors that only an engine raises."""

from __future__ import annotations

from kvframe.contract.errors import CodedError


class EngineError(CodedError):
    """An engine cannot serve a call.

    The code is ``closed``, ``busy`` if another call of it is running, ``ranks`` if ranks cannot be joined,
    ``ranks_differ`` if they have different packages, or ``several_ranks`` if a model over several ranks cannot do it.
    """


class PrefixFileError(CodedError):
    """A file of saved prefixes cannot be written, read, or used for this model.

    The code is ``unwritable``, ``unreadable``, ``damaged``, ``version``, ``other_model``, ``other_cache``, ``no_key``,
    ``other_key`` or ``several_ranks``.
    """
