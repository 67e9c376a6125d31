"""Numbered batches of events, and events as plain values that any serialiser takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from kvframe.cache.events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent
from kvframe.cache.layout import CacheLayout, GroupLayout
from kvframe.cache.live_range import Need

T = TypeVar("T")

_KINDS: Mapping[str, type[Any]] = {"stored": BlocksStored, "removed": BlocksRemoved, "cleared": CacheCleared}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_FIELDS = {kind: tuple(field.name for field in attrs.fields(kind)) for kind in _NAMES}


@attrs.frozen
class EventBatch:
    """Events that an engine sends together.

    Attributes:
        epoch: Drawn when the engine begins to send: numbers of different epochs have nothing to do with each other.
        number: Counted from 0 on, without a gap. A snapshot has the number of the last batch that it contains.
        events: The events, in order.
    """

    epoch: bytes
    number: int
    events: Sequence[CacheEvent]


def to_plain(events: Iterable[CacheEvent], *, with_tokens: bool = True) -> list[dict[str, Any]]:
    """Return events as dictionaries of texts, numbers, bytes, sequences, dictionaries and None.

    Each has the fields of its class, and its ``type``: ``"stored"``, ``"removed"`` or ``"cleared"``.

    Args:
        events: The events.
        with_tokens: Whether they contain token ids. From keys, a reader without the secret learns nothing.
    """
    plain = []
    for event in events:
        values = {name: getattr(event, name) for name in _FIELDS[type(event)]}
        if isinstance(event, CacheCleared):
            values["layout"] = attrs.asdict(event.layout)
        elif not with_tokens:
            values.pop("tokens", None)
        plain.append({"type": _NAMES[type(event)], **values})
    return plain


def from_plain(plain: Iterable[Mapping[str, Any]]) -> list[CacheEvent]:
    """Return events that ``to_plain`` wrote. Types and fields that this version does not know are ignored.

    Raises:
        ValueError: A value is not an event.
    """
    try:
        return [_event_of(values) for values in plain if values["type"] in _KINDS]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"events cannot be read: {error}") from error


def _event_of(values: Mapping[str, Any]) -> CacheEvent:
    kind = _KINDS[values["type"]]
    changed: dict[str, Any] = {name: tuple(values[name]) for name in ("keys", "tokens") if name in values}
    if kind is CacheCleared:
        changed["layout"] = _layout_of(values["layout"])
    event: CacheEvent = _make(kind, {**values, **changed})
    return event


def _layout_of(values: Mapping[str, Any]) -> CacheLayout:
    groups = tuple(
        _make(GroupLayout, {**group, "need": None if group["need"] is None else _need_of(group["need"])})
        for group in values["groups"]
    )
    return _make(CacheLayout, {**values, "groups": groups})


def _need_of(values: Mapping[str, Any]) -> Need:
    return _make(Need, {**values, "deaths": tuple((count, death, step) for count, death, step in values["deaths"])})


def _make(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return an instance of a class made of those of the values that it has fields for."""
    names = (field.name for field in attrs.fields(kind))  # type: ignore[arg-type]
    return kind(**{name: values[name] for name in names if name in values})
