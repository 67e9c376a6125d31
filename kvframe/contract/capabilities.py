"""Capabilities: what a backend can do, as data."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import torch
from attrs.validators import and_, deep_iterable, deep_mapping, optional

from kvframe.contract.capture import GraphCapture
from kvframe.contract.errors import BackendError, UnknownNameError
from kvframe.contract.formats import ITEM_BYTES, PLAIN
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

KEYS_AND_VALUES = frozenset({"k", "v"})
"""The names of the state tensors that are keys and values."""

NEAR = 0.85
"""A name of a plugin's own that is this similar to a known one is taken for a misspelling (``difflib``'s ratio)."""


# --- converters: they leave what is wrong as it is, for the validators to name ----------------------------------------


def _as_set(value: Any) -> Any:
    if isinstance(value, str | bytes):
        return value
    try:
        return frozenset(value)
    except TypeError:
        return value


def _as_sizes(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return MappingProxyType({name: _as_set(sizes) for name, sizes in value.items()})


# --- validators -------------------------------------------------------------------------------------------------------

Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]


def _error(attribute: attrs.Attribute[Any], problem: str) -> BackendError:
    return BackendError(f"capabilities: {attribute.name}: {problem}", "capabilities")


def _is(is_right: Callable[[Any], object], problem: str) -> Validator:
    """Return a validator that raises with ``problem``, in which ``{}`` stands for the value."""

    def validate(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not is_right(value):
            raise _error(attribute, problem.format(reprlib.repr(value)))

    return validate


def _known(noun: str, known_words: Collection[str]) -> Validator:
    def validate(instance: Any, attribute: attrs.Attribute[Any], word: str) -> None:
        if word not in known_words:
            raise _error(attribute, str(UnknownNameError(noun, word, known_words)))

    return validate


def _not_misspelt(instance: Any, attribute: attrs.Attribute[Any], word: str) -> None:
    if word not in EXTENSIONS and difflib.get_close_matches(word, EXTENSIONS, n=1, cutoff=NEAR):
        raise _error(attribute, str(UnknownNameError("extension", word, EXTENSIONS)))


def _device(instance: Any, attribute: attrs.Attribute[Any], name: str) -> None:
    try:
        is_known = torch.device(name).type == name
    except RuntimeError:
        is_known = False
    if not is_known:
        hint = "a device type of another package is known once that package is imported"
        raise _error(attribute, str(UnknownNameError("device type", name, USUAL_DEVICES, hint)))


def _some_mask(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    # A backend that only computes the attention that types define has no masks.
    if not instance.kinds:
        _filled(instance, attribute, value)


_flag = _is(lambda value: isinstance(value, bool), "{} is neither True nor False")
_capture = _is(lambda value: isinstance(value, GraphCapture), "{} is no GraphCapture, like GraphCapture.ALWAYS")
_number = _is(lambda value: type(value) is int, "{} is not a whole number")
_size = and_(_number, _is(lambda value: value >= 1, "{} is not at least 1"))
_set = _is(lambda value: isinstance(value, frozenset), "a set is needed, and {} is given: write {{…}} around its words")
_filled = _is(bool, "the set is empty, so that no layer could be served")
_string = _is(lambda value: isinstance(value, str), "{} is not a string")
_word = and_(_string, _is(re.compile(r"[a-z][a-z0-9_]*").fullmatch, "{} must be snake_case, like 'sink_tokens'"))
_sizes = optional(
    and_(
        deep_iterable(_size, _set),
        _is(bool, "the set is empty, so that no layer could be served; None stands for any size"),
    )
)


def _words(*of_word: Validator, of_set: Validator = _set) -> Any:
    """Return the validator of a set of words: ``of_word`` checks each word, and ``of_set`` the set."""
    return and_(deep_iterable(and_(_word, *of_word), _set), of_set)


@attrs.frozen(kw_only=True)
class Capabilities:
    """What a backend can do, as data. Every value is checked when it is given; a wrong one raises ``BackendError``.

    Attributes:
        devices: Device types by torch's name (``"cpu"``, ``"cuda"``), without index.
        dtypes: Cache and query dtypes by torch's name.
        masks: Mask features: ``causal``, ``bidirectional``, ``bidirectional_window`` (``AttentionMask.lookahead``,
            which no other word includes), ``window``, ``sink_tokens``, ``chunk``; ``mask_function`` for every mask that
            ``KVCacheSpec.mask_function`` describes; ``live_range`` for every mask at all, derived from
            ``KVCacheSpec.live_ranges``; ``sparse`` for ``KVCacheSpec.mask_function`` also if a query sees fewer tokens
            than are live; ``ranges`` if it reads the extension ``RANGE_ENDS``, which no layer needs: prompts that state
            such ranges are refused without it.
        extensions: Extensions of the batch metadata that it supports (``{"seq_starts"}``).
        state: Names of the state tensors that it reads in the plain format. ``{"k", "v"}`` are keys and values, of one
            dtype: ``[block_size, num_kv_heads, head_size]`` and ``[block_size, num_kv_heads, head_size_v]``. A type
            whose state has these names and other shapes is refused, so its backends need not look at them.
        formats: Formats of stored keys and values that it reads and writes itself.
        takes_copies: Whether it may be given copies of a step's pages, with a block table of their own, instead of the
            pool. So it serves keys and values of any format: the format converts them into the copies.
        reads_dead_tokens: Whether it also reads tokens before the window, with a weight of zero, if their page holds
            live tokens. They are the request's own, so they are finite if the model's keys and values are.
        soft_cap: Whether it supports a soft cap on the scores.
        sinks: Whether it supports learned sink logits.
        relative_bias: Whether it supports a learned bias by distance.
        alibi: Whether it supports ``QuerySpec.alibi_slopes``.
        head_sizes: The head sizes that it supports; None for all.
        separate_value_size: Whether value vectors may differ in size from key vectors.
        returns_lse: Whether ``attend`` writes the log-sum-exp, by which ``merge_attention`` merges results.
        choices: Which choices by content it honours (``QuerySpec.choice``): ``tokens``, ``blocks``.
        kinds: Cache specs, by registered name, whose own attention it computes (``KVCacheSpec.dense_attention``). A
            backend that declares some, and serves nothing else, declares no masks.
        block_size_multiple: The block size must be a multiple of this.
        spec_sizes: For fields of specs, the values that it supports (``{"latent_size": frozenset({512})}``).
            Another value is refused with the field's name as the code. A field that is not listed may have any value.
        capture: For which batches its steps can be captured as graphs: the ``capture`` of its builders. If a stack
            names sizes of graphs, ``backend = "auto"`` takes a backend that can be captured, if one can serve the
            layer.
        preference: If several backends can serve a layer, ``backend = "auto"`` takes the one with the highest.
    """

    devices: frozenset[str] = attrs.field(
        converter=_as_set, validator=and_(deep_iterable(and_(_string, _device), _set), _filled)
    )
    dtypes: frozenset[str] = attrs.field(
        converter=_as_set, validator=_words(_known("dtype", ITEM_BYTES), of_set=_filled)
    )
    masks: frozenset[str] = attrs.field(
        converter=_as_set, validator=_words(_known("mask feature", MASK_FEATURES), of_set=_some_mask)
    )
    extensions: frozenset[str] = attrs.field(default=frozenset(), converter=_as_set, validator=_words(_not_misspelt))
    state: frozenset[str] = attrs.field(default=KEYS_AND_VALUES, converter=_as_set, validator=_words(of_set=_filled))
    formats: frozenset[str] = attrs.field(default=frozenset({PLAIN.name}), converter=_as_set, validator=_words())
    takes_copies: bool = attrs.field(default=False, validator=_flag)
    reads_dead_tokens: bool = attrs.field(default=False, validator=_flag)
    soft_cap: bool = attrs.field(default=False, validator=_flag)
    sinks: bool = attrs.field(default=False, validator=_flag)
    relative_bias: bool = attrs.field(default=False, validator=_flag)
    alibi: bool = attrs.field(default=False, validator=_flag)
    head_sizes: frozenset[int] | None = attrs.field(default=None, converter=_as_set, validator=_sizes)
    separate_value_size: bool = attrs.field(default=False, validator=_flag)
    returns_lse: bool = attrs.field(default=False, validator=_flag)
    choices: frozenset[str] = attrs.field(
        default=frozenset(), converter=_as_set, validator=_words(_known("choice", CHOICES))
    )
    kinds: frozenset[str] = attrs.field(default=frozenset(), converter=_as_set, validator=_words())
    block_size_multiple: int = attrs.field(default=1, validator=_size)
    spec_sizes: Mapping[str, frozenset[int]] = attrs.field(
        default=MappingProxyType({}),
        converter=_as_sizes,
        validator=deep_mapping(
            _word,
            _sizes,
            _is(lambda value: isinstance(value, Mapping), "sets of sizes by field name are needed, and {} is given"),
        ),
        hash=False,
    )
    capture: GraphCapture = attrs.field(default=GraphCapture.NEVER, validator=_capture)
    preference: int = attrs.field(default=0, validator=_number)
