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
from kvframe.testing.checks import Check, Checks, make_part
from kvframe.testing.laws import ConformanceError, answer_of, require

Events = Sequence[Mapping[str, Any]]
Read = Callable[[EventPublisher], Events | None]
"""Returns the last events that an open publisher has sent so far, in order; None if nobody can say."""

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
    """Check a publisher, called as an engine calls it: in a thread of its own, opened several times, and nobody reads.

    * *open*: ``open`` returns an ``OpenEventPublisher``, also again after ``close``;
    * *publish*: it takes events of each type, also types and fields of later versions, and does not change them;
    * *time*: it takes two thousand calls in half a minute, whoever listens;
    * *close*: it raises nothing, and no thread of the publisher runs after it;
    * *order*: what it sent is what it was given, in order, if ``read`` says what it sent. Fields may be missing, and
      events of later types.
    """
    for name in BATCHES:
        check_batches(publisher, name, read)


def check_batches(publisher: EventPublisher, name: str, read: Read) -> None:
    """Open a publisher, publish the ``BATCHES`` of a name, and close it."""
    failures: list[ConformanceError] = []
    before = {*threading.enumerate()}

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
    _wait(lambda: not {*threading.enumerate()} - before, 1.0)
    left = sorted(thread.name for thread in {*threading.enumerate()} - before)
    require(not left, publisher, f"close: threads run on after close(): {', '.join(left)}")


def _publish(publisher: EventPublisher, batches: Sequence[Events], read: Read) -> None:
    def asked(label: str, method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return method(*arguments)
        except BaseException as error:
            raise ConformanceError(f"{publisher!r}: {label} failed: {safe_text(error)}") from error

    opened = asked("open: open()", publisher.open)
    is_right = isinstance(opened, OpenEventPublisher)
    require(is_right, publisher, f"open: open() has to return an OpenEventPublisher, not {opened!r}")
    try:
        for events in batches:
            passed = copy.deepcopy([*events])
            asked("publish: publish()", opened.publish, passed)
            require(passed == [*events], publisher, f"publish: publish() changes its argument {[*events]}")
        _check_order(publisher, [event for event in chain.from_iterable(batches) if event["type"] in _TYPES], read)
    finally:
        asked("close: close()", opened.close)


def _check_order(publisher: EventPublisher, given: Events, read: Read) -> None:
    sent: Events = ()

    def is_all_sent() -> bool:
        nonlocal sent
        events = read(publisher)
        known = given if events is None else [event for event in events if event.get("type") in _TYPES]
        sent = known[-len(given) :]
        return len(sent) == len(given) and all(map(_is_told, given, sent))

    if not _wait(is_all_sent, _READ_SECONDS):
        equal = [*map(_is_told, given, sent), False]
        index = equal.index(False)
        found = sent[index] if index < len(sent) else "nothing"
        require(False, publisher, f"order: event {index} of {len(given)} is {given[index]}, and it sent {found}")


def _is_told(given: Mapping[str, Any], sent: Mapping[str, Any]) -> bool:
    """Return whether a sent event is a given one; it may lack fields."""
    required = {"type", "layout" if given["type"] == "cleared" else "keys"}
    return required <= sent.keys() and all(_plain(given[name]) == _plain(sent[name]) for name in sent if name in given)


def _plain(value: Any) -> Any:
    """Return a value with a list for each sequence, as serialisers return them."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


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
