"""Finds the format of a checkpoint's answers among the installed ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

from kvframe.contract import PluginError, StackError, UnknownNameError
from kvframe.contract.foreign import call
from kvframe_serve.answers.format import AnswerFormat

GROUP = "kvframe.answers"
"""The group of entry points. Each is a name, and the import string of an ``AnswerFormat``, an object and no class."""

_OWN_PACKAGE = "kvframe-serve"

_log = logging.getLogger("kvframe")


def find_format(template: str, format_name: str | None = None) -> AnswerFormat | None:
    """Return the format of answers to a chat template; None if no installed format matches it.

    Args:
        template: The text of the checkpoint's chat template.
        format_name: The name that the stack gives. It is used whether it matches or not.

    Raises:
        UnknownNameError: No format has the name ``format_name``.
        PluginError: The format with the name ``format_name`` cannot be imported.
        StackError: Several formats match the template.
    """
    claims = _claims()
    if format_name is not None:
        if format_name not in claims:
            raise UnknownNameError("format of answers", format_name, claims)
        return _load(claims[format_name])
    matching = {}
    for name, claim in claims.items():
        try:
            form = _load(claim)
            if call(f"matches() of the format of answers {name!r}", form.matches, template):
                matching[name] = form
        except PluginError as error:
            _log.error("%s; it is set aside", error)
    if len(matching) > 1:
        names = " and ".join(map(repr, matching))
        raise StackError(
            f'the chat template matches the formats of answers {names}; choose one: [plugin.serve] answers = "NAME"'
        )
    return next(iter(matching.values()), None)


def _claims() -> Mapping[str, EntryPoint]:
    """Return the entry points by name, without names that two distributions claim; no other one claims a built-in."""
    by_name: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        by_name.setdefault(entry.name, []).append(entry)
    claims = {}
    for name in sorted(by_name):
        claiming = by_name[name]
        if len(claiming) > 1:
            owners = " and ".join(sorted(map(_owner, claiming)))
            _log.error(
                "the distributions %s claim the format of answers %r; it is theirs only if one is removed", owners, name
            )
            claiming = [entry for entry in claiming if _owner(entry) == _OWN_PACKAGE]
        if claiming:
            claims[name] = claiming[0]
    return claims


def _owner(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "an unknown one"


def _load(entry: EntryPoint) -> AnswerFormat:
    label = f"the format of answers {entry.name!r} of {_owner(entry)}"
    form = call(f"importing {label}", entry.load)
    if not isinstance(form, AnswerFormat):
        raise PluginError(f"{label} is no AnswerFormat: {entry.value!r} must be an object of a class of it")
    return form
