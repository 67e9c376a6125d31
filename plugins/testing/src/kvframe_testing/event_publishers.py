"""Checks that an event publisher keeps the laws of ``check_publisher``. Imports no torch."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from kvframe.contract.event_publisher import EventPublisher, OpenEventPublisher
from kvframe.contract.foreign import safe_text
from kvframe_testing.checks import Check, Checks, make_part
from kvframe_testing.laws import ConformanceError, answer_of, require

Events = Sequence[Mapping[str, Any]]
Read = Callable[[EventPublisher], Events | None]
"""Returns the last events that an open publisher has sent so far, in order; None if that is not known."""

MAX_SECONDS = 30.0
"""The longest that a publisher may take for all events of a check."""
_READ_SECONDS = 10.0

_KEYS = tuple(bytes([index]) * 32 for index in range(4))
_GROUP = {"group": 0, "block_size": 16, "sequence": "tokens"}
_NEED = {"last": None, "first": 0, "chunk": None, "deaths": ()}
_LAYOUT = {"alignment": 16, "max_tokens": 4096, "groups": ({**_GROUP, "need": _NEED},)}
CLEARED: Mapping[str, Any] = {"type": "cleared", "layout": _LAYOUT}
STORED: Mapping[str, Any] = {
    **_GROUP,
    "type": "stored",
    "keys": _KEYS[:2],
    "medium": "device",
    "parent": _KEYS[2],
    "start": 16,
    "tokens": tuple(range(32)),
    "salt": "",
}
_COPIED = {**STORED, "medium": "host_memory", "parent": None, "start": None, "tokens": (), "salt": None}
_INPUT = {**STORED, "sequence": "encoder", "tokens": (), "start": 0}
REMOVED: Mapping[str, Any] = {"type": "removed", "group": 0, "keys": _KEYS[:1], "medium": "device"}

BATCHES: Mapping[str, Sequence[Events]] = {
    "each-type": ([CLEARED, STORED], [_COPIED, _INPUT], [REMOVED], [CLEARED], [STORED, REMOVED]),
    "later-versions": ([CLEARED, {**STORED, "added": 1}], [{"type": "added", "keys": _KEYS}], [REMOVED]),
    "many": ([CLEARED], *([{**STORED, "keys": (index.to_bytes(32, "little"),)}] for index in range(2_000))),
}
"""What is published in each check, call by call."""
_TYPES = ("cleared", "stored", "removed")


def check_publisher(publisher: EventPublisher, read: Read = lambda publisher: None) -> None:
    """Check a publisher, called as an engine calls it: in a thread of its own, several times, without readers.

    * *open*: ``open`` returns an ``OpenEventPublisher``, also again after ``close``;
    * *publish*: it takes events of each type, also types and fields of later versions, and does not change them;
    * *time*: it takes two thousand calls in half a minute, with and without readers;
    * *close*: it raises nothing, and no thread of the publisher runs after it;
    * *order*: what it sent is what it was given, in order, if ``read`` says what it sent. Fields may be missing, and
      events of later types.
    """
    for name in BATCHES:
        check_batches(publisher, name, read)


def check_batches(publisher: EventPublisher, name: str, read: Read) -> None:
    """Open a publisher, publish the ``BATCHES`` of a name, and close it."""
    failures: list[ConformanceError] = []
    threads_before = {*threading.enumerate()}

    def run() -> None:
        try:
            _publish(publisher, BATCHES[name], read)
        except ConformanceError as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="kvframe-event-feed", daemon=True)
    thread.start()
    answer_of(name, thread.join, MAX_SECONDS)  # it prints to standard error meanwhile
    require(not thread.is_alive(), publisher, f"time: {name}: it has not ended in {MAX_SECONDS:g} seconds")
    if failures:
        raise failures[0]
    _wait(lambda: not {*threading.enumerate()} - threads_before, 1.0)
    names = sorted(thread.name for thread in {*threading.enumerate()} - threads_before)
    require(not names, publisher, f"close: threads run on after close(): {', '.join(names)}")


def _publish(publisher: EventPublisher, batches: Sequence[Events], read: Read) -> None:
    def answer(label: str, method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return method(*arguments)
        except BaseException as error:
            raise ConformanceError(f"{publisher!r}: {label} failed: {safe_text(error)}") from error

    opened = answer("open: open()", publisher.open)
    is_right = isinstance(opened, OpenEventPublisher)
    require(is_right, publisher, f"open: open() has to return an OpenEventPublisher, not {opened!r}")
    try:
        for events in batches:
            argument = copy.deepcopy([*events])
            answer("publish: publish()", opened.publish, argument)
            require(argument == [*events], publisher, f"publish: publish() changes its argument {[*events]}")
        _check_order(publisher, [event for event in chain.from_iterable(batches) if event["type"] in _TYPES], read)
    finally:
        answer("close: close()", opened.close)


def _check_order(publisher: EventPublisher, published: Events, read: Read) -> None:
    sent_events: Events = ()

    def is_all_sent() -> bool:
        nonlocal sent_events
        events = read(publisher)
        known_events = published if events is None else [event for event in events if event.get("type") in _TYPES]
        sent_events = known_events[-len(published) :]
        return len(sent_events) == len(published) and all(map(_is_told, published, sent_events))

    if not _wait(is_all_sent, _READ_SECONDS):
        equal = [*map(_is_told, published, sent_events), False]
        index = equal.index(False)
        sent_event = sent_events[index] if index < len(sent_events) else "nothing"
        raise ConformanceError(
            f"{publisher}: order: event {index} of {len(published)} is {published[index]}, and it sent {sent_event}"
        )


def _is_told(published: Mapping[str, Any], sent_event: Mapping[str, Any]) -> bool:
    """Return whether a sent event is a given one; it may lack fields."""
    required = {"type", "layout" if published["type"] == "cleared" else "keys"}
    return required <= sent_event.keys() and all(
        _plain(published[name]) == _plain(sent_event[name]) for name in sent_event if name in published
    )


def _plain(value: Any) -> Any:
    """Return a value with a list for each sequence, as serialisers return them."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _wait(holds: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not (is_so := holds()) and time.monotonic() < end:
        time.sleep(0.01)
    return is_so


def publisher_checks(
    publisher_class: type[EventPublisher],
    options: Mapping[str, Any] | None = None,
    *,
    name: str = "",
    read: Read = lambda publisher: None,
) -> Checks:
    """Return the checks of a publisher, one for each sequence of events; ``read`` is as for ``check_publisher``."""
    part = f"event publisher {name or publisher_class.name!r}"
    publisher = make_part(part, publisher_class, options)
    features = {"each-type": "events of each type", "later-versions": "events of later versions", "many": "many events"}
    checks = [
        Check(name=label, features=(features[label],), run=partial(check_batches, publisher, label, read))
        for label in BATCHES
    ]
    return Checks(part=part, checks=tuple(checks))
