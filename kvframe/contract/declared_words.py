"""Checks the words in which a backend declares what it can do."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import torch

from kvframe.contract.capture import GraphCapture
from kvframe.contract.errors import BackendError, UnknownNameError
from kvframe.contract.formats import ITEM_BYTES
from kvframe.contract.metadata import RANGE_ENDS, SEQ_STARTS

MASK_FEATURES = (
    *("causal", "bidirectional", "bidirectional_window", "window", "sink_tokens", "chunk", "ranges"),
    *("mask_function", "live_range", "sparse"),
)
"""Every word for a mask: the features of ``AttentionMask``, what a request may add to any mask (``ranges``), and the
three general ways to say which tokens are seen."""

EXTENSIONS = (SEQ_STARTS, RANGE_ENDS)
"""The extensions of the batch metadata that kvframe itself makes. Wrappers of plugins may make others."""

CHOICES = ("tokens", "blocks")
"""What can be chosen by content for a query."""

USUAL_DEVICES = ("cpu", "cuda", "hpu", "meta", "mps", "mtia", "xla", "xpu")
"""The device types that a message names. torch says which ones there are."""

NEAR = 0.85
"""A name of a plugin's own that is this similar to a known one is taken for a misspelling (``difflib``'s ratio)."""


Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]

_WORD = re.compile(r"[a-z][a-z0-9_]*")


# --- converters: they leave what is wrong as it is, for the validators to name ----------------------------------------


def as_set(value: Any) -> Any:
    """Return a collection of words or numbers as a frozen set, anything else unchanged."""
    if isinstance(value, str | bytes):
        return value
    try:
        return frozenset(value)
    except TypeError:
        return value


def as_sizes(value: Any) -> Any:
    """Return sizes by field name as a mapping of frozen sets that cannot change, anything else unchanged."""
    if not isinstance(value, Mapping):
        return value
    return MappingProxyType({name: as_set(sizes) for name, sizes in value.items()})


# --- validators -------------------------------------------------------------------------------------------------------


def known_devices(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validate that torch knows every device type."""
    _require_some(attribute, value)
    for name in _strings(attribute, value):
        try:
            is_known = torch.device(name).type == name
        except RuntimeError:
            is_known = False
        if not is_known:
            hint = "a device type of another package is known once that package is imported"
            raise _error(str(UnknownNameError("device type", name, USUAL_DEVICES, hint)), attribute)


def words(noun: str = "", known_words: Collection[str] = (), *, is_optional: bool = True) -> Validator:
    """Return an attrs validator of a set of snake_case words, of the known ones if there are any."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        # A backend that only computes the attention that types define has no masks.
        if not is_optional and not (attribute.name == "masks" and instance.kinds):
            _require_some(attribute, value)
        for name in _words(attribute, value):
            if known_words and name not in known_words:
                raise _error(str(UnknownNameError(noun, name, known_words)), attribute)

    return check


known_masks = words("mask feature", MASK_FEATURES, is_optional=False)
known_dtypes = words("dtype", ITEM_BYTES, is_optional=False)
known_choices = words("choice", CHOICES)
names = words(is_optional=False)
optional_names = words()


def extension_names(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validate that every word is a name, and none nearly one of ``EXTENSIONS``."""
    for name in _words(attribute, value):
        nearest = difflib.get_close_matches(name, EXTENSIONS, n=1, cutoff=NEAR)
        if name not in EXTENSIONS and nearest:
            raise _error(str(UnknownNameError("extension", name, EXTENSIONS)), attribute)


def flag(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validate that a value is True or False."""
    if not isinstance(value, bool):
        raise _error(f"{_shown(value)} is neither True nor False", attribute)


def batches(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validate that a value is a ``GraphCapture``."""
    if not isinstance(value, GraphCapture):
        raise _error(f"{_shown(value)} is no GraphCapture, like GraphCapture.ALWAYS", attribute)


def whole_number(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validate that a value is a whole number."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise _error(f"{_shown(value)} is not a whole number", attribute)


def size(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validate that a value is a whole number of at least 1."""
    whole_number(instance, attribute, value)
    if value < 1:
        raise _error(f"{_shown(value)} is not at least 1", attribute)


def optional_sizes(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validate that a set has sizes; None stands for any size."""
    if value is not None:
        _require_some(attribute, value, "; None stands for any size")
        for number in value:
            size(instance, attribute, number)


def sizes_by_field(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validate that every field is named by a word and has sizes."""
    if not isinstance(value, Mapping):
        raise _error(f"sets of sizes by field name are needed, and {_shown(value)} is given", attribute)
    _words(attribute, frozenset(value))
    for sizes in value.values():
        optional_sizes(instance, attribute, sizes)


def _words(attribute: attrs.Attribute[Any], value: Any) -> list[str]:
    """Return the words in order; raises ``BackendError`` for what is no set, and for one that is no name."""
    words = _strings(attribute, value)
    for name in words:
        if not _WORD.fullmatch(name):
            raise _error(f"{_shown(name)} must be snake_case, like 'sink_tokens'", attribute)
    return words


def _strings(attribute: attrs.Attribute[Any], value: Any) -> list[str]:
    _require_set(attribute, value)
    for name in value:
        if not isinstance(name, str):
            raise _error(f"{_shown(name)} is not a string", attribute)
    return sorted(value)


def _require_some(attribute: attrs.Attribute[Any], value: Any, hint: str = "") -> None:
    _require_set(attribute, value)
    if not value:
        raise _error(f"the set is empty, so that no layer could be served{hint}", attribute)


def _require_set(attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, frozenset):
        raise _error(f"a set is needed, and {_shown(value)} is given: write {{…}} around its words", attribute)


def _error(problem: str, attribute: attrs.Attribute[Any]) -> BackendError:
    return BackendError(f"capabilities: {attribute.name}: {problem}", "capabilities")


_shown = reprlib.repr
